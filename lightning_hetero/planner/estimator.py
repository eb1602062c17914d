"""How long an arrangement takes, about: layers by Eq. 4, micro-batches by a common level.

The search looks at thousands of arrangements; this says in microseconds what the simulator says in
milliseconds, from the same cost model. Pipelines of one class (same devices in the same order) are
balanced and timed once: K micro-batches take `fill + slope·K`, and are shared by that (`sharing`).
"""

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.assign.microbatch_shares import deal_microbatches, share_microbatches
from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes, classify_nodes
from lightning_hetero.planner.balancing import balance_layers
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape
from lightning_hetero.simulator.propagate import PipelineTimes, propagate

__all__ = ["Estimate", "Estimator", "PipelineEstimate"]

_PipelineKey = tuple[int, tuple[int, ...], tuple[bool, ...]]


@dataclass(frozen=True, kw_only=True)
class PipelineEstimate:
    """One pipeline with its layers placed."""

    layers: tuple[int, ...]
    """Layers of each stage."""
    slope_s: float
    """Seconds that one more micro-batch takes."""
    fill_s: float
    """Seconds besides: the bubble."""
    first_params: float
    """Parameters that a rank of the first stage holds; they are pushed last."""
    first_times_s: tuple[float, float]
    """Forward and backward seconds of a micro-batch on the first stage."""
    step_s: float
    """Seconds of the first stage's optimizer step."""
    most_microbatches: int
    """Micro-batches beyond which the activations in flight would not fit."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An arrangement with layers and micro-batches, and about how long an iteration takes."""

    arrangement: Arrangement
    """The pipelines that have work."""
    layers: tuple[tuple[int, ...], ...]
    """[pipeline][stage] layers."""
    num_microbatches: tuple[int, ...]
    """Micro-batches of each pipeline."""
    time_s: float
    """About how long an iteration takes."""


