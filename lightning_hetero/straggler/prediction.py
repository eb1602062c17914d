"""Predict iterations of a run's plans under a fault, from observed costs.

Nothing needs to be known about model or devices. A stage takes as long as stages of the same shape
took while nothing was slow, multiplied by the factor of its slowest rank. If no stage with that
number of layers was observed, each layer takes the least seconds that any stage showed, and first
and last stages take in addition what they took beyond their layers. A message takes as long as a
probe of its link. Times of slow parts are multiplied by the factors that were found. For pull and
push the bytes in the runtime's transfer tables are used, because slices keep their owners when
ranks swap places. Everything else in the measured iteration (optimizer, data, logging) is a
constant. The simulator combines these times.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange.neighbours import deal_pieces
from lightning_hetero.exchange.transfers import TransferTable
from lightning_hetero.planner.pace import Pace, balance_layers, deal
from lightning_hetero.simulator.propagate import EqualTimes, propagate
from lightning_hetero.straggler.events import Finding, FindingKind, normalise_pair
from lightning_hetero.straggler.paces import Observation

_LEAST_EXCESS = 0.05
"""Least growth of an iteration, as a share of it, that counts as a slowdown."""
_LEAST_SHARE = 0.1
"""Least share of a slowdown that something must explain to count as its cause."""
_Shape = tuple[int, int, bool, bool]
"""Ranks and layers of a stage, and whether it is the first and the last of its pipeline."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Measurements of a run while nothing was slow."""

    plan: ParallelPlan
    """The plan that ran; of several, the one that ran most often."""
    counts: tuple[int, ...]
    """Micro-batches of each pipeline."""
    iteration_s: float
    places: Mapping[int, Observation]
    """By global rank, for ranks that compute: times and work of a micro-batch in its place."""
    probe_s: Mapping[int, float]
    """Seconds of the matmul probe of each rank's device; empty if all devices count as equal."""
    link_s_per_byte: float
    """Seconds that a byte takes over a link that isn't slow."""
    hidden_bytes: int
    """Bytes of a hidden state."""
    value_bytes: int
    """Bytes of one value of weights and gradients when they are sent."""
    table_of: Callable[[ParallelPlan], TransferTable]
    """Returns a plan's transfer table."""
    is_assigned: bool = False
    """Whether a data module assigns samples, such that the pipelines end together."""


