"""Score candidates by simulation, unless a lower bound shows that they aren't good enough.

Stage s of a pipeline, which takes w_s for a micro-batch, waits while the first one passes the
stages before it and while the last one's gradient passes back through them. So with K micro-batches
an iteration takes at least max_s(K·w_s + w_1 + ... + w_{s-1}), for any recomputation and owners.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes, to_plan
from lightning_hetero.planner.equal_nodes import kind_of_arrangement
from lightning_hetero.planner.estimating.arrangement_estimator import Estimate
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.estimating.memory_fit import settle_memory
from lightning_hetero.planner.estimating.stage_times import PipelineKey
from lightning_hetero.simulator import Simulation, StageShape, simulate
from lightning_hetero.simulator.exchange import ExchangeTable
from lightning_hetero.simulator.propagate import EqualTimes, propagate, propagate_all
from lightning_hetero.simulator.unit_times import Holders

__all__ = ["Candidate", "Judge"]

_ESTIMATE_ERROR = 0.02
"""How much shorter an iteration may be than its estimate, as a share."""
# Approximate microseconds per stage to bound a candidate, recognise it, run it, estimate it:
_BOUND_WORK = 1
_RENAMED_WORK = 3
_RUN_WORK = 12
_ESTIMATE_WORK = 20
_SETTLE_WORK = 60
"""To settle a stage's memory. The simulation that follows counts as much again."""
_WORK_OF_A_PLAN = 10
"""Fixed work of a plan, counted in stages."""
_ROUNDS = 4
"""Rounds per stage that a simulation runs; it skips later ones, which repeat."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An arrangement with layers and micro-batches, before ranks and memory are settled."""

    arrangement: Arrangement
    """The pipelines' stages by node."""
    layers: tuple[tuple[int, ...], ...]
    """[pipeline][stage] layers."""
    num_microbatches: tuple[int, ...]
    """Micro-batches of each pipeline, at least 1."""
    estimate_s: float = field(default=0.0, compare=False)
    """Estimated seconds of an iteration; 0 if they weren't estimated."""

    @classmethod
    def of(cls, estimate: Estimate) -> Self:
        """Return the candidate of an estimate."""
        return cls(
            arrangement=estimate.arrangement,
            layers=estimate.layers,
            num_microbatches=estimate.num_microbatches,
            estimate_s=estimate.time_s,
        )


