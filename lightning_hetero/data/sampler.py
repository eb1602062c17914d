"""A batch sampler for variable-length sequences that works with any DataLoader and strategy.

::

    sampler = TwoStageBatchSampler(lengths, tokens_per_step=100_000)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollate())
    Trainer(strategy="ddp", use_distributed_sampler=False).fit(model, loader)

A step's samples are dealt so that all ranks take about equally long; the cost of a sample includes
attention's quadratic term. Every sample comes once an epoch. DDP weights all ranks equally, however
many tokens they have; `HeteroDataModule` under `HeteroStrategy` weights by tokens.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.data.ahead import AheadPlanner, AssignmentStore, open_store
from lightning_hetero.data.candidates import Candidates
from lightning_hetero.data.loader import TicketDealer
from lightning_hetero.data.order import EpochOrder, Progress

__all__ = ["TwoStageBatchSampler"]


class TwoStageBatchSampler(Sampler[list[int]]):
    """Yield this rank's sample indices of each step.

    Steps are planned when they are needed, in a few milliseconds. All ranks must iterate, as they
    share the assignments through torch.distributed's store.

    Args:
        lengths: Tokens of each sample of the dataset.
        tokens_per_step: Tokens of a step on all ranks together, on average; see `data.order`.
        seed: Seed of the shuffle, the same on every rank.
        shuffle: Whether to shuffle samples, in every epoch anew.
        ranks: (global rank, number of ranks); None takes torch.distributed's at first use.

    Raises:
        ConfigurationError: A budget below the longest sample, or (later) fewer samples than ranks.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        tokens_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        ranks: tuple[int, int] | None = None,
    ) -> None:
        if ranks is not None and not 0 <= ranks[0] < ranks[1]:
            raise ConfigurationError(f"ranks is {ranks}; give (global rank, number of ranks).")
        self._options: dict[str, Any] = {
            "lengths": lengths,
            "tokens_per_step": tokens_per_step,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._given_ranks = ranks
        self._order = EpochOrder(**self._options)
        self._progress = Progress(
            seed=seed,
            shuffle=shuffle,
            num_samples=self._order.num_samples,
            tokens_per_step=tokens_per_step,
        )
        self._dealer: TicketDealer | None = None

    @property
    def sampler(self) -> "TwoStageBatchSampler":
        """Itself: Lightning calls `set_epoch` only of a batch sampler's `sampler`."""
        return self

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share a step."""
        return self._ranks[1]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun."""
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of steps of every epoch."""
        return len(EpochOrder(**self._options, min_samples=self.num_ranks))

    def __iter__(self) -> Iterator[list[int]]:
        if self._dealer is None:
            self._dealer = self._make_dealer()
        for ticket in self._dealer.deal(self._progress.cursor):
            self._progress.cursor = ticket.after
            (batch,) = ticket.microbatches
            yield list(batch)
        self._progress.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the last step that was yielded; the same on every rank."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume on any number of ranks; CheckpointError if the order or the budget is another."""
        self._progress.load_state_dict(state)

    @property
    def _ranks(self) -> tuple[int, int]:
        if self._given_ranks is not None:
            return self._given_ranks
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def _make_dealer(self) -> TicketDealer:
        """Return the dealer; collective if ranks come from torch.distributed."""
        global_rank, num_ranks = self._ranks
        shared = self._given_ranks is None and num_ranks > 1
        store = open_store(_from_rank_0, uuid.uuid4().hex) if shared else AssignmentStore()
        return TicketDealer(
            EpochOrder(**self._options, min_samples=num_ranks),
            AheadPlanner(store, world_size=num_ranks if shared else 1),
            Candidates.equal_ranks(num_ranks),
            global_rank=global_rank,
            seed=self._options["seed"],
        )


def _from_rank_0(name: str) -> str:
    names = [name]
    dist.broadcast_object_list(names, 0)
    return names[0]
