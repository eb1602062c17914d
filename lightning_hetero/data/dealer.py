"""Give every loader of a run its deals, and every batch the plan it was dealt for.

Workers of a data loader load batches before they are trained on, and a batch that was dealt for one
plan can't run under a plan that cuts it otherwise. So a change of plan holds from the first
iteration that no rank has dealt yet. All ranks keep the same schedule of plans.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.dealing import Deal, DealtBatchSampler, deal_of, deal_out
from lightning_hetero.models.batches import AssignedBatch

__all__ = ["Dealer", "PlanSchedule"]


class Dealer:
    """Deals the batches of one run's loaders on one rank.

    Args:
        plan: The plan that runs first.
        global_rank: The rank.
        num_microbatches: Of pipelines for which a plan names no number.
        num_batches: A loader's batches that make an iteration; fixed, so that its length is.
        seed: Returns what seeds samplers that draw from the global generators, the same on all
            ranks; asked for each loader, since a recovered run goes on with the seed that it had.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        global_rank: int,
        num_microbatches: int,
        num_batches: int,
        seed: Callable[[], int],
    ) -> None:
        self._plan = plan
        self._global_rank = global_rank
        self._num_microbatches = num_microbatches
        self._num_batches = num_batches
        self._seed = seed
        self._schedules: list[PlanSchedule] = []
        self._plans_come_with_batches = False

    def deal(self, dataloader: object, *, is_training: bool, epoch: int) -> object:
        """Return a loader of this rank's part of each iteration.

        Args:
            dataloader: The user's, the same on every rank.
            is_training: Whether the run trains on it; else it runs under the plan of the moment.
            epoch: The epoch in which it is read first.

        Raises:
            ConfigurationError: The loader shards by rank itself.
        """
        schedule = PlanSchedule(self._plan)

        def deal_at(iteration: int) -> Deal:
            return self._deal(schedule.plan_to_deal(iteration) if is_training else self._plan)

        dealt = deal_out(
            dataloader, deal_at=deal_at, num_batches=self._num_batches, seed=self._seed()
        )
        if is_training:
            self._plans_come_with_batches = dealt is dataloader
            if dealt is not dataloader:
                self._schedules.append(schedule)
        sampler = getattr(dealt, "batch_sampler", None)
        if isinstance(dealt, DataLoader) and isinstance(sampler, DealtBatchSampler):
            # A resumed loader's workers draw before Lightning says which epoch it is.
            sampler.set_epoch(epoch)
        return dealt

    def plan_to_run(self, batch: Any, batch_idx: int) -> ParallelPlan:
        """Return the plan under which a batch is trained on."""
        if isinstance(batch, AssignedBatch):
            self._plan = batch.plan
        else:
            for schedule in self._schedules:
                self._plan = schedule.plan_to_run(batch_idx)
        return self._plan

    def plan_to_evaluate(self, batch: Any) -> ParallelPlan:
        """Return the plan under which a batch is evaluated."""
        return batch.plan if isinstance(batch, AssignedBatch) else self._plan

    def change_plan(self, plan: ParallelPlan, *, most_of_ranks: Callable[[int], int]) -> int:
        """Deal for another plan as soon as possible; collective.

        Args:
            plan: The plan, the same on every rank.
            most_of_ranks: Returns the largest of the ranks' numbers.

        Returns:
            Iterations that were dealt for the plan of before and are still to be trained on.

        Raises:
            ConfigurationError: Training reads several loaders, and the plan would deal otherwise;
                or its batches bring their plans.
        """
        if self._plans_come_with_batches:
            raise ConfigurationError(
                "The data module names the plan of each iteration, so the strategy's can't be "
                "changed. Give the data module other plans: HeteroStrategy.set_candidate_plans."
            )
        if len(self._schedules) == 1:
            schedule = self._schedules[0]
            dealt = most_of_ranks(schedule.num_dealt)
            schedule.change(plan, from_iteration=dealt)
            return dealt - schedule.num_run
        if self._schedules and self._deal(plan) != self._deal(self._plan):
            raise ConfigurationError(
                f"Training reads {len(self._schedules)} loaders at once, which may be at different "
                "iterations, so the plan can't change what their pipelines get. Change only "
                "which stage a rank is in and which layers stages have, or train on one loader."
            )
        self._plan = plan
        for schedule in self._schedules:
            schedule.change(plan, from_iteration=0)
        return 0

    def _deal(self, plan: ParallelPlan) -> Deal:
        return deal_of(plan, global_rank=self._global_rank, num_microbatches=self._num_microbatches)


class PlanSchedule:
    """The plan of each iteration of one pass over a loader.

    Args:
        plan: Runs until it is changed.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._changes = [(0, plan)]
        self._first_batch_idx: int | None = None
        self.num_dealt = 0
        """Iterations dealt so far on this rank."""
        self.num_run = 0
        """Iterations trained on so far."""

    def start_pass(self) -> None:
        """Begin another pass over the loader, under the newest plan."""
        self._changes = [(0, self._changes[-1][1])]
        self._first_batch_idx = None
        self.num_dealt = self.num_run = 0

    def plan_to_deal(self, iteration: int) -> ParallelPlan:
        """Return the plan of an iteration that is about to be dealt; the first begins a pass."""
        if iteration == 0:
            self.start_pass()
        self.num_dealt = iteration + 1
        return self._plan_at(iteration)

    def plan_to_run(self, batch_idx: int) -> ParallelPlan:
        """Return the plan of the batch that Lightning trains on."""
        if self._first_batch_idx is None:
            # A pass that resumes an epoch begins where the last run stopped.
            self._first_batch_idx = batch_idx
        iteration = batch_idx - self._first_batch_idx
        self.num_run = iteration + 1
        return self._plan_at(iteration)

    def change(self, plan: ParallelPlan, *, from_iteration: int) -> None:
        """Run another plan from an iteration on that no rank has dealt yet."""
        begun = [start for start, _ in self._changes if start <= max(0, self.num_run - 1)]
        # What ran before the present iteration's plan is never asked for again.
        self._changes = [item for item in self._changes if begun[-1] <= item[0] < from_iteration]
        self._changes.append((from_iteration, plan))

    def _plan_at(self, iteration: int) -> ParallelPlan:
        return next(plan for start, plan in reversed(self._changes) if start <= iteration)
