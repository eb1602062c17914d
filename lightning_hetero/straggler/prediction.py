"""Predict iterations of a run's plans under a fault: simulations with costs that were observed.

`ObservedCost` is a cost model of the simulator. Nothing needs to be known of model or devices: a
stage takes what stages of its shape took while nothing was slow, times the factor of its slowest
rank, and a message what a probe of its link took. What was found slow scales these. Pull and push
count the bytes of the runtime's own transfer tables, since slices keep their owners when ranks take
other places. The rest of the measured iteration (optimizer, data, logging) is a constant.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from lightning_hetero.assign.microbatch_shares import share_microbatches
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.neighbours import deal_pieces
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.core.transfers import TransferTable
from lightning_hetero.simulator import CostModel, MicroBatchShape, StageShape, simulate
from lightning_hetero.straggler.events import Finding, FindingKind, Pair, normalise_pair

__all__ = [
    "MeasuredRun",
    "ObservedCost",
    "PlaceTimes",
    "RunPrediction",
    "Slowness",
    "balance_microbatches",
]

_FEW_RANKS = 32
"""Most ranks for which all messages are counted; of more ranks only those of moved or slow ones."""
_UNIT = 1_000_000
"""Tokens that stand for one unit of a micro-batch's work."""


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
            own = finding.ranks[0]
            if finding.kind is FindingKind.LINK:
                links[normalise_pair(*finding.ranks)] = finding.ratio
            elif finding.kind is FindingKind.PORT:
                peers = (rank for rank in range(world_size) if rank != own)
                links |= {normalise_pair(own, peer): finding.ratio for peer in peers}
            else:
                ranks[own] = finding.ratio
        return cls(ranks=ranks, links=links)


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


class ObservedCost(CostModel):
    """Costs of a run's stages and messages as measured; each rank is a device of its own.

    Args:
        run: Measurements while nothing was slow.
        slowness: The ranks and links that are slow.
    """

    def __init__(self, run: MeasuredRun, slowness: Slowness) -> None:
        names = [f"rank {rank}" for rank in range(max(run.plan.ranks) + 1)]
        # Times are measured and memory is judged by the run: no size counts here.
        device = DeviceSpec(
            name=names[0],
            peak_flops_per_s=1.0,
            memory_bytes=1,
            memory_bytes_per_s=1.0,
            intra_node_bytes_per_s=1.0,
        )
        model = ModelSpec(
            name="observed",
            num_layers=run.plan.num_layers,
            hidden_size=1,
            num_heads=1,
            num_kv_heads=1,
            intermediate_size=1,
            vocab_size=1,
            gated_mlp=False,
            tied_embeddings=False,
        )
        nodes = tuple(Node(device=name, count=1) for name in names)
        devices = tuple(replace(device, name=name) for name in names)
        super().__init__(Cluster(nodes=nodes, devices=devices), model)
        self._run, self._slow = run, slowness
        self._stage_s = self._of_shapes()
        self._factors = {name: self.factor(rank) for rank, name in enumerate(names)}
        """By device, which is a rank."""

    def _of_shapes(self) -> dict[StageShape, tuple[float, float]]:
        """Return the seconds per unit of work of each shape of stage, on a device of factor 1."""
        found: dict[StageShape, list[tuple[float, float]]] = defaultdict(list)
        for _, _, stage in self._run.plan.iter_stages():
            for rank in stage.ranks:
                place = self._run.places[rank]
                unit = place.work * self._run.probe_s.get(rank, 1.0)
                found[self._shape(stage)].append((place.forward_s / unit, place.backward_s / unit))
        return {
            shape: (statistics.median(f for f, _ in times), statistics.median(b for _, b in times))
            for shape, times in found.items()
        }

    def _shape(self, stage: StagePlan) -> StageShape:
        layers = stage.layers
        return StageShape(
            device="",
            tp_degree=stage.tp_degree,
            num_layers=len(layers),
            has_embedding=layers.start == 0,
            has_head=layers.stop == self.model.num_layers,
        )

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

    @override
    def measure_stage_s(
        self, shape: StageShape, microbatch: MicroBatchShape
    ) -> tuple[float, float]:
        forward_s, backward_s = self._stage_s[shape._replace(device="", link=None)]
        scale = self._factors[shape.device] * sum(microbatch) / _UNIT
        return scale * forward_s, scale * backward_s

    @override
    def activation_s(self, sender: StagePlan, receiver: StagePlan, num_tokens: int) -> float:
        """Return the seconds of an activation; a sender's pieces go one after another."""
        by_sender: dict[int, float] = defaultdict(float)
        for piece in deal_pieces(sender.ranks, receiver.ranks):
            seconds = self._run.hidden_bytes * self.s_per_byte(piece.sender, piece.receiver)
            by_sender[piece.sender] += seconds / piece.count
        return max(by_sender.values())

    def s_per_byte(self, rank_a: int, rank_b: int) -> float:
        """Return the seconds of a byte between two ranks."""
        slow = self._slow.links.get(normalise_pair(rank_a, rank_b), 1.0)
        return slow * self._run.link_s_per_byte

    @override
    def activation_bytes(self, shape: StageShape, num_tokens: int) -> float:
        return 0.0

    @override
    def transient_bytes(self, shape: StageShape, num_tokens: int) -> float:
        return 0.0

    @override
    def step_s(self, shape: StageShape, num_owned: float) -> float:
        return 0.0

    @override
    def _speed(self, device: str) -> float:
        return 1.0 / self._factors[device]


