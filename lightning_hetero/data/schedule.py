"""Decide which plan runs the n-th iteration, while batches are dealt ahead of training.

Workers of a data loader load batches before they are trained on, and a batch that was dealt for one
plan can't run under a plan that cuts it otherwise. So a change of plan holds from the first
iteration that no rank has dealt yet. All ranks keep the same schedule.
"""

from dataclasses import dataclass

from lightning_hetero.core.plan import ParallelPlan

__all__ = ["Deal", "PlanSchedule", "deal_of"]


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How an iteration's samples are dealt out to pipelines, as one rank sees it."""

    shares: tuple[int, ...]
    """Relative number of samples of each pipeline."""
    pipeline_index: int | None
    """This rank's pipeline, None if it is idle."""


def deal_of(plan: ParallelPlan, *, global_rank: int, num_microbatches: int) -> Deal:
    """Return a rank's deal under a plan: samples in proportion to micro-batches.

    Args:
        plan: The plan.
        global_rank: The rank.
        num_microbatches: Of pipelines for which the plan names no number.
    """
    place = plan.place(global_rank)
    return Deal(
        shares=tuple(
            num_microbatches if p.num_microbatches is None else p.num_microbatches
            for p in plan.pipelines
        ),
        pipeline_index=None if place is None else place.pipeline_index,
    )


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
