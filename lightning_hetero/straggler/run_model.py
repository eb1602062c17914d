"""Predict a plan's iteration time under a fault, from this run's own measurements.

Nothing needs to be known of model or devices: a place of the plan takes, on any rank, the time that
was measured there while nothing was slow, times how much slower the rank's device is by its probe.
Pipelines are timed by the simulator's own 1F1B; push and pull by the bytes of the runtime's own
transfer tables, because slices keep their owners when ranks swap places. The rest of the measured
iteration (optimizer, data, logging) is a constant.

Micro-batches are balanced as Greyhound's S2 does, but by min-max, not variance (see
`balance_microbatches`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_hetero.assign.microbatch_shares import share_microbatches
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.neighbours import deal_pieces
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.core.transfers import TransferTable
from lightning_hetero.simulator.propagate import EqualTimes, propagate
from lightning_hetero.straggler.locate import Finding, FindingKind, Pair, normalise_pair

__all__ = ["MeasuredRun", "PlaceTimes", "RunModel", "Slowness", "balance_microbatches"]


def balance_microbatches(
    times_s: Sequence[float], num_microbatches: int, *, fixed_s: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return how many micro-batches each pipeline gets so that the last one ends first.

    ::

        minimise   max_i  fixed_i + m_i · t_i
        such that  Σ m_i = M,  m_i ≥ 1,  m_i whole

    The planner distributes micro-batches by the same water filling; of pipelines that would end
    together, the first gets more.

    Args:
        times_s: Seconds per micro-batch of each pipeline (of its slowest stage).
        num_microbatches: Micro-batches of the whole iteration, one a pipeline at least.
        fixed_s: Seconds of each pipeline that don't depend on its count, such as for filling it.

    Raises:
        PlanningError: The numbers can't be met.
    """
    count = len(times_s)
    fixed = [0.0] * count if fixed_s is None else list(fixed_s)
    if not count or len(fixed) != count:
        raise PlanningError(
            f"{count} times and {len(fixed)} fixed times are given; give one of each per pipeline, "
            "and at least one pipeline."
        )
    bad = [t for t in times_s if not 0.0 < t < math.inf]
    bad += [f for f in fixed if not 0.0 <= f < math.inf]
    if bad:
        raise PlanningError(
            f"A pipeline's time is {bad[0]} s; times must be positive and finite. Leave a dead "
            "pipeline out."
        )
    shares = share_microbatches(fixed[::-1], times_s[::-1], [1] * count, num_microbatches)
    if shares is None:
        raise PlanningError(
            f"{num_microbatches} micro-batches are too few for {count} pipelines. Give more."
        )
    return tuple(share for (share,) in reversed(shares))


