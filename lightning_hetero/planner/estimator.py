"""How long an arrangement takes, about: layers by Eq. 4, micro-batches by a common level.

The search looks at thousands of arrangements; this says in microseconds what the simulator says in
milliseconds, from the same cost model. Pipelines of one class (same devices in the same order) are
balanced and timed once: K micro-batches take `fill + slope·K`, and are shared by that (`sharing`).
"""

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.assign.microbatch_shares import deal_microbatches, share_microbatches
from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes, classify_nodes
from lightning_hetero.planner.balancing import balance_layers
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape
from lightning_hetero.simulator.exchange import ExchangeTable, Holders
from lightning_hetero.simulator.propagate_equal import (
    EqualTimes,
    propagate_equal,
    steady_round_s,
)

__all__ = ["Estimate", "Estimator", "PipelineEstimate"]

_STEADY_ROUNDS = 3
"""Micro-batches per stage after which a pipeline's end grows evenly."""

_PipelineKey = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]


@dataclass(frozen=True, kw_only=True)
class PipelineEstimate:
    """One pipeline with its layers placed."""

    layers: tuple[int, ...]
    """Layers of each stage."""
    slope_s: float
    """Seconds that one more micro-batch takes."""
    times: EqualTimes
    """Seconds of every action and message."""
    step_s: tuple[float, ...]
    """Seconds of each stage's optimizer step."""
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
        self._balanced: dict[tuple[tuple[int, ...], ...], tuple[int, ...] | None] = {}
        self._hops: dict[tuple[int, int, int, int, bool], tuple[float, float]] = {}
        self._exchanges: dict[Arrangement, ExchangeTable] = {}
        self._ends_of: dict[EqualTimes, list[float]] = {}

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
        return pipeline.tp_degrees, classes, same

    def pipeline(self, pipeline: PipelineNodes, num_pipelines: int) -> PipelineEstimate | None:
        """Return a pipeline with its layers balanced, or None if the model doesn't fit."""
        key = self.key(pipeline), num_pipelines
        if key not in self._pipelines:
            self._pipelines[key] = self._estimate_pipeline(pipeline, num_pipelines)
        return self._pipelines[key]

    def least_s(self, arrangement: Arrangement) -> float:
        """Return about the least seconds of an arrangement: without bubbles and exchange.

        Infinite if a pipeline doesn't fit or there is too little work.
        """
        parts = self._parts(arrangement)
        if parts is None:
            return np.inf
        total, repeats = self.workload.num_microbatches, Counter(map(self.key, arrangement))
        if self.equal_microbatches:
            share = total // len(arrangement)
            return share * max(part.slope_s for part in parts.values())
        return total / sum(repeats[key] / part.slope_s for key, part in parts.items())

    def estimate(self, arrangement: Arrangement) -> Estimate | None:
        """Return an estimate, or None if a pipeline doesn't fit or there is too little work."""
        parts = self._parts(arrangement)
        if parts is None:
            return None
        total = self.workload.num_microbatches
        keys = [self.key(pipeline) for pipeline in arrangement]
        repeats = Counter(keys)
        exchange = self._exchange(arrangement, keys, parts)
        kinds = list(parts.values())
        pulled_s = exchange.pull_start_s([part.times.forward_s for part in kinds])
        waits_s = [_wait_s(part, starts) for part, starts in zip(kinds, pulled_s, strict=True)]
        fills = [self._fill_s(part) + wait for part, wait in zip(kinds, waits_s, strict=True)]
        slopes = [part.slope_s for part in kinds]
        limits = [part.most_microbatches for part in kinds]
        numbers = [repeats[key] for key in parts]
        shares = (
            deal_microbatches(numbers, limits, total)
            if self.equal_microbatches
            else share_microbatches(fills, slopes, numbers, limits, total)
        )
        if shares is None:
            return None
        ends_s = [
            [wait + end for end in self._ends_s(part, max(share))]
            for part, share, wait in zip(kinds, shares, waits_s, strict=True)
        ]
        backward_s = [part.times.backward_s for part in kinds]
        pushed_s = exchange.push_end_s(ends_s, backward_s, [True] * len(kinds))
        left = {key: list(share) for key, share in zip(parts, shares, strict=True)}
        return Estimate(
            arrangement=arrangement,
            layers=tuple(parts[key].layers for key in keys),
            num_microbatches=tuple(left[key].pop() for key in keys),
            time_s=max(
                end + step
                for part, row in zip(kinds, pushed_s, strict=True)
                for end, step in zip(row, part.step_s, strict=True)
            ),
        )

    def _parts(self, arrangement: Arrangement) -> dict[_PipelineKey, PipelineEstimate] | None:
        """Return each class of pipelines with its layers; None if one doesn't fit."""
        if len(arrangement) > self.workload.num_microbatches:
            return None
        parts: dict[_PipelineKey, PipelineEstimate] = {}
        for pipeline in dict.fromkeys(arrangement):
            key = self.key(pipeline)
            if key not in parts:
                part = self.pipeline(pipeline, len(arrangement))
                if part is None:
                    return None
                parts[key] = part
        return parts

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
        num_stages = len(pipeline.nodes)
        ends = [(stage == 0, stage == num_stages - 1) for stage in range(num_stages)]
        most = tuple(
            self.most_layers(
                node,
                tp_degree,
                ends[stage],
                num_pipelines,
                min(num_stages - stage, most_microbatches),
            )
            for stage, (node, tp_degree) in enumerate(pipeline.stages)
        )
        classes = tuple(self.classes[node] for node in pipeline.nodes)
        key = pipeline.tp_degrees, classes, most
        if key not in self._balanced:
            tables = []
            stages = zip(pipeline.stages, ends, most, strict=True)
            for (node, tp_degree), (first, last), room in stages:
                times = np.add(*self.stage_times_s(node, tp_degree, first=first, last=last))
                times[room + 1 :] = np.inf
                tables.append(times)
            self._balanced[key] = balance_layers(tables, self.num_layers)
        return self._balanced[key]

    def _time_pipeline(
        self, pipeline: PipelineNodes, num_pipelines: int, most_microbatches: int
    ) -> PipelineEstimate | None:
        layers = self.balance(pipeline, num_pipelines, most_microbatches)
        if layers is None:
            return None
        last = len(layers) - 1
        shapes = [
            self.shape(node, tp_degree, count, first=stage == 0, last=stage == last)
            for stage, ((node, tp_degree), count) in enumerate(
                zip(pipeline.stages, layers, strict=True)
            )
        ]
        pairs = [self.cost.compute_s(shape, self.workload.microbatch) for shape in shapes]
        hops = [self._hop_s(a, b) for a, b in itertools.pairwise(pipeline.stages)]
        times = EqualTimes(
            forward_s=tuple([forward for forward, _ in pairs]),
            backward_s=tuple([backward for _, backward in pairs]),
            forward_message_s=tuple([there for there, _ in hops]),
            backward_message_s=tuple([back for _, back in hops]),
            num_microbatches=max(1, self.workload.num_microbatches // num_pipelines),
        )
        slope_s = steady_round_s(times, blocking=self.cost.layout.blocking_messages)
        return PipelineEstimate(
            layers=layers,
            slope_s=slope_s,
            times=times,
            step_s=tuple([self.cost.update_s(shape, num_pipelines) for shape in shapes]),
            most_microbatches=most_microbatches,
        )

    def _hop_s(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
        """Return seconds of a hidden state between two stages, and of its gradient back.

        Stages are (node, devices).
        """
        key = self.classes[one[0]], one[1], self.classes[other[0]], other[1], one[0] == other[0]
        found = self._hops.get(key)
        if found is None:
            stages = []
            for index, (node, tp_degree) in enumerate((one, other)):
                first = self._rank_of_node[node]
                ranks = tuple(range(first, first + tp_degree))
                stages.append(StagePlan(ranks=ranks, layers=range(index, index + 1)))
            tokens = sum(self.workload.microbatch)
            found = self._hops[key] = (
                self.cost.activation_s(stages[0], stages[1], tokens),
                self.cost.activation_s(stages[1], stages[0], tokens),
            )
        return found

    def _exchange(
        self,
        arrangement: Arrangement,
        keys: Sequence[_PipelineKey],
        parts: dict[_PipelineKey, PipelineEstimate],
    ) -> ExchangeTable:
        """Return the exchange between the classes of pipelines."""
        found = self._exchanges.get(arrangement)
        if found is None:
            ranks: dict[_PipelineKey, list[tuple[int, ...]]] = {}
            for key, (_, nodes) in zip(keys, arrangement, strict=True):
                ranks.setdefault(key, []).append(tuple([self._rank_of_node[n] for n in nodes]))
            holders = [
                Holders(layers=part.layers, tp_degrees=key[0], ranks=tuple(ranks[key]))
                for key, part in parts.items()
            ]
            found = self._exchanges[arrangement] = ExchangeTable(holders, self.cost)
        return found

    def _fill_s(self, part: PipelineEstimate) -> float:
        """Return a pipeline's seconds besides those of its micro-batches: the bubble."""
        count = part.times.num_microbatches
        return max(self._ends_s(part, count)) - part.slope_s * count

    def _ends_s(self, part: PipelineEstimate, num_microbatches: int) -> list[float]:
        """Return when the stages of a pipeline end that starts at once."""
        usual = part.times.num_microbatches
        if min(usual, num_microbatches) >= _STEADY_ROUNDS * len(part.layers):
            later_s = (num_microbatches - usual) * part.slope_s
            return [end + later_s for end in self._run_s(part.times)]
        return self._run_s(replace(part.times, num_microbatches=num_microbatches))

    def _run_s(self, times: EqualTimes) -> list[float]:
        found = self._ends_of.get(times)
        if found is None:
            starts, blocking = (0.0,) * len(times.forward_s), self.cost.layout.blocking_messages
            found = list(propagate_equal(times, starts, blocking=blocking).end_s)
            self._ends_of[times] = found
        return found


def _wait_s(part: PipelineEstimate, start_s: Sequence[float]) -> float:
    """Return how much later a pipeline goes on for weights than for hidden states."""
    hops_s = (0.0, *part.times.forward_message_s)
    arrived_s, wait_s = 0.0, 0.0
    for start, forward, hop in zip(start_s, part.times.forward_s, hops_s, strict=True):
        arrived_s += hop
        wait_s = max(wait_s, start - arrived_s)
        arrived_s += forward
    return wait_s
