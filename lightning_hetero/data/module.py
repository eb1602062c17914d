"""`HeteroDataModule`: variable-length sequences, assigned in two stages, a plan for each iteration.

Every iteration draws samples up to a budget of tokens, assigns them under every candidate plan of
the strategy and runs the best (Hydraulis §4), planned in the background while earlier iterations
train. On a single device without `HeteroStrategy` each iteration is one batch.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import ArrayLike
from typing_extensions import override

from lightning_hetero.assign import PipelineCost
from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.ahead import AheadPlanner, AssignmentStore, open_store
from lightning_hetero.data.candidates import Candidates, assumed_costs
from lightning_hetero.data.loader import AssignedLoader, BatchMaker, TicketDealer
from lightning_hetero.data.order import (
    EpochOrder,
    Progress,
)
from lightning_hetero.data.samples import TokenSamples, cached_lengths, let_models_attend_packed
from lightning_hetero.models import pack_samples

__all__ = ["HeteroDataModule"]

_NUM_SAMPLED = 20_000


class HeteroDataModule(pl.LightningDataModule):
    """Train on samples of different lengths, each once an epoch, balanced over the pipelines.

    Args:
        train_dataset: Samples of token ids (see `data.samples`), with a length and indices.
        val_dataset: The same for validation; samples come in order, under the first plan.
        tokens_per_step: Tokens of an iteration on all pipelines together, on average (see
            `data.order`).
        context_length: Most tokens of a sample; the rest of longer ones is cut off.
        lengths: Tokens of each training sample; None reads them once and caches them in a file.
        seed: Seed of the shuffle, the same on every rank.
        num_workers: Processes that read samples and collate.
        collate: Makes a micro-batch of a list of samples; None packs them end to end, and lets
            Hugging Face models in the module see where they end (`use_packed_attention`). Other
            models must keep them apart themselves, as `varlen_attention` does.
        num_ahead: Iterations planned ahead of the one that is dealt, by a process of rank 0; 0:
            each when it is needed, without a process.

    Raises:
        ConfigurationError: `context_length` is below 1 or above `tokens_per_step`, or a dataset is
            a stream.
        ModelError: In `setup`: samples are packed, and a Hugging Face model can't see where they
            end. A model that `configure_model` makes is refused when the loader is made.
    """

    def __init__(  # noqa: PLR0913 - the user's options
        self,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        tokens_per_step: int,
        context_length: int,
        lengths: ArrayLike | None = None,
        seed: int = 0,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        num_ahead: int = 6,
    ) -> None:
        super().__init__()
        if context_length < 1 or tokens_per_step < context_length:
            raise ConfigurationError(
                f"tokens_per_step is {tokens_per_step} and context_length {context_length}; an "
                "iteration must hold at least one whole context. Raise the one or lower the other."
            )
        self.tokens_per_step = tokens_per_step
        self.context_length = context_length
        self._datasets = {"train": train_dataset, "val": val_dataset}
        self._splits = [split for split, dataset in self._datasets.items() if dataset is not None]
        for split in self._splits:
            kind = type(self._datasets[split])
            if not hasattr(kind, "__len__") or not hasattr(kind, "__getitem__"):
                raise ConfigurationError(
                    f"HeteroDataModule needs a dataset with a length and indices, but "
                    f"{kind.__name__} is a stream. Store its samples, or use a DataLoader."
                )
        self._lengths: dict[str, ArrayLike | None] = {"train": lengths, "val": None}
        self._seed = seed
        self._num_workers = num_workers
        self._collate = collate or pack_samples
        self._num_ahead = num_ahead
        self._samples: dict[str, TokenSamples] = {}
        self._progress: Progress | None = None
        self._planner: AheadPlanner | None = None
        self._train_loader: AssignedLoader | None = None
        self._val_loader: AssignedLoader | None = None
        self._candidates: Candidates | None = None
        self._slowdowns: tuple[float, ...] | None = None
        self._num_loaders = 0
        if val_dataset is None:
            # Lightning validates if the hook is overridden, and warns if the loader is empty.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    # -- hooks of Lightning ---------------------------------------------------------------------

    @override
    def prepare_data(self) -> None:
        for split in self._splits:
            self._find_lengths(split)

    @override
    def setup(self, stage: str) -> None:
        for split in self._splits:
            if split not in self._samples:
                self._samples[split] = TokenSamples(
                    self._datasets[split],
                    self._find_lengths(split),
                    context_length=self.context_length,
                )
        self._progress = self._new_progress()
        self._prepare_models()

    @override
    def train_dataloader(self) -> AssignedLoader:
        self._prepare_models()
        candidates = self._find_candidates()
        assert self._progress is not None, "setup comes before train_dataloader"
        self._train_loader = self._make_loader("train", candidates, self._progress)
        if self._slowdowns is not None:
            self._train_loader.dealer.set_slowdowns(self._slowdowns)
        return self._train_loader

    @override
    def val_dataloader(self) -> AssignedLoader:
        self._prepare_models()
        first = self._find_candidates().first()
        self._val_loader = self._make_loader("val", first, Progress(), restarts=True)
        return self._val_loader

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._train_loader is not None:
            return self._train_loader.state_dict()
        return {} if self._progress is None else self._progress.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._progress is None:
            self._progress = self._new_progress()
        self._progress.load_state_dict(state_dict)

    @override
    def teardown(self, stage: str) -> None:
        if self._planner is not None:
            self._planner.close()
        if self._train_loader is not None:
            self._train_loader.dealer.close()
        self._planner = self._train_loader = self._val_loader = None
        self._candidates = self._slowdowns = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")

    # -- while it trains ------------------------------------------------------------------------

    @property
    def planning_stall_s(self) -> float:
        """Seconds that the trainer waited for the latest iteration to be drawn and planned."""
        return 0.0 if self._train_loader is None else self._train_loader.stall_s

    @property
    def plans(self) -> tuple[ParallelPlan, ...]:
        """The candidate plans of training iterations; empty under a strategy without plans."""
        return self._training_dealer().candidates.plans or ()

    @property
    def num_dealt(self) -> Counter[ParallelPlan]:
        """Number of training iterations that have been dealt for each plan."""
        return self._training_dealer().num_dealt

    def set_slowdowns(self, by_rank: Sequence[float]) -> int:
        """Give less work to slow ranks, from the first iteration on that isn't planned yet.

        All ranks must call it between the same steps, with the same factors.

        Args:
            by_rank: How many times longer each rank takes than the plans' costs say.

        Returns:
            Training iterations, at most, that are planned already and still to be trained.
        """
        self._training_dealer().set_slowdowns(by_rank)
        self._slowdowns = tuple(by_rank)
        return self._count_planned()

    def set_candidate_plans(
        self,
        plans: Sequence[ParallelPlan],
        costs: Sequence[Sequence[PipelineCost]] | None = None,
    ) -> int:
        """Choose among these plans, from the first iteration on that isn't planned yet.

        `HeteroStrategy` calls it on every rank when a run is set up and when it gets other plans;
        see `HeteroStrategy.set_candidate_plans`.

        Args:
            plans: The plans; the first is the best one if all iterations run the same.
            costs: The costs of their pipelines; None takes those of `assumed_costs`.

        Returns:
            Training iterations, at most, that are planned already and still to be trained.
        """
        if costs is None:
            costs = [
                assumed_costs(
                    plan, context_length=self.context_length, tokens_per_step=self.tokens_per_step
                )
                for plan in plans
            ]
        candidates = Candidates(plans=tuple(plans), costs=tuple(tuple(item) for item in costs))
        self._candidates = candidates
        if self._val_loader is not None:
            self._val_loader.dealer.set_candidates(candidates.first())
        if self._train_loader is None:
            return 0
        self._train_loader.dealer.set_candidates(candidates)
        return self._count_planned()

    def sample_lengths(self) -> IntArray:
        """Return the tokens of training samples, once cut; of many, those of a random part."""
        lengths = self._samples["train"].lengths
        if len(lengths) <= _NUM_SAMPLED:
            return lengths
        return np.random.default_rng(self._seed).choice(lengths, _NUM_SAMPLED, replace=False)

    # -- parts ----------------------------------------------------------------------------------

    def _prepare_models(self) -> None:
        """Set up packed attention in models, in a second call those of `configure_model`."""
        if self.trainer is not None and self._collate is pack_samples:
            let_models_attend_packed(self.trainer.lightning_module)

    def _find_lengths(self, split: str) -> ArrayLike:
        lengths = self._lengths[split]
        if lengths is None:
            lengths = self._lengths[split] = cached_lengths(self._datasets[split])
        return lengths

    def _new_progress(self) -> Progress:
        return Progress(
            seed=self._seed,
            tokens_per_step=self.tokens_per_step,  # Cursors count iterations, too.
            num_samples=len(self._datasets["train"]),
        )

    def _find_candidates(self) -> Candidates:
        if self._candidates is None and self.trainer is not None and self.trainer.world_size > 1:
            raise ConfigurationError(
                f"HeteroDataModule assigns samples to HeteroStrategy's pipelines, but "
                f"{type(self.trainer.strategy).__name__} runs on {self.trainer.world_size} ranks. "
                "Use Trainer(strategy=HeteroStrategy())."
            )
        return self._candidates or Candidates.alone()

    def _make_loader(
        self, split: str, candidates: Candidates, progress: Progress, *, restarts: bool = False
    ) -> AssignedLoader:
        self._num_loaders += 1
        trainer: Any = self.trainer
        overfits = trainer is not None and trainer.overfit_batches > 0
        samples = self._samples[split]
        order = EpochOrder(
            samples.lengths,
            tokens_per_step=self.tokens_per_step,
            seed=self._seed,
            shuffle=split == "train" and not overfits,
        )
        dealer = TicketDealer(
            order,
            self._open_planner(),
            candidates,
            global_rank=0 if trainer is None else trainer.global_rank,
            name=f"{split}/{self._num_loaders}",
        )
        return AssignedLoader(
            dealer,
            BatchMaker(samples, self._collate),
            progress,
            num_iterations=len(order),
            num_workers=self._num_workers,
            restarts=restarts,
        )

    def _open_planner(self) -> AheadPlanner:
        if self._planner is None:
            if self.trainer is None:
                self._planner = AheadPlanner(AssignmentStore(), num_ahead=self._num_ahead)
            else:
                self._planner = AheadPlanner(
                    open_store(self.trainer.strategy.broadcast, uuid.uuid4().hex),
                    global_rank=self.trainer.global_rank,
                    world_size=self.trainer.world_size,
                    num_ahead=self._num_ahead,
                )
        return self._planner

    def _count_planned(self) -> int:
        """Return the number of training iterations that are drawn but not trained yet."""
        assert self._train_loader is not None
        return self._train_loader.num_fetched + self._train_loader.dealer.num_ahead

    def _training_dealer(self) -> TicketDealer:
        if self._train_loader is None:
            raise ConfigurationError(
                "The training loader isn't made yet; call this from `on_train_start` on."
            )
        return self._train_loader.dealer
