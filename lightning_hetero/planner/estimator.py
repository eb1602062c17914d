"""How long an arrangement takes, about: layers by Eq. 4, micro-batches by a common level.

The search looks at thousands of arrangements; this says in microseconds what the simulator says in
milliseconds, from the same cost model. Pipelines of one class (same devices in the same order) are
balanced and timed once: K micro-batches take `fill + slope·K`, and are shared by that (`sharing`).
"""

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.assign.microbatch_shares import deal_microbatches, share_microbatches
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes
from lightning_hetero.planner.memory_fit import idle_capacity, owned_capacity
from lightning_hetero.planner.stage_times import PipelineKey, StageTimes
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape
from lightning_hetero.simulator.exchange import ExchangeTable, Holders
from lightning_hetero.simulator.propagate_equal import (
    EqualTimes,
    propagate_equal,
    steady_round_s,
)

__all__ = ["Estimate", "Estimator", "PipelineEstimate"]

_SHARE_STEPS = 5
"""Shares of ownership by memory that are tried for an arrangement."""
_STEADY_ROUNDS = 3
"""Micro-batches per stage after which a pipeline's end grows evenly."""


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
    is_memory_bound: bool
    """Whether more memory would make it faster."""
    capacity_params: float
    """Parameters that all its ranks together have room to own."""


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
    is_memory_bound: bool
    """Whether more memory would make a pipeline faster."""
    capacity_params: float
    """Parameters that all ranks together have room to own."""


