"""Distribute ("deal") the batches of ordinary loaders, and find the plan of each batch.

A data loader's workers load batches ahead of training, and a batch that was dealt for one plan
can't run under a plan that divides it differently. So a change of plan takes effect at the first
iteration that no rank has dealt yet. All ranks keep the same schedule of plans.
"""

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

from torch.utils.data import DataLoader

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.dealing import (
    Deal,
    DealtBatchSampler,
    DealtIterable,
    deal_of,
    deal_out,
)
from lightning_hetero.data.orders import Order, check_alike
from lightning_hetero.models.batches import AssignedBatch


class Dealer:
    """Deals the batches of one run's loaders on one rank.

    Args:
        plan: The plan that runs first.
        global_rank: The rank.
        num_microbatches: Micro-batches of pipelines for which a plan names no number.
        num_batches: Number of a loader's batches that make an iteration; the same under all plans,
            so that the number of iterations of an epoch is, too.
        seed: Returns the seed of samplers that draw from the global generators, the same on all
            ranks; called for each loader, since a recovered run goes on with its old seed.
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
        self._dealt: list[ReferenceType[DealtBatchSampler | DealtIterable]] = []

    def deal(self, dataloader: object, *, is_training: bool, epoch: int) -> object:
        """Return a loader of this rank's part of each iteration.

        Args:
            dataloader: The user's loader, the same on every rank.
            is_training: Whether it is for training; other loaders are dealt for the plan that runs.
            epoch: The first epoch that is read.

        Raises:
            ConfigurationError: The loader already divides samples among ranks.
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
        # For prediction Lightning's wrapper, which records indices, is outermost.
        for item in (dealt, sampler, getattr(sampler, "_batch_sampler", None)):
            if isinstance(item, DealtBatchSampler | DealtIterable):
                item.loader = "training loader" if is_training else "loader of this evaluation"
                self._dealt.append(ref(item))
        if isinstance(dealt, DataLoader) and isinstance(sampler, DealtBatchSampler):
            # The workers of a resumed loader draw samples before Lightning sets the epoch.
            sampler.set_epoch(epoch)
        return dealt

    def compare_orders(self, everyone: Callable[[list[Order]], list[list[Order]]]) -> None:
        """Compare what ranks read, if passes over loaders have begun since the last call.

        Args:
            everyone: Returns every rank's argument, by rank; collective.

        Raises:
            ConfigurationError: Ranks read different data; on every rank.
        """
        dealt = [item for found in self._dealt if (item := found()) is not None]
        begun = [item for item in dealt if item.new_order is not None]
        if not begun:
            return
        orders = [item.new_order for item in begun if item.new_order is not None]
        for item in begun:
            item.new_order = None
        self._dealt = [ref(item) for item in dealt]
        check_alike(everyone(orders))

    def plan_to_run(self, batch: Any, batch_idx: int) -> ParallelPlan:
        """Return the plan under which to train on a batch; called for every batch, in order."""
        if isinstance(batch, AssignedBatch):
            self._plan = batch.plan
        else:
            for schedule in self._schedules:
                self._plan = schedule.plan_to_run(batch_idx)
        return self._plan

    def plan_to_evaluate(self, batch: Any) -> ParallelPlan:
        """Return the plan under which to evaluate a batch."""
        return batch.plan if isinstance(batch, AssignedBatch) else self._plan

    def change_plan(self, plan: ParallelPlan, *, most_of_ranks: Callable[[int], int]) -> int:
        """Change the plan from the first iteration on that no rank has dealt yet; collective.

        Args:
            plan: The plan, the same on every rank.
            most_of_ranks: Returns the maximum of its argument over all ranks.

        Returns:
            Number of iterations that were dealt for the old plan and are still to be trained.

        Raises:
            ConfigurationError: Training reads several loaders, of which the plan would change the
                deals; or a data module chooses the plans.
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
        plan: The plan that runs until `change`.
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
        """Return the plan of the next iteration to be dealt; iteration 0 begins a pass."""
        if iteration == 0:
            self.start_pass()
        self.num_dealt = iteration + 1
        return self._plan_at(iteration)

    def plan_to_run(self, batch_idx: int) -> ParallelPlan:
        """Return the plan of the batch that Lightning trains on next."""
        if self._first_batch_idx is None:
            # A resumed epoch doesn't begin at batch 0.
            self._first_batch_idx = batch_idx
        iteration = batch_idx - self._first_batch_idx
        self.num_run = iteration + 1
        return self._plan_at(iteration)

    def change(self, plan: ParallelPlan, *, from_iteration: int) -> None:
        """Run another plan from an iteration on that no rank has dealt yet."""
        begun = [start for start, _ in self._changes if start <= max(0, self.num_run - 1)]
        # Plans before that of the current iteration are no longer needed.
        self._changes = [item for item in self._changes if begun[-1] <= item[0] < from_iteration]
        self._changes.append((from_iteration, plan))

    def _plan_at(self, iteration: int) -> ParallelPlan:
        return next(plan for start, plan in reversed(self._changes) if start <= iteration)
