"""`HeteroDataModule`: assign sequences of different lengths, with a plan for each iteration.

Every iteration draws samples up to a budget of tokens, assigns them under every candidate plan of
the strategy, and runs the best plan (Hydraulis §4). This is done in the background while earlier
iterations train. Under a strategy without plans (DDP, one device) each rank is a pipeline of its
own.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.strategies import ParallelStrategy
from numpy.typing import ArrayLike
from typing_extensions import override

from lightning_hetero.assign import PipelineCost
from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.ahead import AheadPlanner, AssignmentStore, open_store
from lightning_hetero.data.candidates import Candidates, assumed_costs
from lightning_hetero.data.loader import AssignedLoader, BatchMaker, TicketDealer
from lightning_hetero.data.order import Cursor, EpochOrder, IterationSource, Progress
from lightning_hetero.data.samples import (
    OnOverlong,
    TokenSamples,
    cached_lengths,
    let_models_attend_packed,
)
from lightning_hetero.data.streams import StreamOrder, is_stream
from lightning_hetero.models import pack_samples

_NUM_SAMPLED = 20_000
_NUM_STREAMED = 8  # Iterations of a stream from which its lengths are sampled.


class HeteroDataModule(pl.LightningDataModule):
    """Train on samples of different lengths, each once an epoch, balanced over the pipelines.

    Args:
        train_dataset: Samples of token ids (see `data.samples`): map-style, or a stream that yields
            the same samples on every rank.
        val_dataset: The same for validation; samples come in order, under the first plan.
        tokens_per_step: Tokens of an iteration on all pipelines together: the average for datasets
            of known lengths (see `data.order`), the maximum for streams. Only a run that reads a
            stream can be resumed with another number.
        context_length: Largest number of tokens of a sample.
        on_overlong: What to do with a longer sample: "cut" off the rest, "split" it into several
            samples, or "refuse" it with a BatchError.
        lengths: Tokens of each training sample; None reads them once and caches them in a file.
        seed: Seed of the shuffle, the same on every rank.
        num_workers: Processes that read samples of a map-style dataset and collate.
        collate: Makes a micro-batch of a list of samples. None packs them end to end, and keeps
            attention of Hugging Face models inside samples (`use_packed_attention`). Other models
            must do that themselves, as `varlen_attention` does.
        num_ahead: Number of iterations that a process of rank 0 plans ahead. With 0 each iteration
            is planned when it is needed, without such a process.

    Raises:
        ConfigurationError: `context_length` is below 1 or above `tokens_per_step`.
        ModelError: In `setup`, if samples are packed and a Hugging Face model can't keep them
            apart; for a model that `configure_model` makes, when the loader is made.
    """

    def __init__(  # noqa: PLR0913 - the user's options
        self,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        tokens_per_step: int,
        context_length: int,
        on_overlong: OnOverlong | str = OnOverlong.CUT,
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
        self._lengths: dict[str, ArrayLike | None] = {"train": lengths, "val": None}
        self._seed = seed
        self._on_overlong = OnOverlong(on_overlong)
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
        for split in self._sized():
            self._find_lengths(split)

    @override
    def setup(self, stage: str) -> None:
        for split in self._sized():
            if split not in self._samples:
                self._samples[split] = TokenSamples(
                    self._datasets[split],
                    self._find_lengths(split),
                    context_length=self.context_length,
                    on_overlong=self._on_overlong,
                )
        self._progress = self._new_progress()
        self._prepare_models()

    @override
    def train_dataloader(self) -> AssignedLoader:
        self._prepare_models()
        candidates = self._find_candidates()
        assert self._progress is not None, "setup comes before train_dataloader"
        if self._train_loader is not None:
            self._train_loader.rewind()
        self._train_loader = self._make_loader(
            "train", candidates, self._progress, num_trained=self._num_trained
        )
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
            by_rank: For each rank, the factor by which it is slower than the plans' costs say.

        Returns:
            The largest number of training iterations that are planned already and not yet trained.
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
            The largest number of training iterations that are planned already and not yet trained.
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
        """Return the tokens of each training sample, after cutting or splitting.

        Of many samples it returns a random part; of a stream, the first iterations.
        """
        if "train" in self._samples:
            lengths = self._samples["train"].lengths
            if len(lengths) <= _NUM_SAMPLED:
                return lengths
            return np.random.default_rng(self._seed).choice(lengths, _NUM_SAMPLED, replace=False)
        drawn = self._make_source("train", 1).draw(Cursor())
        return np.concatenate([item.lengths for item in islice(drawn, _NUM_STREAMED)])

    # -- parts ----------------------------------------------------------------------------------

    def _prepare_models(self) -> None:
        """Set up packed attention in models, in a second call those of `configure_model`."""
        if self.trainer is not None and self._collate is pack_samples:
            let_models_attend_packed(self.trainer.lightning_module)

    def _sized(self) -> list[str]:
        """Return the splits whose datasets are map-style."""
        return [
            split
            for split, dataset in self._datasets.items()
            if dataset is not None and not is_stream(dataset)
        ]

    def _find_lengths(self, split: str) -> ArrayLike:
        lengths = self._lengths[split]
        if lengths is None:
            lengths = self._lengths[split] = cached_lengths(self._datasets[split])
        return lengths

    def _new_progress(self) -> Progress:
        if "train" not in self._samples:
            return Progress(seed=self._seed)
        return Progress(
            seed=self._seed,
            tokens_per_step=self.tokens_per_step,  # Cursors count iterations, too.
            num_samples=len(self._samples["train"]),
        )

    def _find_candidates(self) -> Candidates:
        return self._candidates or Candidates.equal_ranks(self._rank_and_count()[1])

    def _make_source(self, split: str, min_samples: int) -> IterationSource:
        training = split == "train"
        if split in self._samples:
            return EpochOrder(
                self._samples[split].lengths,
                tokens_per_step=self.tokens_per_step,
                seed=self._seed,
                shuffle=training and not self._overfits(),
                min_samples=min_samples,
            )
        return StreamOrder(
            self._datasets[split],
            tokens_per_step=self.tokens_per_step,
            context_length=self.context_length,
            on_overlong=self._on_overlong,
            min_samples=min_samples,
        )

    def _make_loader(
        self, split: str, candidates: Candidates, progress: Progress, **options: Any
    ) -> AssignedLoader:
        by_pipeline = candidates.plans is not None
        self._num_loaders += 1
        source = self._make_source(split, 1 if by_pipeline else len(candidates.costs[0]))
        dealer = TicketDealer(
            source,
            self._open_planner(),
            candidates,
            global_rank=self._rank_and_count()[0],
            name=f"{split}/{self._num_loaders}",
        )
        if isinstance(source, EpochOrder):
            options |= {"num_iterations": len(source), "num_workers": self._num_workers}
        maker = BatchMaker(self._samples.get(split), self._collate)
        return AssignedLoader(dealer, maker, progress, **options)

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

    def _rank_and_count(self) -> tuple[int, int]:
        """Return this rank's index and the number of ranks among which samples are divided.

        Without plans, ranks that share a model (tensor parallelism) count as one.
        """
        if self.trainer is None:
            return 0, 1
        strategy = self.trainer.strategy
        by_rank = {"rank": self.trainer.global_rank, "num_replicas": self.trainer.world_size}
        if self._candidates is None and isinstance(strategy, ParallelStrategy):
            by_rank |= strategy.distributed_sampler_kwargs
        return by_rank["rank"], by_rank["num_replicas"]

    def _overfits(self) -> bool:
        trainer: Any = self.trainer
        return trainer is not None and trainer.overfit_batches > 0

    def _num_trained(self) -> int | None:
        """Return how many iterations of the epoch the Trainer has trained."""
        if self.trainer is None:
            return None
        tracked: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(tracked.processed)

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
