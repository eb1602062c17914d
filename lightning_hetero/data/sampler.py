"""`TwoStageBatchSampler`: balanced batches of variable-length sequences for any strategy."""

import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from lightning_hetero.data.ahead import AheadPlanner, open_store
from lightning_hetero.data.candidates import Candidates
from lightning_hetero.data.loader import TicketDealer
from lightning_hetero.data.order import EpochOrder, Progress


class TwoStageBatchSampler(Sampler[list[int]]):
    """Yield this rank's sample indices of each step, with any DataLoader and strategy.

    ::

        sampler = TwoStageBatchSampler(lengths, tokens_per_step=100_000)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pack_samples)
        Trainer(strategy="ddp", use_distributed_sampler=False).fit(model, loader)

    The samples of a step are divided such that all ranks take about equally long, including
    attention's quadratic term. Every sample comes once per epoch. All ranks must iterate: they
    share the assignments through torch.distributed's store. DDP gives all ranks equal weight,
    however many tokens they have; `HeteroDataModule` under `HeteroStrategy` weights by tokens.

    Args:
        lengths: Tokens of each sample of the dataset.
        tokens_per_step: Tokens of a step on all ranks together, on average; see `data.order`.
        seed: Seed of the shuffle, the same on every rank.
        shuffle: Whether to shuffle the samples anew in every epoch.

    Raises:
        ConfigurationError: `tokens_per_step` is below the longest sample, or (later) there are
            fewer samples than ranks.
    """

    def __init__(
        self, lengths: ArrayLike, *, tokens_per_step: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        self._options: dict[str, Any] = {
            "lengths": lengths,
            "tokens_per_step": tokens_per_step,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._progress = Progress(
            seed=seed,
            shuffle=shuffle,
            num_samples=EpochOrder(**self._options).num_samples,
            tokens_per_step=tokens_per_step,
        )
        self._dealer: TicketDealer | None = None
        self.sampler = self
        """Itself: Lightning calls `set_epoch` only of a batch sampler's `sampler`."""

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share a step."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun."""
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of steps of every epoch."""
        return len(self._order())

    def __iter__(self) -> Iterator[list[int]]:
        if self._dealer is None:
            self._dealer = self._make_dealer()
        for ticket in self._dealer.deal(self._progress.cursor):
            self._progress.cursor = ticket.after
            yield list(ticket.microbatches[0])
        self._progress.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the last step that was yielded; the same on every rank."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume on any number of ranks; CheckpointError if the order or the budget differs."""
        self._progress.load_state_dict(state)

    def _order(self) -> EpochOrder:
        return EpochOrder(**self._options, min_samples=self.num_replicas)

    def _make_dealer(self) -> TicketDealer:
        """Return the dealer; collective."""
        planner = AheadPlanner(
            open_store(_from_rank_0, uuid.uuid4().hex), world_size=self.num_replicas
        )
        return TicketDealer(
            self._order(),
            planner,
            Candidates.equal_ranks(self.num_replicas),
            global_rank=dist.get_rank() if dist.is_initialized() else 0,
        )


def _from_rank_0(name: str) -> str:
    names = [name]
    dist.broadcast_object_list(names, 0)
    return names[0]