class Estimator:
    """Estimates arrangements on one cluster for one workload; caches everything by class."""

    def __init__(self, cost: CostModel, workload: Workload, *, equal_microbatches: bool) -> None:
        self.cost = cost
        self.workload = workload
        self.equal_microbatches = equal_microbatches
        self.classes = classify_nodes(cost.cluster)
        self.num_layers = cost.model.num_layers
        self._rank_of_node = [cost.cluster.ranks_of(i)[0] for i in range(len(self.classes))]
        self._devices = [node.device for node in cost.cluster.nodes]
        self._largest: dict[str, int] = {}
        for entry in cost.cluster.nodes:
            self._largest[entry.device] = max(entry.count, self._largest.get(entry.device, 0))
        self._tables: dict[tuple[int, int, bool, bool], tuple[FloatArray, FloatArray]] = {}
        self._most_layers: dict[tuple[int, int, bool, bool, int, int], int] = {}
        self._pipelines: dict[tuple[_PipelineKey, int], PipelineEstimate | None] = {}

    def unequal(self) -> "Estimator":
        """Return an estimator with the same caches whose pipelines may run unequal shares."""
        other = copy.copy(self)
        other.equal_microbatches = False
        return other

    def shape(
        self, node: int, tp_degree: int, num_layers: int, *, first: bool, last: bool
    ) -> StageShape:
        """Return the shape of a stage on a node."""
        rank = self._rank_of_node[node]
        return StageShape(
            device=self._devices[node],
            tp_degree=tp_degree,
            num_layers=num_layers,
            has_embedding=first,
            has_head=last,
            link=self.cost.link(rank, rank) if tp_degree > 1 else None,
        )

    def stage_times_s(
        self, node: int, tp_degree: int, *, first: bool, last: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Return forward and backward seconds of a micro-batch with 0, 1, ... layers.

        Infinite where the device type has no node that large.
        """
        key = (self.classes[node], tp_degree, first, last)
        if tp_degree > self._largest[self._devices[node]]:
            never = np.append(0.0, np.full(self.num_layers, np.inf))
            return never, never
        if key not in self._tables:
            times = np.zeros((2, self.num_layers + 1))
            for count in range(1, self.num_layers + 1):
                shape = self.shape(node, tp_degree, count, first=first, last=last)
                times[:, count] = self.cost.compute_s(shape, self.workload.microbatch)
            self._tables[key] = times[0], times[1]
        return self._tables[key]

    def seconds_per_device(self, node: int, tp_degrees: Sequence[int]) -> float:
        """Return seconds of a micro-batch through all layers, times the devices it takes."""
        best = np.inf
        for tp_degree in tp_degrees:
            forward, backward = self.stage_times_s(node, tp_degree, first=False, last=False)
            best = min(best, tp_degree * float(forward[-1] + backward[-1]))
        return best

    def most_layers(
        self, node: int, tp_degree: int, place: tuple[bool, bool], num_pipelines: int, held: int
    ) -> int:
        """Return how many layers fit into a stage that holds `held` micro-batches at once.

        `place` says whether the embedding and the head stand there.
        """
        key = (self.classes[node], tp_degree, *place, num_pipelines, held)
        if key not in self._most_layers:
            room = self.cost.usable_bytes(self._devices[node])
            batches = [self.workload.microbatch] * held
            low, high = 0, self.num_layers
            while low < high:
                middle = (low + high + 1) // 2
                shape = self.shape(node, tp_degree, middle, first=place[0], last=place[1])
                if self.cost.stage_memory(shape, num_pipelines, batches, held).total <= room:
                    low = middle
                else:
                    high = middle - 1
            self._most_layers[key] = low
        return self._most_layers[key]

    def key(self, pipeline: PipelineNodes) -> _PipelineKey:
        """Return what a pipeline's times depend on."""
        nodes = pipeline.nodes
        classes = tuple(self.classes[node] for node in nodes)
        same = tuple(a == b for a, b in itertools.pairwise(nodes))
        return pipeline.tp_degree, classes, same

    def pipeline(self, pipeline: PipelineNodes, num_pipelines: int) -> PipelineEstimate | None:
        """Return a pipeline with its layers balanced, or None if the model doesn't fit."""
        key = self.key(pipeline), num_pipelines
        if key not in self._pipelines:
            self._pipelines[key] = self._estimate_pipeline(pipeline, num_pipelines)
        return self._pipelines[key]

    def estimate(self, arrangement: Arrangement) -> Estimate | None:
        """Return an estimate, or None if a pipeline doesn't fit or there is too little work."""
        num_pipelines = len(arrangement)
        total = self.workload.num_microbatches
        if num_pipelines > total:
            return None
        keys = [self.key(pipeline) for pipeline in arrangement]
        repeats = Counter(keys)
        parts: dict[_PipelineKey, PipelineEstimate] = {}
        for key, pipeline in zip(keys, arrangement, strict=True):
            if key not in parts:
                part = self.pipeline(pipeline, num_pipelines)
                if part is None:
                    return None
                parts[key] = part
        waits = self._exchange_s(arrangement, keys, parts)
        order = list(parts)
        fills = [parts[key].fill_s + waits[key][0] for key in order]
        slopes = [parts[key].slope_s for key in order]
        limits = [parts[key].most_microbatches for key in order]
        numbers = [repeats[key] for key in order]
        shares = (
            deal_microbatches(numbers, limits, total)
            if self.equal_microbatches
            else share_microbatches(fills, slopes, numbers, limits, total)
        )
        if shares is None:
            return None
        left = {key: list(share) for key, share in zip(order, shares, strict=True)}
        counts = tuple(left[key].pop() for key in keys)
        longest = max(
            fill + slope * max(share)
            for fill, slope, share in zip(fills, slopes, shares, strict=True)
        )
        return Estimate(
            arrangement=arrangement,
            layers=tuple(parts[key].layers for key in keys),
            num_microbatches=counts,
            time_s=longest + max(wait[1] for wait in waits.values()),
        )

    def _estimate_pipeline(
        self, pipeline: PipelineNodes, num_pipelines: int
    ) -> PipelineEstimate | None:
        """Balance the layers; if they don't fit, let fewer micro-batches be in flight."""
        total = self.workload.num_microbatches
        num_stages = len(pipeline.nodes)
        if num_stages > self.num_layers:
            return None
        # Long pipelines with few micro-batches are poor anyway: look at short ones only.
        fewer = range(min(num_stages, total) - 1, 0, -1) if num_stages <= 6 else ()
        for most in (total, *fewer):
            found = self._time_pipeline(pipeline, num_pipelines, most)
            if found is not None:
                return found
        return None

    def balance(
        self, pipeline: PipelineNodes, num_pipelines: int, most_microbatches: int
    ) -> tuple[int, ...] | None:
        """Return the layers of each stage by Eq. 4, or None if they don't fit.

        Args:
            pipeline: Its stages by node.
            num_pipelines: Pipelines among which states are spread.
            most_microbatches: Most micro-batches in flight.
        """
        tp_degree, nodes = pipeline
        tables = []
        for stage, node in enumerate(nodes):
            ends = stage == 0, stage == len(nodes) - 1
            times = np.add(*self.stage_times_s(node, tp_degree, first=ends[0], last=ends[1]))
            held = min(len(nodes) - stage, most_microbatches)
            times[self.most_layers(node, tp_degree, ends, num_pipelines, held) + 1 :] = np.inf
            tables.append(times)
        return balance_layers(tables, self.num_layers)

    def _time_pipeline(
        self, pipeline: PipelineNodes, num_pipelines: int, most_microbatches: int
    ) -> PipelineEstimate | None:
        layers = self.balance(pipeline, num_pipelines, most_microbatches)
        if layers is None:
            return None
        tp_degree, nodes = pipeline
        num_stages = len(nodes)
        times_s = [
            self.stage_times_s(node, tp_degree, first=stage == 0, last=stage == num_stages - 1)
            for stage, node in enumerate(nodes)
        ]
        forward_s = [float(f[n]) for (f, _), n in zip(times_s, layers, strict=True)]
        backward_s = [float(b[n]) for (_, b), n in zip(times_s, layers, strict=True)]
        slope, fill = self._linear(forward_s, backward_s, self._stages(pipeline, layers))
        shape = self.shape(nodes[0], tp_degree, layers[0], first=True, last=num_stages == 1)
        return PipelineEstimate(
            layers=layers,
            slope_s=slope,
            fill_s=fill,
            first_params=self.cost.num_stage_params(shape),
            first_times_s=(forward_s[0], backward_s[0]),
            step_s=self.cost.step_s(shape, self.cost.num_owned_params(shape, num_pipelines)),
            most_microbatches=most_microbatches,
        )

    def _stages(self, pipeline: PipelineNodes, layers: Sequence[int]) -> list[StagePlan]:
        """Return stages on any ranks of their nodes, for what messages between them cost."""
        firsts = [self._rank_of_node[node] for node in pipeline.nodes]
        stops = list(itertools.accumulate(layers))
        return [
            StagePlan(
                ranks=tuple(range(first, first + pipeline.tp_degree)),
                layers=range(stop - count, stop),
            )
            for first, stop, count in zip(firsts, stops, layers, strict=True)
        ]

    def _linear(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        stages: Sequence[StagePlan],
    ) -> tuple[float, float]:
        """Return slope and fill of the makespan over the number of micro-batches."""
        num_stages = len(stages)
        if num_stages == 1:
            return forward_s[0] + backward_s[0], 0.0
        tokens = sum(self.workload.microbatch)
        hops = [
            (self.cost.activation_s(a, b, tokens), self.cost.activation_s(b, a, tokens))
            for a, b in itertools.pairwise(stages)
        ]
        few, many = 2 * num_stages, 3 * num_stages
        blocking = self.cost.layout.blocking_messages
        before, after = (
            _makespan_s(forward_s, backward_s, hops, count, blocking=blocking)
            for count in (few, many)
        )
        slope = (after - before) / (many - few)
        return slope, before - few * slope

    def _exchange_s(
        self,
        arrangement: Arrangement,
        keys: Sequence[_PipelineKey],
        parts: dict[_PipelineKey, PipelineEstimate],
    ) -> dict[_PipelineKey, tuple[float, float]]:
        """Return exposed seconds of pull, and of push and step, judged by first stages alone."""
        count = len(arrangement)
        on_node = Counter(pipeline.nodes[0] for pipeline in arrangement)
        waits: dict[_PipelineKey, tuple[float, float]] = {}
        model, state = self.cost.model, self.cost.layout
        for key, pipeline in zip(keys, arrangement, strict=True):
            if key in waits:
                continue
            part = parts[key]
            near = on_node[pipeline.nodes[0]] - 1
            rank = self._rank_of_node[pipeline.nodes[0]]
            seconds_per_byte = near / self.cost.link(rank, rank)[0]
            seconds_per_byte += (count - 1 - near) / self.cost.cluster.inter_node_bytes_per_s
            per_param = seconds_per_byte / count
            embedding = model.embedding_params / pipeline.tp_degree * per_param
            total = part.first_params * per_param
            forward, backward = part.first_times_s
            hidden = 1 - 1 / part.layers[0]
            if not state.sharded:
                per_param *= 2
            pull = max(embedding, total - forward * hidden) * state.weight_bytes
            push = max(embedding, total - backward * hidden) * state.gradient_bytes
            waits[key] = (pull if state.sharded else 0.0, push + part.step_s)
        return waits


def _makespan_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hops_s: Sequence[tuple[float, float]],
    count: int,
    *,
    blocking: bool,
) -> float:
    """Return the seconds of one pipeline with `count` equal micro-batches."""
    times = PipelineTimes(
        forward_s=[[seconds] * count for seconds in forward_s],
        backward_s=[[seconds] * count for seconds in backward_s],
        forward_message_s=[[there] * count for there, _ in hops_s],
        backward_message_s=[[back] * count for _, back in hops_s],
    )
    starts = [0.0] * len(forward_s)
    return max(propagate(times, starts, blocking=blocking).end_s)