class Judge:
    """Simulates candidates, checks their memory and caches the results.

    Args:
        estimator: Costs, workload and cluster.
        weigh: Returns the score to minimise: an iteration's seconds, or their price on the nodes of
            an arrangement.
        keeping: For each estimator the one that recomputes nothing: it may give a stage fewer
            layers that take less time.
    """

    def __init__(
        self,
        estimator: Estimator,
        weigh: Callable[[float, Arrangement], float],
        keeping: Mapping[Estimator, Estimator] | None = None,
    ) -> None:
        self.estimator = estimator
        self._weigh = weigh
        self._keeping = dict(keeping or {})
        self._scores: dict[Candidate, float] = {}
        self._filled: dict[tuple[Arrangement, Estimator], Candidate | None] = {}
        self._at_least: dict[Hashable, float] = {}
        self._settled: dict[Candidate, tuple[ParallelPlan, Simulation]] = {}
        self._work: dict[tuple[PipelineKey, tuple[int, ...]], tuple[float, ...]] = {}
        self._fits: dict[tuple[PipelineKey, tuple[int, ...], int, int], bool] = {}
        self._equal_times: dict[tuple[PipelineKey, tuple[int, ...], int], EqualTimes] = {}
        self._alone: dict[tuple[PipelineKey, tuple[StageShape, ...], int], float] = {}
        self.work_done = 0
        """Approximate microseconds of work so far; budgets are in this unit."""
        self.is_recomputing = False
        """Whether a plan that was simulated, or the estimate of a move, recomputes anything."""

    @property
    def num_simulated(self) -> int:
        """Number of candidates simulated."""
        return len(self._scores)

    def add(self, keeping: Mapping[Estimator, Estimator]) -> None:
        """Take more estimators, each with the one that recomputes nothing."""
        self._keeping |= keeping

    def plan(self, candidate: Candidate) -> tuple[ParallelPlan, Simulation]:
        """Return the plan of a candidate that fits, with settled memory, and its simulation."""
        found = self._settled.get(candidate) or self._fitting(candidate, float("inf"))
        assert found is not None, "the candidate has no finite score"
        return found

    def better(
        self, moved: Candidate | Arrangement, estimator: Estimator, *, below: float
    ) -> Candidate | None:
        """Return a move as a candidate if its score is below `below`, else None.

        An arrangement gets layers and micro-batches from the estimator. A move that was refused is
        not tried again unless `below` is higher, even if it uses other nodes of the same class.
        """
        known: Hashable = moved if isinstance(moved, Candidate) else (estimator, moved)
        if self._at_least.get(known, 0.0) >= below:
            self._count(_BOUND_WORK, moved.arrangement if isinstance(moved, Candidate) else moved)
            return None
        kind = known
        if not isinstance(moved, Candidate):
            kind = estimator, kind_of_arrangement(moved, estimator)
            if self._at_least.get(kind, 0.0) >= below:
                self._count(_RENAMED_WORK, moved)
                self._at_least[known] = below
                return None
        found = self._fill(moved, estimator, below=below)
        score = self.score(found, below=below) if found else below
        self._at_least[known] = self._at_least[kind] = min(score, below)
        return found if score < below else None

    def _fill(
        self, moved: Candidate | Arrangement, estimator: Estimator, *, below: float
    ) -> Candidate | None:
        """Return a move as a candidate; an arrangement gets layers and micro-batches.

        None if it doesn't fit, or a lower bound shows that its score is not below `below`.
        """
        if isinstance(moved, Candidate):
            return moved
        key = moved, estimator
        if key in self._filled:
            return self._filled[key]
        for bound_s in (estimator.least_work_s, estimator.least_s):
            least_s = bound_s(moved) * (1 - _ESTIMATE_ERROR)
            if self._weigh(least_s, moved) >= below:
                self._count(_BOUND_WORK, moved)
                return None
        self._count(_ESTIMATE_WORK, moved)
        estimate = estimator.estimate(moved)
        self.is_recomputing |= estimate is not None and estimate.is_recomputing
        if estimate and estimate.is_recomputing and estimator in self._keeping:
            self._count(_ESTIMATE_WORK, moved)
            other = self._keeping[estimator].estimate(moved)
            estimate = other if other and other.time_s < estimate.time_s else estimate
        self._filled[key] = Candidate.of(estimate) if estimate else None
        return self._filled[key]

    def score(self, candidate: Candidate, below: float = float("inf")) -> float:
        """Return the score of a candidate; infinite if a stage lacks memory.

        If it is not below `below`, the result may be any other number that is not below it.
        """
        known = self._scores.get(candidate)
        if known is not None:
            return known
        distinct = self._distinct(candidate)
        least_s = max(_least_s(self._work_s(key, layers), n) for key, layers, n in distinct)
        least_s = max(least_s, candidate.estimate_s * (1 - _ESTIMATE_ERROR))
        least = self._weigh(least_s, candidate.arrangement)
        if least >= below:
            self._count(_BOUND_WORK, candidate.arrangement)
            return least
        self._count(_RUN_WORK, candidate.arrangement)
        self.work_done += self._num_actions(candidate)
        if self._can_be_run(candidate):
            time_s = self._run_s(candidate)
        else:
            found = self._fitting(candidate, below)
            if found is None:
                if below == float("inf"):
                    self._scores[candidate] = below
                return float("inf")
            self._settled[candidate] = found
            time_s = found[1].iteration_time_s
        score = self._weigh(time_s, candidate.arrangement)
        self._scores[candidate] = score
        return score

    def _can_be_run(self, candidate: Candidate) -> bool:
        """Return whether `_run_s` applies: all fits, and no ring depends on the order of ranks."""
        cost = self.estimator.cost
        by_ranks = bool(cost.special_links) and not cost.layout.sharded
        return not by_ranks and self._fits_as_it_is(candidate)

    def _run_s(self, candidate: Candidate) -> float:
        """Return the seconds that `simulate` gives for a candidate that fits as it is."""
        cost, num_pipelines = self.estimator.cost, len(candidate.arrangement)
        rows = zip(candidate.arrangement, candidate.layers, candidate.num_microbatches, strict=True)
        alike = Counter(rows)
        exchange = ExchangeTable(
            [
                Holders(
                    layers=layers,
                    tp_degrees=pipeline.tp_degrees,
                    ranks=(tuple([self.estimator.rank_of_node[n] for n in pipeline.nodes]),)
                    * number,
                )
                for (pipeline, layers, _), number in alike.items()
            ],
            cost,
        )
        compute = [self._times(*kind) for kind in alike]
        pulled = exchange.pull_start_s([times.forward_s for times in compute])
        blocking = cost.layout.blocking_messages
        ends_s = [line.end_s for line in propagate_all(compute, pulled, blocking=blocking)]
        backward_s = [times.backward_s for times in compute]
        pushed_s = exchange.push_end_s(ends_s, backward_s, [True] * len(compute))
        return max(
            end + cost.update_s(shape, cost.num_owned_params(shape, num_pipelines))
            for (pipeline, layers, _), row in zip(alike, pushed_s, strict=True)
            for shape, end in zip(
                self._shapes(self.estimator.key(pipeline), layers), row, strict=True
            )
        )

    def _times(self, pipeline: PipelineNodes, layers: tuple[int, ...], count: int) -> EqualTimes:
        """Return the seconds of all actions and messages of a pipeline, nothing recomputed."""
        key = self.estimator.key(pipeline), layers, count
        found = self._equal_times.get(key)
        if found is None:
            found = self._equal(pipeline, self._shapes(*key[:2]), count)
            self._equal_times[key] = found
        return found

    def _equal(
        self, pipeline: PipelineNodes, shapes: Sequence[StageShape], count: int
    ) -> EqualTimes:
        cost, microbatch = self.estimator.cost, self.estimator.workload.microbatch
        pairs = [cost.compute_s(shape, microbatch) for shape in shapes]
        hops = list(itertools.starmap(self.estimator.hop_s, itertools.pairwise(pipeline.stages)))
        return EqualTimes(
            forward_s=tuple([forward for forward, _ in pairs]),
            backward_s=tuple([backward for _, backward in pairs]),
            forward_message_s=tuple([there for there, _ in hops]),
            backward_message_s=tuple([back for _, back in hops]),
            num_microbatches=count,
        )

    def _fitting(
        self, candidate: Candidate, below: float
    ) -> tuple[ParallelPlan, Simulation] | None:
        """Return the best plan of a candidate and its simulation; settle memory if it is short.

        None if no plan with settled memory fits and has a score below `below`.
        """
        estimator = self.estimator
        plan = to_plan(
            candidate.arrangement,
            candidate.layers,
            candidate.num_microbatches,
            estimator.cost.cluster,
        )
        if self._fits_as_it_is(candidate):
            return plan, self._simulate(plan)
        self._count(_SETTLE_WORK, candidate.arrangement)
        settled = settle_memory(
            plan,
            estimator.cost,
            estimator.workload.microbatch,
            idle_may_own=estimator.idle_may_own,
        )
        best: tuple[ParallelPlan, Simulation] | None = None
        least_s = [self._least_plan_s(again, candidate) for again in settled]
        # In order of their lower bounds, so that the rest need no simulation.
        for index in sorted(range(len(settled)), key=least_s.__getitem__):
            again = settled[index]
            if self._weigh(least_s[index], candidate.arrangement) >= below:
                break
            self._count(_SETTLE_WORK, candidate.arrangement)
            self.work_done += self._num_actions(candidate)
            simulation = self._simulate(again)
            score = self._weigh(simulation.iteration_time_s, candidate.arrangement)
            if score < below and simulation.fits:
                best, below = (again, simulation), score
        return best

    def _simulate(self, plan: ParallelPlan) -> Simulation:
        microbatch = self.estimator.workload.microbatch
        batches = [[microbatch] * (p.num_microbatches or 0) for p in plan.pipelines]
        return simulate(plan, self.estimator.cost, batches)

    def _fits_as_it_is(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits with holders as owners and nothing recomputed."""
        cost, microbatch = self.estimator.cost, self.estimator.workload.microbatch
        num_pipelines = len(candidate.arrangement)
        for pipeline_key, layers, count in self._distinct(candidate):
            held = min(len(layers), count)
            key = pipeline_key, layers, held, num_pipelines
            if key not in self._fits:
                self._fits[key] = all(
                    cost.stage_memory(
                        shape, num_pipelines, [microbatch] * held, len(layers) - stage
                    ).total
                    <= cost.usable_bytes(shape.device)
                    for stage, shape in enumerate(self._shapes(pipeline_key, layers))
                )
            if not self._fits[key]:
                return False
        return True

    def _shapes(self, key: PipelineKey, layers: tuple[int, ...]) -> list[StageShape]:
        degrees, classes, _ = key
        last = len(layers) - 1
        return [
            self.estimator.shape(
                self.estimator.node_of_class[kind], degree, count, first=s == 0, last=s == last
            )
            for s, (kind, degree, count) in enumerate(zip(classes, degrees, layers, strict=True))
        ]

    def _work_s(self, key: PipelineKey, layers: tuple[int, ...]) -> tuple[float, ...]:
        """Return each stage's seconds of a micro-batch, nothing recomputed."""
        found = self._work.get((key, layers))
        if found is None:
            cost, microbatch = self.estimator.cost, self.estimator.workload.microbatch
            shapes = self._shapes(key, layers)
            found = tuple([sum(cost.compute_s(shape, microbatch)) for shape in shapes])
            self._work[key, layers] = found
        return found

    def _least_plan_s(self, plan: ParallelPlan, candidate: Candidate) -> float:
        """Return the seconds of a candidate's plan without exchange and optimizer steps."""
        rows = zip(candidate.arrangement, plan.pipelines, strict=True)
        return max(
            self._alone_s(nodes, tuple(map(self.estimator.cost.shape_of, p.stages)), count)
            for nodes, p in rows
            if (count := p.num_microbatches)
        )

    def _alone_s(
        self, pipeline: PipelineNodes, shapes: tuple[StageShape, ...], count: int
    ) -> float:
        """Return the seconds of a pipeline that waits for no other."""
        key = self.estimator.key(pipeline), shapes, count
        found = self._alone.get(key)
        if found is None:
            blocking = self.estimator.cost.layout.blocking_messages
            times = self._equal(pipeline, shapes, count)
            line = propagate(times, (0.0,) * len(shapes), blocking=blocking)
            found = self._alone[key] = max(line.end_s)
        return found

    def _distinct(self, candidate: Candidate) -> set[tuple[PipelineKey, tuple[int, ...], int]]:
        """Return the distinct pipelines, as (class, layers, micro-batches)."""
        return set(
            zip(
                self.estimator.keys(candidate.arrangement),
                candidate.layers,
                candidate.num_microbatches,
                strict=True,
            )
        )

    def _count(self, per_stage: int, arrangement: Arrangement) -> None:
        num_stages = sum([len(nodes) for _, nodes in arrangement])
        self.work_done += per_stage * (num_stages + _WORK_OF_A_PLAN)

    def _num_actions(self, candidate: Candidate) -> int:
        """Return about how many actions a simulation runs."""
        sizes = [(len(layers), count) for _, layers, count in self._distinct(candidate)]
        return sum(size * min(count, _ROUNDS * size) for size, count in sizes)


def _least_s(work_s: Iterable[float], num_microbatches: int) -> float:
    """Return a lower bound on a pipeline's seconds, given each stage's for a micro-batch."""
    before_s, least_s = 0.0, 0.0
    for seconds in work_s:
        least_s = max(least_s, num_microbatches * seconds + before_s)
        before_s += seconds
    return least_s
