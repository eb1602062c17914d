"""Judge plans: their memory settled, simulated, and every one only once."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.columns import ColumnTimes, Rate
from lightning_hetero.planner.memory import own_microbatches, settle_memory
from lightning_hetero.planner.placement import Arrangement, MappingOrder, to_plan
from lightning_hetero.planner.stages import Option, Ownership, Stages
from lightning_hetero.simulator import CostModel, Simulation, simulate

__all__ = ["Candidate", "Judge", "deal"]


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


def deal(
    rates: Sequence[Rate], sizes: Sequence[int], total: int, *, equally: bool = False
) -> list[int] | None:
    """Return micro-batches of each pipeline so that the last one ends soonest; None if none does.

    Args:
        rates: Slopes and fills of the pipelines.
        sizes: Sequences of their micro-batches.
        total: Sequences of an iteration.
        equally: Whether all get as many micro-batches, but for one more of some.
    """
    num = len(rates)
    if equally:
        base, rest = divmod(total // sizes[0], num)
        order = sorted(range(num), key=lambda i: rates[i].ends_s(base))
        return [base + (i in order[:rest]) for i in range(num)] if base else None
    busy, time_s = list(range(num)), 0.0
    while busy:
        # Pipelines that could not end one micro-batch by then get one, and the others the rest.
        rest = total - sum(sizes[i] for i in range(num) if i not in busy)
        per_s = sum(sizes[i] / rates[i].slope_s for i in busy)
        before = sum(rates[i].fill_s * sizes[i] / rates[i].slope_s for i in busy)
        time_s = (rest + before) / per_s
        late = [i for i in busy if time_s < rates[i].ends_s(1)]
        if not late:
            break
        busy = [i for i in busy if i not in late]
    counts = [
        max(1, int((time_s - r.fill_s) / r.slope_s) - 2) if i in busy else 1
        for i, r in enumerate(rates)
    ]
    left = total - sum(map(int.__mul__, counts, sizes))
    while left < 0:
        most = max(range(num), key=lambda i: rates[i].ends_s(counts[i]))
        more = [i for i in range(num) if counts[i] > 1]
        if not more:
            return None
        if counts[most] == 1:
            most = max(more, key=lambda i: rates[i].ends_s(counts[i]))
        counts[most] -= 1
        left += sizes[most]
    queue = [(r.ends_s(counts[i] + 1), i) for i, r in enumerate(rates)]
    heapq.heapify(queue)
    while left and queue:
        _, i = heapq.heappop(queue)
        if sizes[i] <= left:
            counts[i] += 1
            left -= sizes[i]
            heapq.heappush(queue, (rates[i].ends_s(counts[i] + 1), i))
    return None if left else counts


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
            self.work_done += sum(len(layers) for _, layers, _ in kinds)
            simulation = self.simulate(plan)
            if simulation.fits:
                found.append((plan, simulation))
        return min(found, key=lambda pair: pair[1].iteration_time_s, default=None)

    def simulate(self, plan: ParallelPlan) -> Simulation:
        """Return the simulated iteration of a plan."""
        return simulate(plan, self.cost, own_microbatches(plan, self.workload.microbatch))
