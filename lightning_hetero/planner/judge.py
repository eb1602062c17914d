"""Judge plans: decide their memory, simulate each once, and remember the results."""

from typing import NamedTuple

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.columns import ColumnTimes
from lightning_hetero.planner.memory import own_microbatches, settle_memory
from lightning_hetero.planner.placement import MappingOrder, Option, PlacedStages, to_plan
from lightning_hetero.planner.stages import Ownership, Stages
from lightning_hetero.simulator import CostModel, Simulation, simulate


class Pipeline(NamedTuple):
    """A pipeline on nodes, before its ranks and memory are decided."""

    stages: PlacedStages
    layers: tuple[int, ...]
    """Layers of each stage; none if they are still to be chosen."""
    size: int
    """Sequences of a micro-batch."""
    num_microbatches: int
    """Number of micro-batches, at least 1; 0 stands for the average of all pipelines, if still to
    be decided."""


Candidate = tuple[Pipeline, ...]
"""A plan to judge."""


class Judge:
    """Decides the memory of plans, simulates them and remembers the results.

    Args:
        stages: Times and memory by size of micro-batches.
        idle_may_own: Whether ranks without layers may own states.
        equally: Whether all pipelines have the same number of micro-batches.
    """

    def __init__(
        self, stages: dict[int, Stages], *, idle_may_own: bool = True, equally: bool = False
    ) -> None:
        self.stages, self.equally = stages, equally
        self.any_stages = next(iter(stages.values()))
        self.cost: CostModel = self.any_stages.cost
        self.workload = self.any_stages.workload
        self.idle_may_own = idle_may_own
        self._known: dict[Candidate, tuple[ParallelPlan, Simulation] | None] = {}
        self._times: dict[tuple[int, Ownership, MappingOrder], ColumnTimes] = {}
        self.work_done = 0
        """Number of stages simulated so far; those of plans that run alike count once."""

    @property
    def num_simulated(self) -> int:
        """Candidates simulated."""
        return len(self._known)

    def times(self, size: int, ownership: Ownership, order: MappingOrder) -> ColumnTimes:
        """Return the times of columns, made once."""
        key = size, ownership, order
        if key not in self._times:
            self._times[key] = ColumnTimes(self.stages[size], ownership, order)
        return self._times[key]

    def options(self, stages: PlacedStages) -> tuple[Option, ...]:
        """Return the options of placed stages."""
        kinds = self.any_stages.class_of_node
        return tuple([Option(kinds[node], degree) for node, degree in stages])

    def plan(self, candidate: Candidate) -> tuple[ParallelPlan, Simulation] | None:
        """Return the fastest plan of a candidate and its simulation; None if none fits."""
        if candidate not in self._known:
            self._known[candidate] = self._settled(candidate)
        return self._known[candidate]

    def seconds(self, candidate: Candidate) -> float:
        """Return the seconds of an iteration, infinite if no plan fits."""
        found = self.plan(candidate)
        return found[1].iteration_time_s if found else float("inf")

    def _settled(self, candidate: Candidate) -> tuple[ParallelPlan, Simulation] | None:
        stages, layers, sizes, counts = zip(*candidate, strict=True)
        is_usual = set(sizes) == {self.workload.sequences_per_microbatch}
        own = None if is_usual else sizes
        bare = to_plan(stages, layers, counts, self.cost.cluster, sizes=own)
        work = sum(len(pipeline.stages) for pipeline in {*candidate}) + len(candidate) // 2
        found = []
        for plan in settle_memory(bare, self.stages, idle_may_own=self.idle_may_own):
            self.work_done += work
            simulation = self.simulate(plan)
            if simulation.fits:
                found.append((plan, simulation))
        return min(found, key=lambda pair: pair[1].iteration_time_s, default=None)

    def simulate(self, plan: ParallelPlan) -> Simulation:
        """Return the simulated iteration of a plan."""
        return simulate(plan, self.cost, own_microbatches(plan, self.workload.microbatch))
