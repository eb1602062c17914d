"""Judge plans: their memory settled, simulated, and every one only once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.columns import ColumnTimes
from lightning_hetero.planner.memory import idle_capacity, own_microbatches, settle_memory
from lightning_hetero.planner.placement import Arrangement, MappingOrder, Option, to_plan
from lightning_hetero.planner.stages import Ownership, Stages
from lightning_hetero.simulator import CostModel, Simulation, simulate

__all__ = ["Candidate", "Judge"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Placed pipelines with layers and micro-batches, before ranks and memory are settled."""

    arrangement: Arrangement
    """The pipelines' stages by node."""
    layers: tuple[tuple[int, ...], ...]
    """[pipeline][stage] layers."""
    sizes: tuple[int, ...]
    """Sequences of a micro-batch of each pipeline."""
    counts: tuple[int, ...]
    """Micro-batches of each pipeline, at least 1."""


class Judge:
    """Settles, simulates and remembers plans.

    Args:
        stages: Times and memory by size of micro-batches.
        idle_may_own: Whether ranks without layers may own states.
        equally: Whether all pipelines have equally many micro-batches.
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
        self._idle_capacity = cache(partial(idle_capacity, self.cost))
        self.work_done = 0
        """Stages simulated so far, those of plans that run alike counted once."""

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

    def options(self, stages: Sequence[tuple[int, int]]) -> tuple[Option, ...]:
        """Return the options of placed stages, given as (node, devices)."""
        kinds = self.any_stages.class_of_node
        return tuple([Option(kinds[node], degree) for node, degree in stages])

    def idle_room(self, stages: Iterable[tuple[int, int]], num_pipelines: int) -> float:
        """Return the parameters that devices without layers have room to own, where they may.

        Args:
            stages: (node, devices) of all stages of a plan.
            num_pipelines: Pipelines of the plan.
        """
        if not self.idle_may_own:
            return 0.0
        free = list(self.any_stages.counts)
        for node, degree in stages:
            free[node] -= degree
        nodes = self.cost.cluster.nodes
        room = self._idle_capacity
        return sum(n * room(nodes[i].device, num_pipelines) for i, n in enumerate(free) if n)

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
        cost, workload = self.cost, self.workload
        bare = to_plan(candidate.arrangement, candidate.layers, candidate.counts, cost.cluster)
        if set(candidate.sizes) != {workload.sequences_per_microbatch}:
            pipelines = tuple(
                replace(pipeline, microbatch_size=size)
                for pipeline, size in zip(bare.pipelines, candidate.sizes, strict=True)
            )
            bare = replace(bare, pipelines=pipelines)
        found = []
        kinds = set(zip(candidate.arrangement, candidate.layers, candidate.counts, strict=True))
        for plan in settle_memory(bare, cost, workload.microbatch, idle_may_own=self.idle_may_own):
            self.work_done += sum(len(layers) for _, layers, _ in kinds) + len(plan.pipelines) // 2
            simulation = self.simulate(plan)
            if simulation.fits:
                found.append((plan, simulation))
        return min(found, key=lambda pair: pair[1].iteration_time_s, default=None)

    def simulate(self, plan: ParallelPlan) -> Simulation:
        """Return the simulated iteration of a plan."""
        return simulate(plan, self.cost, own_microbatches(plan, self.workload.microbatch))
