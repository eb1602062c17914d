"""Local search on the simulator: move a layer, a micro-batch or a stage, keep what is faster.

Balancing and sharing are exact for their own objectives, but neither sees warm-up, links, gradient
exchange and memory together; the simulator does. Moves are tried in one fixed order and the first
that helps is kept, until none helps or the budget is spent.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes, to_plan
from lightning_hetero.planner.estimator import Estimator
from lightning_hetero.planner.memory_fit import settle_memory
from lightning_hetero.simulator import Simulation, simulate

__all__ = ["Candidate", "Judge", "improve"]

_MIN_GAIN = 1e-9


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An arrangement with layers and micro-batches: everything but the ranks."""

    arrangement: Arrangement
    """The pipelines' stages by node."""
    layers: tuple[tuple[int, ...], ...]
    """[pipeline][stage] layers."""
    num_microbatches: tuple[int, ...]
    """Micro-batches of each pipeline, at least 1."""


class Judge:
    """Simulates candidates, checks their memory and remembers what it saw."""

    def __init__(
        self, estimator: Estimator, score: Callable[[ParallelPlan, Simulation], float]
    ) -> None:
        self.estimator = estimator
        self._score = score
        self._scores: dict[Candidate, float] = {}
        self.work_done = 0
        """Actions simulated so far; what budgets count."""

    @property
    def num_simulated(self) -> int:
        """Number of candidates simulated."""
        return len(self._scores)

    def plan(self, candidate: Candidate) -> ParallelPlan:
        """Return a candidate that fits, with ranks, recomputation and ownership."""
        found = self._fitting(candidate)
        assert found is not None, "the candidate has no finite score"
        return found[0]

    def _with_ranks(self, candidate: Candidate) -> ParallelPlan:
        return to_plan(
            candidate.arrangement,
            candidate.layers,
            candidate.num_microbatches,
            self.estimator.cost.cluster,
        )

    def simulate(self, plan: ParallelPlan) -> Simulation:
        """Return the simulation of a plan with its own numbers of micro-batches."""
        microbatch = self.estimator.workload.microbatch
        batches = [[microbatch] * (p.num_microbatches or 0) for p in plan.pipelines]
        return simulate(plan, self.estimator.cost, batches)

    def score(self, candidate: Candidate) -> float:
        """Return what to minimise; infinite if a stage's memory doesn't suffice."""
        if candidate not in self._scores:
            self.work_done += self.work_of(candidate)
            found = self._fitting(candidate)
            self._scores[candidate] = float("inf") if found is None else self._score(*found)
        return self._scores[candidate]

    def _fitting(self, candidate: Candidate) -> tuple[ParallelPlan, Simulation] | None:
        """Return the plan and its simulation, memory settled only where it is too little."""
        plan = self._with_ranks(candidate)
        simulation = self.simulate(plan)
        if self.fits(plan, simulation):
            return plan, simulation
        estimator = self.estimator
        settled = settle_memory(
            plan,
            estimator.cost,
            estimator.workload.microbatch,
            idle_may_own=estimator.idle_may_own,
        )
        self.work_done += len(settled) * self.work_of(candidate)
        found = [(plan, self.simulate(plan)) for plan in settled]
        return min(
            (pair for pair in found if self.fits(*pair)),
            key=lambda pair: pair[1].iteration_time_s,
            default=None,
        )

    def fits(self, plan: ParallelPlan, simulation: Simulation) -> bool:
        """Return whether every stage has the memory it needs."""
        cost = self.estimator.cost
        return all(
            memory.total <= cost.usable_bytes(cost.shape_of(stage).device)
            for pipeline, row in zip(plan.pipelines, simulation.stage_memory, strict=True)
            for stage, memory in zip(pipeline.stages, row, strict=True)
        )

    def work_of(self, candidate: Candidate) -> int:
        """Return about how many actions a simulation runs."""
        distinct = set(
            zip(
                map(self.estimator.key, candidate.arrangement),
                candidate.layers,
                candidate.num_microbatches,
                strict=True,
            )
        )
        actions = sum(2 * len(layers) * count for _, layers, count in distinct)
        return 40 * sum(map(len, candidate.layers)) + actions


def improve(candidate: Candidate, judge: Judge, estimator: Estimator, *, budget: int) -> Candidate:
    """Return the candidate after all moves that help, within `budget` simulated actions.

    The estimator says whether pipelines must run equal shares.
    """
    best, score = candidate, judge.score(candidate)
    limit = judge.work_done + budget
    improved = True
    while improved:
        improved = False
        for family in _MOVES:
            for moved in family(best, estimator):
                if judge.work_done >= limit:
                    return best
                moved_score = judge.score(moved)
                if moved_score < score * (1 - _MIN_GAIN):
                    best, score, improved = moved, moved_score, True
                    break
            if improved:
                break
    return best