_FEW_RANKS = 32
"""Most ranks for which all messages are counted; of more ranks only those of moved or slow ones."""


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Slow ranks and links, with their factors."""

    ranks: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[Pair, float] = field(default_factory=dict)

    @classmethod
    def of(cls, findings: Sequence[Finding], world_size: int) -> "Slowness":
        """Return the slowness that findings describe; a slow port means all links of its rank."""
        ranks: dict[int, float] = {}
        links: dict[Pair, float] = {}
        for finding in findings:
            if finding.kind is FindingKind.LINK:
                links[normalise_pair(*finding.ranks)] = finding.ratio
            elif finding.kind is FindingKind.PORT:
                own = finding.ranks[0]
                peers = [rank for rank in range(world_size) if rank != own]
                links |= {normalise_pair(own, peer): finding.ratio for peer in peers}
            else:
                ranks[finding.ranks[0]] = finding.ratio
        return cls(ranks=ranks, links=links)


@dataclass(frozen=True, kw_only=True)
class PlaceTimes:
    """Times of a micro-batch in one place of the plan, on the rank that has that place."""

    forward_s: float
    backward_s: float
    work: float = 1.0
    """Work of a micro-batch, in any unit that is the same in all places."""

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


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


class RunModel:
    """Predicts plans with the same places as the plan that ran, but other ranks or micro-batches.

    Args:
        facts: Measurements while nothing was slow.
        slowness: The ranks and links that are slow now.
    """

    def __init__(self, facts: MeasuredRun, slowness: Slowness) -> None:
        self.facts = facts
        self._slow = slowness
        self._exchange_s: dict[tuple[ParallelPlan, bool], float] = {}
        self._rest_s = facts.iteration_s - self._moving_s(facts.plan, healthy=True)

    def iteration_s(self, plan: ParallelPlan) -> float:
        """Return the seconds of an iteration of a plan."""
        return self._rest_s + self._moving_s(plan, healthy=False)

    def counts(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Return each pipeline's micro-batches: the plan's number, or else the measured one."""
        if self.facts.is_assigned:
            return self.facts.counts
        return tuple(
            measured if pipeline.num_microbatches is None else pipeline.num_microbatches
            for measured, pipeline in zip(self.facts.counts, plan.pipelines, strict=True)
        )

    def with_counts(self, plan: ParallelPlan, counts: Sequence[int]) -> ParallelPlan:
        """Return the plan with these numbers of micro-batches."""
        pipelines = zip(plan.pipelines, self.counts(plan), counts, strict=True)
        return replace(
            plan,
            pipelines=tuple(
                pipeline if new == old else replace(pipeline, num_microbatches=new)
                for pipeline, old, new in pipelines
            ),
        )

    def balanced(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with micro-batches moved away from slow pipelines: S2.

        The plan is unchanged if samples are assigned, since every iteration is balanced then, or if
        it names sizes of micro-batches, which other numbers would change.
        """
        if self.facts.is_assigned or any(item.microbatch_size for item in plan.pipelines):
            return plan
        slowest_s, others_s = [], []
        for index in range(plan.num_pipelines):
            times = self._pipeline_times(index, plan, 1)
            stages = zip(times.forward_s, times.backward_s, strict=True)
            links = zip(times.forward_message_s, times.backward_message_s, strict=True)
            parts_s = [forward + backward for forward, backward in (*stages, *links)]
            slowest_s.append(max(parts_s))
            others_s.append(sum(parts_s) - slowest_s[-1])
        counts = balance_microbatches(slowest_s, sum(self.facts.counts), fixed_s=others_s)
        return self.with_counts(plan, counts)

    def paces(self, plan: ParallelPlan) -> dict[int, float]:
        """Return the healthy pace of each rank that computes: seconds per unit of work.

        Scaled to the whole model, as in a rank's own history.
        """
        places = {
            rank: self._place(p, s, rank, healthy=True)
            for p, s, stage in plan.iter_stages()
            for rank in stage.ranks
        }
        return {
            rank: place.total_s / (place.work * plan.share(rank)) for rank, place in places.items()
        }

    def slowdown(self, rank: int, other: int, *, healthy: bool = False) -> float:
        """Return a rank's time in another rank's place over that rank's time there."""
        factor = 1.0 if healthy else self._slow.ranks.get(rank, 1.0)
        probe_s = self.facts.probe_s
        return factor * probe_s[rank] / probe_s[other] if probe_s else factor

    def _moving_s(self, plan: ParallelPlan, *, healthy: bool) -> float:
        """Return the part of an iteration that depends on the plan."""
        counts = self.counts(plan)
        ends_s = {
            index: self._pipeline_s(index, plan, count, healthy=healthy)
            for index, count in enumerate(counts)
            if count
        }
        moving_s = max(ends_s.values())
        if self.facts.is_assigned:
            # Pipelines end together, each working at the rate that it has alone.
            first = [pipeline.stages[0].ranks[0] for pipeline in self.facts.plan.pipelines]
            works = {
                index: counts[index] * self.facts.places[first[index]].work for index in ends_s
            }
            moving_s = sum(works.values()) / sum(works[index] / ends_s[index] for index in works)
        return moving_s + self._exchange(plan, healthy=healthy)

    def _pipeline_s(
        self, index: int, plan: ParallelPlan, num_microbatches: int, *, healthy: bool
    ) -> float:
        times = self._pipeline_times(index, plan, num_microbatches, healthy=healthy)
        return max(propagate(times, [0.0] * plan.pipelines[index].num_stages).end_s)

    def _pipeline_times(
        self, index: int, plan: ParallelPlan, num_microbatches: int, *, healthy: bool = False
    ) -> EqualTimes:
        pipeline = plan.pipelines[index]
        places = [
            max(
                (self._place(index, s, rank, healthy=healthy) for rank in stage.ranks),
                key=lambda place: place.total_s,
            )
            for s, stage in enumerate(pipeline.stages)
        ]
        messages_s = tuple(
            self.facts.hidden_bytes * self._boundary_s_per_byte(pipeline, s, healthy=healthy)
            for s in range(pipeline.num_stages - 1)
        )
        return EqualTimes(
            forward_s=tuple(place.forward_s for place in places),
            backward_s=tuple(place.backward_s for place in places),
            forward_message_s=messages_s,
            backward_message_s=messages_s,
            num_microbatches=num_microbatches,
        )

    def _place(self, pipeline: int, stage: int, rank: int, *, healthy: bool) -> PlaceTimes:
        """Return a micro-batch's times on a rank in a place of the plan that ran."""
        measured = self.facts.plan.pipelines[pipeline].stages[stage].ranks[0]
        factor = self.slowdown(rank, measured, healthy=healthy)
        times = self.facts.places[measured]
        return replace(
            times, forward_s=times.forward_s * factor, backward_s=times.backward_s * factor
        )

    def _boundary_s_per_byte(self, pipeline: PipelinePlan, stage: int, *, healthy: bool) -> float:
        """Return the seconds per byte of an activation, or of its gradient if that is slower.

        Pieces that one sender sends to a larger group go one after another.
        """
        groups = pipeline.stages[stage].ranks, pipeline.stages[stage + 1].ranks
        by_sender: defaultdict[tuple[bool, int], float] = defaultdict(float)
        for is_gradient, (senders, receivers) in enumerate((groups, groups[::-1])):
            for piece in deal_pieces(senders, receivers):
                seconds = self._s_per_byte(piece.sender, piece.receiver, healthy=healthy)
                by_sender[bool(is_gradient), piece.sender] += seconds / piece.count
        return max(by_sender.values())

    def _s_per_byte(self, rank_a: int, rank_b: int, *, healthy: bool) -> float:
        ratio = 1.0 if healthy else self._slow.links.get(normalise_pair(rank_a, rank_b), 1.0)
        return ratio * self.facts.link_s_per_byte

    def _exchange(self, plan: ParallelPlan, *, healthy: bool) -> float:
        """Return the seconds of pull and push: the slowest rank's, its messages one by one."""
        # Transfers don't depend on the numbers of micro-batches.
        key = self.with_counts(plan, [1] * plan.num_pipelines), healthy
        found = self._exchange_s.get(key)
        if found is None:
            table = self.facts.table_of(key[0])
            phases: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
            for rank in self._counted_ranks(plan):
                for push, seconds in phases.items():
                    moved = table.traffic(rank, push=push)
                    seconds.append(self._traffic_s(moved, rank, healthy=healthy))
            found = self._exchange_s[key] = max(phases[True]) + max(phases[False])
        return found

    def _counted_ranks(self, plan: ParallelPlan) -> list[int]:
        base = self.facts.plan
        everyone = sorted({*base.ranks, *plan.ranks})
        if len(everyone) <= _FEW_RANKS:
            return everyone
        slow = {rank for pair in self._slow.links for rank in pair}
        return [rank for rank in everyone if rank in slow or plan.place(rank) != base.place(rank)]

    def _traffic_s(self, numels: Counter[tuple[int, int]], rank: int, *, healthy: bool) -> float:
        """Return the seconds of a rank's sends or of its receives, whichever take longer."""
        seconds: dict[bool, float] = defaultdict(float)
        for (source, destination), numel in numels.items():
            if source != destination:
                rate = self._s_per_byte(source, destination, healthy=healthy)
                seconds[source == rank] += numel * self.facts.value_bytes * rate
        return max(seconds.values(), default=0.0)