class RunPrediction:
    """Predicts plans in which other ranks, layers or micro-batches take the places of one that ran.

    Args:
        run: Measurements while nothing was slow.
        findings: What is slow now.
    """

    def __init__(self, run: MeasuredRun, findings: Sequence[Finding] = ()) -> None:
        self.run = run
        links = [finding for finding in findings if finding.kind is FindingKind.LINK]
        self.slow_ranks = {f.ranks[0]: f.ratio for f in findings if f not in links}
        """By rank, the factor by which it computes more slowly."""
        self.slow_links = {normalise_pair(*finding.ranks): finding.ratio for finding in links}
        """By link, the factor by which a message takes longer."""
        self._healthy = RunPrediction(run) if findings else self
        found: dict[_Shape, list[FloatArray]] = defaultdict(list)
        self._stages = _stages_of(run.plan)
        for rank, stage in self._stages.items():
            place = run.places[rank]
            unit = place.work * run.probe_s.get(rank, 1.0)
            seconds = np.array([place.forward_s, place.backward_s])
            found[self._shape(stage)].append(seconds / unit)
        self._known_s = {shape: np.median(times, axis=0) for shape, times in found.items()}
        """Seconds per unit of work of each shape of stage, on a device of factor 1."""
        self._ends_s: dict[tuple[object, ...], float] = {}

    def iteration_s(self, plan: ParallelPlan) -> float:
        """Return the seconds of an iteration of a plan."""
        run = self.run
        slow, before, after = {*chain(*self.slow_links)}, self._stages, _stages_of(plan)
        # The exchange of ranks that stay where they are, and have no slow link, doesn't change.
        ranks = [
            rank
            for rank in {*before, *after}
            if rank in slow
            or run.plan.place(rank) != plan.place(rank)
            or before[rank].layers != after[rank].layers
        ]
        later_s = self._pipelines_s(plan) - self._healthy._measured_s
        if ranks:
            later_s += self._exchange_s(plan, ranks)
            later_s -= self._healthy._exchange_s(run.plan, ranks)
        return run.iteration_s + later_s

    def counts(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Return each pipeline's micro-batches: the plan's number, or else the measured one."""
        if self.run.is_assigned:
            return self.run.counts
        pairs = zip(self.run.counts, plan.pipelines, strict=True)
        return tuple(
            count if p.num_microbatches is None else p.num_microbatches for count, p in pairs
        )

    def balanced(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with micro-batches moved away from slow pipelines: S2.

        The plan stays as it is if samples are assigned, since then every iteration is balanced, or
        if its micro-batches have unequal sizes, which other numbers of them would change.
        """
        sizes = {pipeline.microbatch_size or 1 for pipeline in plan.pipelines}
        if self.run.is_assigned or len(sizes) > 1:
            return plan
        # A pipeline takes `fill + slope·K`: both follow from two simulations.
        total, paces = sum(self.run.counts), []
        usual = max(1, total // plan.num_pipelines)
        for index in range(plan.num_pipelines):
            one, two = (self._end_s(plan, index, n) for n in (usual, 2 * usual))
            paces.append(Pace((two - one) / usual, max(0.0, 2 * one - two)))
        shares = deal(paces, [1] * len(paces), total)
        assert shares is not None, "every pipeline had a micro-batch"
        pipelines = tuple(
            p if old == new else replace(p, num_microbatches=new)
            for p, old, new in zip(plan.pipelines, self.counts(plan), shares, strict=True)
        )
        return replace(plan, pipelines=pipelines)

    def balanced_s(self, plan: ParallelPlan) -> float:
        """Return the seconds of an iteration of a plan with micro-batches moved."""
        return self.iteration_s(self.balanced(plan))

    def with_layers_moved(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with the layers of each pipeline divided anew: S2b.

        The plan stays as it is if it recomputes layers, because their seconds aren't known one by
        one; so do pipelines with chunks.
        """
        if any(any(stage.recomputation.values()) for _, _, stage in plan.iter_stages()):
            return plan
        return replace(plan, pipelines=tuple(map(self._cut_anew, plan.pipelines)))

    def _cut_anew(self, pipeline: PipelinePlan) -> PipelinePlan:
        stages, numbers = pipeline.stages, range(pipeline.num_layers + 1)
        if pipeline.has_chunks:
            return pipeline

        def times_s(stage: StagePlan) -> FloatArray:
            ends = stage is stages[0], stage is stages[-1]
            unit_s = [self._unit_s((stage.tp_degree, n, *ends)).sum() for n in numbers]
            return max(map(self.factor, stage.ranks)) * np.array(unit_s)

        sizes = balance_layers([times_s(stage) for stage in stages], pipeline.num_layers)
        assert sizes is not None, "a plan has a layer for each stage"
        parts = zip(stages, pairwise([0, *accumulate(sizes)]), strict=True)
        return replace(pipeline, stages=tuple(replace(s, layers=range(*cut)) for s, cut in parts))

    def paces(self, plan: ParallelPlan) -> dict[int, float]:
        """Return the healthy pace of each rank that computes: seconds per unit of work.

        Scaled to the whole model, as in a rank's own history.
        """
        return {
            rank: self._healthy.factor(rank) * float(unit_s.sum()) / plan.share(rank)
            for rank, stage in _stages_of(plan).items()
            for unit_s in [self._unit_s(self._shape(stage))]
        }

    def slowdown(self, rank: int, other: int) -> float:
        """Return a rank's time in another rank's place over that rank's time there."""
        return self.factor(rank) / self._healthy.factor(other)

    def factor(self, rank: int) -> float:
        """Return by what a rank's device multiplies the times of a stage."""
        slow, place = self.slow_ranks.get(rank, 1.0), self.run.places.get(rank)
        if place is None:
            return slow * self.run.probe_s.get(rank, 1.0)
        usual_s = place.work * float(self._unit_s(self._shape(self._stages[rank])).sum())
        return slow * (place.forward_s + place.backward_s) / usual_s

    def _shape(self, stage: StagePlan) -> _Shape:
        layers = stage.layers
        ends = layers.start == 0, layers.stop == self.run.plan.num_layers
        return stage.tp_degree, len(layers), *ends

    def _unit_s(self, shape: _Shape) -> FloatArray:
        """Return forward and backward of a stage, per unit of work, on a device of factor 1."""
        if shape in self._known_s:
            return self._known_s[shape]
        like = {known: s for known, s in self._known_s.items() if known[0] == shape[0]}
        layer_s: FloatArray = min((s / known[1] for known, s in like.items()), key=np.sum)
        found = shape[1] * layer_s
        for end in (2, 3):
            more = [s - known[1] * layer_s for known, s in like.items() if known[end]]
            if shape[end] and more:
                found = found + min(more, key=np.sum)
        return found

    @cached_property
    def _measured_s(self) -> float:
        """Seconds until all pipelines of the plan that ran have ended."""
        return self._pipelines_s(self.run.plan)

    def _pipelines_s(self, plan: ParallelPlan) -> float:
        """Return the seconds until all pipelines have ended."""
        counts = self.counts(plan)
        ends_s = {i: self._end_s(plan, i, count) for i, count in enumerate(counts) if count}
        if not self.run.is_assigned:
            return max(ends_s.values())
        # Pipelines end together, each working at the rate that it has alone.
        works = {index: counts[index] * self._work(index) for index in ends_s}
        return sum(works.values()) / sum(works[index] / ends_s[index] for index in works)

    def _work(self, index: int) -> float:
        return self.run.places[self.run.plan.pipelines[index].stages[0].ranks[0]].work

    def _end_s(self, plan: ParallelPlan, index: int, count: int) -> float:
        """Return when a pipeline has run this number of micro-batches, by itself."""
        pipeline, work = plan.pipelines[index], self._work(index)
        stages, key = pipeline.stages, (pipeline.stages, work, count)
        if key not in self._ends_s:
            seconds = [
                work * max(map(self.factor, s.ranks)) * self._unit_s(self._shape(s)) for s in stages
            ]
            forward_s, backward_s = np.transpose(seconds).tolist()
            hops = list(pairwise(stages))
            times = EqualTimes(
                forward_s=tuple(forward_s),
                backward_s=tuple(backward_s),
                forward_message_s=tuple(self._message_s(a, b) for a, b in hops),
                backward_message_s=tuple(self._message_s(b, a) for a, b in hops),
                num_microbatches=count,
            )
            begin_s = [0.0] * len(stages)
            self._ends_s[key] = max(propagate(times, begin_s, workers=pipeline.workers).end_s)
        return self._ends_s[key]

    def _message_s(self, sender: StagePlan, receiver: StagePlan) -> float:
        """Return the seconds of an activation; a sender's pieces go one after another."""
        if sender.ranks == receiver.ranks:
            return 0.0
        by_sender: dict[int, float] = defaultdict(float)
        for piece in deal_pieces(sender.ranks, receiver.ranks):
            seconds = self.run.hidden_bytes * self._s_per_byte(piece.sender, piece.receiver)
            by_sender[piece.sender] += seconds / piece.count
        return max(by_sender.values())

    def _s_per_byte(self, rank_a: int, rank_b: int) -> float:
        slow = self.slow_links.get(normalise_pair(rank_a, rank_b), 1.0)
        return slow * self.run.link_s_per_byte

    def _exchange_s(self, plan: ParallelPlan, ranks: Collection[int]) -> float:
        """Return the seconds of pull and push of some ranks: the slowest's, one by one."""
        # Transfers don't depend on the numbers of micro-batches.
        same = tuple(replace(p, num_microbatches=1) for p in plan.pipelines)
        table = self.run.table_of(replace(plan, pipelines=same))
        return sum(
            max((self._traffic_s(table, rank, push=push) for rank in ranks), default=0.0)
            for push in (True, False)
        )

    def _traffic_s(self, table: TransferTable, rank: int, *, push: bool) -> float:
        """Return the seconds of a rank's sends or of its receives, whichever take longer."""
        seconds = {True: 0.0, False: 0.0}
        for (source, destination), numel in table.traffic(rank, push=push).items():
            if source != destination:
                rate = self._s_per_byte(source, destination)
                seconds[source == rank] += numel * self.run.value_bytes * rate
        return max(seconds.values())


def _stages_of(plan: ParallelPlan) -> dict[int, StagePlan]:
    """Return the stage of each rank that computes."""
    return {rank: stage for _, _, stage in plan.iter_stages() for rank in stage.ranks}


def move_ranks(plan: ParallelPlan, taken_by: Mapping[int, int]) -> ParallelPlan:
    """Return the plan with ranks replaced; `taken_by` maps a rank to its replacement."""

    def moved(stage: StagePlan) -> StagePlan:
        return replace(stage, ranks=tuple(taken_by.get(rank, rank) for rank in stage.ranks))

    return replace(
        plan,
        pipelines=tuple(replace(p, stages=tuple(map(moved, p.stages))) for p in plan.pipelines),
    )


def true_causes(
    findings: Sequence[Finding],
    run: MeasuredRun | None,
    *,
    excess_s: float = math.nan,
    known: Sequence[Finding] = (),
) -> tuple[Finding, ...]:
    """Return those findings that explain a tenth of the slowdown, or more.

    A finding's share is the mean of what is saved if only it is removed, and what is lost if only
    it is kept. So nothing is done about a device whose removal would change nothing. As long as
    iterations are no longer than before, only what was known to be slow counts as slow.

    Args:
        findings: What was found slow.
        run: Measurements while nothing was slow; if None, all findings count as causes.
        excess_s: By how much iterations have become longer, seconds; NaN if unknown.
        known: The findings of the last diagnosis.
    """
    if run is None:
        return tuple(findings)

    def predict_s(findings: Sequence[Finding]) -> float:
        return RunPrediction(run, findings).iteration_s(run.plan)

    if excess_s < _LEAST_EXCESS * run.iteration_s:
        before = [finding.ranks for finding in known]
        findings = [finding for finding in findings if finding.ranks in before]
    healthy_s, slow_s = predict_s(()), predict_s(findings)
    least_s = _LEAST_SHARE * max(slow_s - healthy_s, excess_s if math.isfinite(excess_s) else 0.0)
    found = []
    for finding in findings:
        removed_s = slow_s - predict_s([other for other in findings if other is not finding])
        kept_s = predict_s([finding]) - healthy_s
        if removed_s + kept_s >= 2 * least_s:
            found.append(finding)
    return tuple(found)
