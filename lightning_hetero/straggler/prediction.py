"""Predict iterations of a run's plans under a fault: the simulator's propagation, observed costs.

Nothing needs to be known of model or devices: a stage takes what stages of its shape took while
nothing was slow, times the factor of its slowest rank, and a message what a probe of its link took.
What was found slow scales these. Pull and push count the bytes of the runtime's own transfer
tables, since slices keep their owners when ranks take other places. The rest of the measured
iteration (optimizer, data, logging) is a constant.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lightning_hetero.core.neighbours import deal_pieces
from lightning_hetero.core.places import workers_of
from lightning_hetero.core.plan import ParallelPlan, StagePlan
from lightning_hetero.core.transfers import TransferTable
from lightning_hetero.planner.pace import Pace, deal
from lightning_hetero.simulator.propagate import EqualTimes, propagate
from lightning_hetero.straggler.events import Finding, FindingKind, Pair, normalise_pair

__all__ = ["MeasuredRun", "PlaceTimes", "RunPrediction", "Slowness", "move_ranks", "true_causes"]

_LEAST_SHARE = 0.1
"""Least share of a slowdown that a true cause explains."""


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Slow ranks and links, with their factors."""

    ranks: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[Pair, float] = field(default_factory=dict)

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> "Slowness":
        """Return the slowness that findings describe."""
        links = {f.ranks: f.ratio for f in findings if f.kind is FindingKind.LINK}
        return cls(
            ranks={f.ranks[0]: f.ratio for f in findings if f.ranks not in links},
            links={normalise_pair(a, b): ratio for (a, b), ratio in links.items()},
        )


@dataclass(frozen=True, kw_only=True)
class PlaceTimes:
    """Times of a micro-batch in one place of the plan, on the rank that has that place."""

    forward_s: float
    backward_s: float
    work: float = 1.0
    """Work of a micro-batch, in any unit that is the same in all places."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Measurements of a run while nothing was slow."""

    plan: ParallelPlan
    """The plan that ran."""
    counts: tuple[int, ...]
    """Micro-batches of each pipeline."""
    iteration_s: float
    places: Mapping[int, PlaceTimes]
    """By global rank, for ranks that compute."""
    probe_s: Mapping[int, float]
    """Seconds of the matmul probe of each rank's device; empty if all count as equal."""
    link_s_per_byte: float
    """Seconds a byte takes over a link that isn't slow."""
    hidden_bytes: int
    """Bytes of a hidden state."""
    value_bytes: int
    """Bytes of one value of weights and gradients when they are sent."""
    table_of: Callable[[ParallelPlan], TransferTable]
    """Returns a plan's transfer table."""
    is_assigned: bool = False
    """Whether a data module assigns samples so that the pipelines end together."""
    share: float = 1.0
    """Share of the iterations that ran the plan."""