class RunPrediction:
    """Predicts plans with the same places as the plan that ran, but other ranks or micro-batches.

    Args:
        run: Measurements while nothing was slow.
        slowness: The ranks and links that are slow now.
    """

    def __init__(self, run: MeasuredRun, slowness: Slowness) -> None:
        self.run = run
        self._cost = ObservedCost(run, slowness)
        self._healthy = ObservedCost(run, Slowness())
        self._slow = slowness
        self._ends_s: dict[object, float] = {}
        self._exchanges_s: dict[object, float] = {}
        self._rest_s = run.iteration_s - self._moving_s(run.plan, self._healthy)

    def iteration_s(self, plan: ParallelPlan) -> float:
        """Return the seconds of an iteration of a plan."""
        return self._rest_s + self._moving_s(plan, self._cost)

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
        total, slopes_s, fills_s = sum(self.run.counts), [], []
        usual = max(1, total // plan.num_pipelines)
        for index in range(plan.num_pipelines):
            one, two = (self._end_s(plan, index, n, self._cost) for n in (usual, 2 * usual))
            slopes_s.append((two - one) / usual)
            fills_s.append(max(0.0, 2 * one - two))
        shares = balance_microbatches(slopes_s, total, fixed_s=fills_s)
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

    def _moving_s(self, plan: ParallelPlan, cost: ObservedCost) -> float:
        """Return the part of an iteration that depends on the plan."""
        counts = self.counts(plan)
        ends_s = {i: self._end_s(plan, i, count, cost) for i, count in enumerate(counts) if count}
        moving_s = max(ends_s.values())
        if self.run.is_assigned:
            # Pipelines end together, each working at the rate that it has alone.
            works = {index: counts[index] * self._work(index) for index in ends_s}
            moving_s = sum(works.values()) / sum(works[index] / ends_s[index] for index in works)
        return moving_s + self._exchange_s(plan, cost)

    def _work(self, index: int) -> float:
        return self.run.places[self.run.plan.pipelines[index].stages[0].ranks[0]].work

    def _end_s(self, plan: ParallelPlan, index: int, count: int, cost: ObservedCost) -> float:
        """Return when a pipeline has run this number of micro-batches, by itself."""
        pipeline, work = _bare(plan.pipelines[index]), self._work(index)
        key = pipeline, work, count, cost is self._cost
        if key not in self._ends_s:
            microbatches = [[(max(1, round(_UNIT * work)),)] * count]
            alone = simulate(ParallelPlan(pipelines=(pipeline,)), cost, microbatches)
            self._ends_s[key] = alone.iteration_time_s
        return self._ends_s[key]

    def _exchange_s(self, plan: ParallelPlan, cost: ObservedCost) -> float:
        """Return the seconds of pull and push: the slowest rank's, its messages one by one."""
        # Transfers don't depend on the numbers of micro-batches.
        same = tuple(replace(p, num_microbatches=1) for p in plan.pipelines)
        even = replace(plan, pipelines=same)
        key = even, cost is self._cost
        if key not in self._exchanges_s:
            table, ranks = self.run.table_of(even), self._counted_ranks(plan)
            phases = (
                [self._traffic_s(table.traffic(r, push=push), r, cost) for r in ranks]
                for push in (True, False)
            )
            self._exchanges_s[key] = sum(max(seconds, default=0.0) for seconds in phases)
        return self._exchanges_s[key]

    def _counted_ranks(self, plan: ParallelPlan) -> list[int]:
        base = self.run.plan
        everyone = sorted({*base.ranks, *plan.ranks})
        if len(everyone) <= _FEW_RANKS:
            return everyone
        slow = {rank for pair in self._slow.links for rank in pair}
        return [rank for rank in everyone if rank in slow or plan.place(rank) != base.place(rank)]

    def _traffic_s(self, numels: Counter[tuple[int, int]], rank: int, cost: ObservedCost) -> float:
        """Return the seconds of a rank's sends or of its receives, whichever take longer."""
        seconds: dict[bool, float] = defaultdict(float)
        for (source, destination), numel in numels.items():
            if source != destination:
                rate = cost.s_per_byte(source, destination)
                seconds[source == rank] += numel * self.run.value_bytes * rate
        return max(seconds.values(), default=0.0)


def _bare(pipeline: PipelinePlan) -> PipelinePlan:
    """Return the pipeline without what changes times that were measured with it."""
    stages = (
        replace(s, recomputed_layers=None, selective_layers=None, activation_budget_bytes=None)
        for s in pipeline.stages
    )
    return replace(pipeline, stages=tuple(stages), num_microbatches=None, microbatch_size=None)


def balance_microbatches(
    times_s: Sequence[float], num_microbatches: int, *, fixed_s: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return how many micro-batches each pipeline gets so that the last one ends first.

    Minimises the largest `fixed + m·t`, one micro-batch at least for each; of pipelines that would
    end together, the first gets more.

    Raises:
        PlanningError: There are fewer micro-batches than pipelines.
    """
    fixed = [0.0] * len(times_s) if fixed_s is None else list(fixed_s)
    ones = [1] * len(times_s)
    shares = share_microbatches(fixed[::-1], times_s[::-1], ones, num_microbatches)
    if shares is None:
        raise PlanningError(
            f"{num_microbatches} micro-batches are too few for {len(times_s)} pipelines. Give more."
        )
    return tuple(share for (share,) in reversed(shares))
