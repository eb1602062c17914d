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
    return _dealt_freely(rates, sizes, total)


def _dealt_freely(rates: Sequence[Rate], sizes: Sequence[int], total: int) -> list[int] | None:
    kinds: dict[tuple[Rate, int], list[int]] = {}
    for index, kind in enumerate(zip(rates, sizes, strict=True)):
        kinds.setdefault(kind, []).append(index)
    time_s = _common_end_s({kind: len(members) for kind, members in kinds.items()}, total)
    counts, left = [0] * len(rates), total
    for (rate, size), members in kinds.items():
        # Some too few, and the rest one after another.
        early = max(1, int((time_s - rate.fill_s) / rate.slope_s) - 2)
        for index in members:
            counts[index] = early
        left -= early * size * len(members)
    while left < 0:
        more = [kind for kind, members in kinds.items() if counts[members[0]] > 1]
        if not more:
            return None
        kind = max(more, key=lambda kind: kind[0].ends_s(counts[kinds[kind][0]]))
        for index in kinds[kind]:
            counts[index] -= 1
            left += kind[1]
    queue = [(kind[0].ends_s(counts[m[0]] + 1), m[0], kind) for kind, m in kinds.items()]
    heapq.heapify(queue)
    while left and queue:
        _, first, (rate, size) = heapq.heappop(queue)
        members = kinds[rate, size][: left // size]
        for index in members:
            counts[index] += 1
        left -= size * len(members)
        if members:
            heapq.heappush(queue, (rate.ends_s(counts[first] + 1), first, (rate, size)))
    return None if left else counts


def _common_end_s(kinds: dict[tuple[Rate, int], int], total: int) -> float:
    """Return when all pipelines end if parts of micro-batches count, and each runs one at least."""
    busy, rest, time_s = dict(kinds), total, 0.0
    while busy:
        per_s = sum(number * size / rate.slope_s for (rate, size), number in busy.items())
        before = sum(
            number * size * rate.fill_s / rate.slope_s for (rate, size), number in busy.items()
        )
        time_s = (rest + before) / per_s
        late = [kind for kind in busy if time_s < kind[0].ends_s(1)]
        if not late:
            break
        for kind in late:
            rest -= busy.pop(kind) * kind[1]
    return time_s


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
            self.work_done += sum(len(layers) for _, layers, _ in kinds) + len(plan.pipelines) // 8
            simulation = self.simulate(plan)
            if simulation.fits:
                found.append((plan, simulation))
        return min(found, key=lambda pair: pair[1].iteration_time_s, default=None)

    def simulate(self, plan: ParallelPlan) -> Simulation:
        """Return the simulated iteration of a plan."""
        return simulate(plan, self.cost, own_microbatches(plan, self.workload.microbatch))