class _ObservedCosts:
    """What stages and messages of a run cost while some ranks and links are slow."""

    def __init__(self, run: MeasuredRun, slowness: Slowness) -> None:
        self._run, self._slow = run, slowness
        found: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
        for _, _, stage in run.plan.iter_stages():
            for rank in stage.ranks:
                place = run.places[rank]
                unit = place.work * run.probe_s.get(rank, 1.0)
                found[self._shape(stage)].append((place.forward_s / unit, place.backward_s / unit))
        self._stage_s = {
            shape: (statistics.median(f for f, _ in times), statistics.median(b for _, b in times))
            for shape, times in found.items()
        }
        """Seconds per unit of work of each shape of stage, on a device of factor 1."""
        self._ends_s: dict[tuple[object, ...], float] = {}

    def _shape(self, stage: StagePlan) -> tuple[int, ...]:
        layers = stage.layers
        ends = layers.start == 0, layers.stop == self._run.plan.num_layers
        return stage.tp_degree, len(layers), *ends

    def factor(self, rank: int) -> float:
        """Return by what a rank's device multiplies the times of a stage."""
        slow, place = self._slow.ranks.get(rank, 1.0), self._run.places.get(rank)
        if place is None:
            return slow * self._run.probe_s.get(rank, 1.0)
        at = self._run.plan.place(rank)
        assert at is not None
        stage = self._run.plan.pipelines[at.pipeline_index].stages[at.stage_index]
        usual_s = place.work * sum(self._stage_s[self._shape(stage)])
        return slow * (place.forward_s + place.backward_s) / usual_s

    def pace(self, stage: StagePlan, rank: int) -> float:
        """Return a rank's seconds per unit of work in a stage."""
        return self.factor(rank) * sum(self._stage_s[self._shape(stage)])

    def pipeline_s(self, stages: tuple[StagePlan, ...], work: float, count: int) -> float:
        """Return when a pipeline has run this number of micro-batches, by itself."""
        key = stages, work, count
        if key not in self._ends_s:
            scales = [work * max(map(self.factor, stage.ranks)) for stage in stages]
            unit_s = [self._stage_s[self._shape(stage)] for stage in stages]
            hops = list(pairwise(stages))
            times = EqualTimes(
                forward_s=tuple(k * f for k, (f, _) in zip(scales, unit_s, strict=True)),
                backward_s=tuple(k * b for k, (_, b) in zip(scales, unit_s, strict=True)),
                forward_message_s=tuple(self._message_s(a, b) for a, b in hops),
                backward_message_s=tuple(self._message_s(b, a) for a, b in hops),
                num_microbatches=count,
            )
            workers = workers_of([stage.ranks for stage in stages])
            ends_s = propagate(times, [0.0] * len(stages), workers=workers).end_s
            self._ends_s[key] = max(ends_s)
        return self._ends_s[key]

    def _message_s(self, sender: StagePlan, receiver: StagePlan) -> float:
        """Return the seconds of an activation; a sender's pieces go one after another."""
        if sender.ranks == receiver.ranks:
            return 0.0
        by_sender: dict[int, float] = defaultdict(float)
        for piece in deal_pieces(sender.ranks, receiver.ranks):
            seconds = self._run.hidden_bytes * self._s_per_byte(piece.sender, piece.receiver)
            by_sender[piece.sender] += seconds / piece.count
        return max(by_sender.values())

    def _s_per_byte(self, rank_a: int, rank_b: int) -> float:
        slow = self._slow.links.get(normalise_pair(rank_a, rank_b), 1.0)
        return slow * self._run.link_s_per_byte

    def exchange_s(self, plan: ParallelPlan, ranks: Collection[int]) -> float:
        """Return the seconds of pull and push of some ranks: the slowest's, one by one."""
        # Transfers don't depend on the numbers of micro-batches.
        same = tuple(replace(p, num_microbatches=1) for p in plan.pipelines)
        table = self._run.table_of(replace(plan, pipelines=same))
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
                seconds[source == rank] += numel * self._run.value_bytes * rate
        return max(seconds.values())