def _move_layers(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Give a layer of one stage to another, in all pipelines that are alike."""
    for members in _alike(candidate, estimator):
        layers = candidate.layers[members[0]]
        for source, target in itertools.permutations(range(len(layers)), 2):
            if layers[source] > 1:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                rows = list(candidate.layers)
                for member in members:
                    rows[member] = tuple(moved)
                yield replace(candidate, layers=tuple(rows))


def _move_layers_together(candidate: Candidate, _estimator: Estimator) -> Iterator[Candidate]:
    """Give a layer of one stage to another in all pipelines of equal depth.

    Where cuts agree, gradients of a layer stay between the same nodes; moving one pipeline's cut
    alone would make them cross.
    """
    for length in sorted({len(layers) for layers in candidate.layers} - {1}):
        for source, target in itertools.permutations(range(length), 2):
            rows = []
            for layers in candidate.layers:
                moved = list(layers)
                if len(layers) == length and layers[source] > 1:
                    moved[source] -= 1
                    moved[target] += 1
                rows.append(tuple(moved))
            if tuple(rows) != candidate.layers:
                yield replace(candidate, layers=tuple(rows))


def _move_microbatches(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Give a micro-batch of one pipeline to another."""
    if estimator.equal_microbatches:
        return
    firsts = [members[0] for members in _alike(candidate, estimator)]
    lasts = [members[-1] for members in _alike(candidate, estimator)]
    for source, target in itertools.product(firsts, lasts):
        if source != target and candidate.num_microbatches[source] > 1:
            counts = list(candidate.num_microbatches)
            counts[source] -= 1
            counts[target] += 1
            yield replace(candidate, num_microbatches=tuple(counts))


def _move_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Let two stages swap their devices, then balance and share anew."""
    places = [
        (p, s)
        for p, pipeline in enumerate(candidate.arrangement)
        for s in range(len(pipeline.nodes))
    ]
    classes = estimator.classes
    seen: set[tuple[object, ...]] = set()
    for (p, s), (q, t) in itertools.combinations(places, 2):
        one, other = candidate.arrangement[p], candidate.arrangement[q]
        if one.stages[s] == other.stages[t]:
            continue
        kind = (
            (estimator.key(one), s, candidate.num_microbatches[p]),
            (estimator.key(other), t, candidate.num_microbatches[q]),
        )
        if classes[one.nodes[s]] == classes[other.nodes[t]] and kind in seen:
            continue
        seen.add(kind)
        rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
        rows[p][s], rows[q][t] = rows[q][t], rows[p][s]
        yield from _rebuilt(rows, estimator)


def _move_units(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Give a device group of one pipeline to another that has such degrees, then balance anew.

    It takes a place beside one of its kind, or any end where there is none.
    """
    classes = estimator.classes
    firsts = {
        estimator.key(pipeline): index for index, pipeline in enumerate(candidate.arrangement)
    }
    for p, q in itertools.permutations(firsts.values(), 2):
        one, other = candidate.arrangement[p], candidate.arrangement[q]
        if len(one.nodes) == 1:
            continue
        kinds = [[(classes[node], degree) for node, degree in i.stages] for i in (one, other)]
        for (kind, degree), s in {key: s for s, key in enumerate(kinds[0])}.items():
            if degree not in other.tp_degrees:
                continue
            alike = [t for t, key in enumerate(kinds[1]) if key == (kind, degree)]
            for place in [alike[-1] + 1] if alike else [0, len(other.nodes)]:
                rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
                rows[q].insert(place, rows[p].pop(s))
                yield from _rebuilt(rows, estimator)


def _swap_stages_together(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Let two stages swap devices in all pipelines that are alike, then balance and share anew.

    In one of them alone the gradients of layers would cross nodes.
    """
    classes = estimator.classes
    for key in dict.fromkeys(map(estimator.key, candidate.arrangement)):
        members = [p for p in candidate.arrangement if estimator.key(p) == key]
        if len(members) == 1:
            continue
        for s, t in itertools.combinations(range(len(members[0].nodes)), 2):
            one, other = members[0].stages[s], members[0].stages[t]
            if classes[one[0]] == classes[other[0]] and one[1] == other[1]:
                continue
            rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
            for pipeline, row in zip(candidate.arrangement, rows, strict=True):
                if estimator.key(pipeline) == key:
                    row[s], row[t] = row[t], row[s]
            yield from _rebuilt(rows, estimator)


def _rebuilt(
    rows: Sequence[Sequence[tuple[int, int]]], estimator: Estimator
) -> Iterator[Candidate]:
    """Yield a candidate of these stages with layers and micro-batches for them, if it fits."""
    arrangement = tuple(map(PipelineNodes.of_stages, rows))
    estimate = estimator.estimate(arrangement)
    if estimate is not None:
        yield Candidate(
            arrangement=arrangement,
            layers=estimate.layers,
            num_microbatches=estimate.num_microbatches,
        )


def _alike(candidate: Candidate, estimator: Estimator) -> list[list[int]]:
    """Return indices of pipelines of one class, layers and micro-batches, grouped."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, pipeline in enumerate(candidate.arrangement):
        key = (estimator.key(pipeline), candidate.layers[index], candidate.num_microbatches[index])
        groups.setdefault(key, []).append(index)
    return list(groups.values())


_MOVES = (
    _move_layers,
    _move_layers_together,
    _move_microbatches,
    _move_units,
    _swap_stages_together,
    _move_stages,
)