class Estimator(StageTimes):
    """Estimates arrangements on one cluster for one workload; caches everything by class."""

    def __init__(
        self,
        cost: CostModel,
        workload: Workload,
        *,
        equal_microbatches: bool,
        idle_may_own: bool = True,
    ) -> None:
        super().__init__(cost, workload)
        self.equal_microbatches = equal_microbatches
        self.idle_may_own = idle_may_own
        self._pipelines: dict[tuple[PipelineKey, int, float | None], PipelineEstimate | None] = {}
        self._hops: dict[tuple[int, int, int, int, bool], tuple[float, float]] = {}
        self._exchanges: dict[tuple[Arrangement, float | None], ExchangeTable] = {}
        self._ends_of: dict[EqualTimes, list[float]] = {}

    def unequal(self) -> "Estimator":
        """Return an estimator with the same caches whose pipelines may run unequal shares."""
        other = copy.copy(self)
        other.equal_microbatches = False
        return other

    def pipeline(
        self, pipeline: PipelineNodes, num_pipelines: int, owned_params: float | None = None
    ) -> PipelineEstimate | None:
        """Return a pipeline with its layers balanced, or None if the model doesn't fit.

        Args:
            pipeline: Its stages by node.
            num_pipelines: Pipelines of the plan.
            owned_params: Parameters that each rank owns; None if holders share them alike.
        """
        key = self.key(pipeline), num_pipelines, owned_params
        if key not in self._pipelines:
            self._pipelines[key] = self._estimate_pipeline(pipeline, *key[1:])
        return self._pipelines[key]

    def least_s(self, arrangement: Arrangement) -> float:
        """Return about the least seconds of an arrangement: without bubbles and exchange.

        Infinite if a pipeline doesn't fit or there is too little work.
        """
        parts = self._parts(arrangement, None)
        if self._is_short_of_memory(parts):
            parts = self._parts(arrangement, 0.0) or parts
        if parts is None:
            return np.inf
        total, repeats = self.workload.num_microbatches, Counter(map(self.key, arrangement))
        if self.equal_microbatches:
            share = total // len(arrangement)
            return share * max(part.slope_s for part in parts.values())
        return total / sum(repeats[key] / part.slope_s for key, part in parts.items())

    def estimate(self, arrangement: Arrangement) -> Estimate | None:
        """Return an estimate, or None if a pipeline doesn't fit or there is too little work.

        Where memory slows it down, ownership by memory is tried as well: balanced as if every rank
        owned nothing, or the part of an equal share with which all states have room.
        """
        found = self._estimate(arrangement, None)
        if not self._is_short_of_memory(self._parts(arrangement, None)):
            return found
        used: Counter[int] = Counter()
        for pipeline in arrangement:
            for node, tp_degree in pipeline.stages:
                used[node] += tp_degree
        num_params = self.cost.model.num_params - self._idle_capacity(used, len(arrangement))
        # The least part of an equal share for which all ranks leave room, so that all have enough.
        low, high, part = 0.0, 1.0, 0.0
        for _ in range(_SHARE_STEPS):
            other = self._estimate(arrangement, part * max(0.0, num_params) / used.total())
            if other is None:
                high = part
            elif other.capacity_params < num_params:
                low = part
            else:
                high = part
                if found is None or other.time_s < found.time_s:
                    found = other
            if high == 0.0:
                break
            part = (low + high) / 2 if part else 1.0
        return found

    def _is_short_of_memory(self, parts: Mapping[PipelineKey, PipelineEstimate] | None) -> bool:
        """Return whether other owners could make an arrangement faster, or possible."""
        if not self.cost.layout.is_owned_by_room:
            return False
        return parts is None or any(part.is_memory_bound for part in parts.values())

    def _idle_capacity(self, used: Mapping[int, int], num_pipelines: int) -> float:
        """Return the parameters that devices without layers have room to own."""
        if not self.idle_may_own:
            return 0.0
        return sum(
            (entry.count - used.get(node, 0))
            * idle_capacity(self.cost, entry.device, num_pipelines)
            for node, entry in enumerate(self.cost.cluster.nodes)
        )

    def _estimate(self, arrangement: Arrangement, owned_params: float | None) -> Estimate | None:
        parts = self._parts(arrangement, owned_params)
        if parts is None:
            return None
        total = self.workload.num_microbatches
        keys = [self.key(pipeline) for pipeline in arrangement]
        repeats = Counter(keys)
        exchange = self._exchanges.get((arrangement, owned_params))
        if exchange is None:
            exchange = self._exchange(arrangement, keys, parts)
            self._exchanges[arrangement, owned_params] = exchange
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
            is_memory_bound=any(part.is_memory_bound for part in kinds),
            capacity_params=sum(repeats[key] * part.capacity_params for key, part in parts.items()),
        )

    def _parts(
        self, arrangement: Arrangement, owned_params: float | None
    ) -> dict[PipelineKey, PipelineEstimate] | None:
        """Return each class of pipelines with its layers; None if one doesn't fit."""
        if len(arrangement) > self.workload.num_microbatches:
            return None
        parts: dict[PipelineKey, PipelineEstimate] = {}
        for pipeline in dict.fromkeys(arrangement):
            key = self.key(pipeline)
            if key not in parts:
                part = self.pipeline(pipeline, len(arrangement), owned_params)
                if part is None:
                    return None
                parts[key] = part
        return parts

    def _estimate_pipeline(
        self, pipeline: PipelineNodes, num_pipelines: int, owned_params: float | None
    ) -> PipelineEstimate | None:
        """Balance the layers; if they don't fit, let fewer micro-batches be in flight."""
        total = self.workload.num_microbatches
        num_stages = len(pipeline.nodes)
        if num_stages > self.num_layers:
            return None
        # Long pipelines with few micro-batches are poor anyway: look at short ones only.
        fewer = range(min(num_stages, total) - 1, 0, -1) if num_stages <= 6 else ()
        for most in (total, *fewer):
            found = self._time_pipeline(pipeline, num_pipelines, most, owned_params)
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
        tables = self.stage_tables(pipeline, num_pipelines, most_microbatches, None)
        return self.balanced(tables)

    def _time_pipeline(
        self,
        pipeline: PipelineNodes,
        num_pipelines: int,
        most_microbatches: int,
        owned_params: float | None,
    ) -> PipelineEstimate | None:
        tables = self.stage_tables(pipeline, num_pipelines, most_microbatches, owned_params)
        layers = self.balanced(tables)
        if layers is None:
            return None
        shapes = [table.sized(count) for table, count in zip(tables, layers, strict=True)]
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
            step_s=tuple(
                [
                    self.cost.update_s(
                        shape,
                        self.cost.num_owned_params(shape, num_pipelines)
                        if owned_params is None
                        else owned_params,
                    )
                    for shape in shapes
                ]
            ),
            most_microbatches=most_microbatches,
            is_memory_bound=self.is_slowed(tables, layers),
            capacity_params=0.0
            if owned_params is None
            else self._capacity(shapes, num_pipelines, most_microbatches),
        )

    def _capacity(
        self, shapes: Sequence[StageShape], num_pipelines: int, most_microbatches: int
    ) -> float:
        """Return the parameters that all ranks of the stages together have room to own."""
        tokens = sum(self.workload.microbatch)
        return sum(
            shape.tp_degree
            * owned_capacity(
                self.cost,
                shape,
                num_pipelines,
                tokens * min(len(shapes) - stage, most_microbatches),
                tokens,
            )
            for stage, shape in enumerate(shapes)
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
        keys: Sequence[PipelineKey],
        parts: dict[PipelineKey, PipelineEstimate],
    ) -> ExchangeTable:
        """Return the exchange between the classes of pipelines."""
        ranks: dict[PipelineKey, list[tuple[int, ...]]] = {}
        for key, (_, nodes) in zip(keys, arrangement, strict=True):
            ranks.setdefault(key, []).append(tuple([self._rank_of_node[n] for n in nodes]))
        holders = [
            Holders(
                layers=part.layers,
                tp_degrees=key[0],
                ranks=tuple(ranks[key]),
            )
            for key, part in parts.items()
        ]
        return ExchangeTable(holders, self.cost)

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