class RunPrediction:
    """Predicts plans with the same places as the plan that ran, but other ranks or micro-batches.

    Args:
        run: Measurements while nothing was slow.
        slowness: The ranks and links that are slow now.
    """

    def __init__(self, run: MeasuredRun, slowness: Slowness) -> None:
        self.run = run
        self._cost = _ObservedCosts(run, slowness)
        self._healthy = _ObservedCosts(run, Slowness())
        self._healthy_s = self._pipelines_s(run.plan, self._healthy)
        self._slow = {rank for pair in slowness.links for rank in pair}

    def iteration_s(self, plan: ParallelPlan) -> float:
        """Return the seconds of an iteration of a plan."""
        run = self.run
        # What ranks exchange that stay where they are, and have no slow link, doesn't change.
        ranks = [
            rank
            for rank in {*run.plan.ranks, *plan.ranks}
            if rank in self._slow or plan.place(rank) != run.plan.place(rank)
        ]
        later_s = self._pipelines_s(plan, self._cost) - self._healthy_s
        if ranks:
            later_s += self._cost.exchange_s(plan, ranks)
            later_s -= self._healthy.exchange_s(run.plan, ranks)
        return run.iteration_s + later_s

    def counts(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Return each pipeline's micro-batches: the plan's number, or else the measured one."""
        pairs = zip(self.run.counts, plan.pipelines, strict=True)
        if self.run.is_assigned:
            return self.run.counts
        return tuple(
            count if p.num_microbatches is None else p.num_microbatches for count, p in pairs
        )

    def balanced(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with micro-batches moved away from slow pipelines: S2.

        The plan is unchanged if samples are assigned, since every iteration is balanced then, or if
        it names sizes of micro-batches, which other numbers would change.
        """
        if self.run.is_assigned or any(item.microbatch_size for item in plan.pipelines):
            return plan
        # A pipeline takes `fill + slope·K`: both follow from two simulations.
        total, paces = sum(self.run.counts), []
        usual = max(1, total // plan.num_pipelines)
        for index in range(plan.num_pipelines):
            one, two = (self._end_s(plan, index, n, self._cost) for n in (usual, 2 * usual))
            paces.append(Pace((two - one) / usual, max(0.0, 2 * one - two)))
        shares = deal(paces, [1] * len(paces), total)
        assert shares is not None, "every pipeline had a micro-batch"
        pipelines = tuple(
            p if old == new else replace(p, num_microbatches=new)
            for p, old, new in zip(plan.pipelines, self.counts(plan), shares, strict=True)
        )
        return replace(plan, pipelines=pipelines)

    def paces(self, plan: ParallelPlan) -> dict[int, float]:
        """Return the healthy pace of each rank that computes: seconds per unit of work.

        Scaled to the whole model, as in a rank's own history.
        """
        return {
            rank: self._healthy.pace(stage, rank) / plan.share(rank)
            for _, _, stage in plan.iter_stages()
            for rank in stage.ranks
        }

    def slowdown(self, rank: int, other: int) -> float:
        """Return a rank's time in another rank's place over that rank's time there."""
        return self._cost.factor(rank) / self._healthy.factor(other)

    def _pipelines_s(self, plan: ParallelPlan, cost: _ObservedCosts) -> float:
        """Return the seconds until all pipelines have ended."""
        counts = self.counts(plan)
        ends_s = {i: self._end_s(plan, i, count, cost) for i, count in enumerate(counts) if count}
        if not self.run.is_assigned:
            return max(ends_s.values())
        # Pipelines end together, each working at the rate that it has alone.
        works = {index: counts[index] * self._work(index) for index in ends_s}
        return sum(works.values()) / sum(works[index] / ends_s[index] for index in works)

    def _work(self, index: int) -> float:
        return self.run.places[self.run.plan.pipelines[index].stages[0].ranks[0]].work

    def _end_s(self, plan: ParallelPlan, index: int, count: int, cost: _ObservedCosts) -> float:
        return cost.pipeline_s(plan.pipelines[index].stages, self._work(index), count)


def move_ranks(plan: ParallelPlan, taken_by: Mapping[int, int]) -> ParallelPlan:
    """Return the plan with places taken by other ranks ({rank: taker}); others keep theirs."""

    def moved(stage: StagePlan) -> StagePlan:
        return replace(stage, ranks=tuple(taken_by.get(rank, rank) for rank in stage.ranks))

    return replace(
        plan,
        pipelines=tuple(replace(p, stages=tuple(map(moved, p.stages))) for p in plan.pipelines),
    )


def true_causes(findings: Sequence[Finding], runs: Sequence[MeasuredRun]) -> tuple[Finding, ...]:
    """Return those findings that explain a tenth of the slowdown, or more.

    A finding's share is the mean of what is saved by removing only it, and of what is lost by
    keeping only it. So nothing is done about a device whose removal would change nothing.

    Args:
        findings: What was found slow.
        runs: Measurements of each plan that ran while nothing was slow; none believe all.
    """

    def predict_s(findings: Sequence[Finding]) -> float:
        slowness = Slowness.of(findings)
        return sum(run.share * RunPrediction(run, slowness).iteration_s(run.plan) for run in runs)

    healthy_s, slow_s = predict_s(()), predict_s(findings)
    if len(findings) < 2 or slow_s <= healthy_s:
        return tuple(findings)
    found = []
    for finding in findings:
        removed_s = slow_s - predict_s([other for other in findings if other is not finding])
        kept_s = predict_s([finding]) - healthy_s
        if removed_s + kept_s >= 2 * _LEAST_SHARE * (slow_s - healthy_s):
            found.append(finding)
    return tuple(found)
