"""How long an arrangement takes, about: layers by Eq. 4, micro-batches by a common level.

The search looks at thousands of arrangements; this says in microseconds what the simulator says in
milliseconds, from the same cost model. Pipelines of one class are balanced and timed once
(`pipeline_estimator`): K micro-batches take `fill + slope·K`, and are shared by that
(`microbatch_shares`).
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.assign.microbatch_shares import deal_microbatches, share_microbatches
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes, used_nodes
from lightning_hetero.planner.memory_fit import idle_capacity
from lightning_hetero.planner.pipeline_estimator import (
    PipelineEstimate,
    PipelineEstimator,
    StageRoom,
)
from lightning_hetero.planner.recompute_tables import RecomputeTables
from lightning_hetero.planner.stage_times import PipelineKey
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel
from lightning_hetero.simulator.exchange import ExchangeTable, Holders

__all__ = ["Estimate", "Estimator"]

_SHARE_STEPS = 5
"""Shares of ownership by memory that are tried for an arrangement."""


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
    is_recomputing: bool
    """Whether a stage recomputes a layer."""
    capacity_params: float
    """Parameters that all ranks together have room to own."""


class Estimator(PipelineEstimator):
    """Estimates arrangements on one cluster for one workload; caches everything by class."""

    def __init__(
        self,
        cost: CostModel,
        workload: Workload,
        *,
        equal_microbatches: bool,
        idle_may_own: bool = True,
        tp_degrees: Sequence[int] = (1,),
    ) -> None:
        super().__init__(cost, workload)
        self.tp_degrees = tuple(tp_degrees)
        """TP degrees that moves may give to stages."""
        self.equal_microbatches = equal_microbatches
        self.idle_may_own = idle_may_own
        self._exchanges: dict[tuple[Arrangement, tuple[tuple[int, ...], ...]], ExchangeTable] = {}
        self._keys_of: dict[Arrangement, tuple[PipelineKey, ...]] = {}
        self._members: dict[Arrangement, dict[PipelineKey, list[PipelineNodes]]] = {}
        self._least_s: dict[Arrangement, float] = {}

    def unequal(self) -> "Estimator":
        """Return an estimator with the same caches whose pipelines may run unequal shares."""
        other = copy.copy(self)
        other.equal_microbatches = False
        other._least_s = {}
        return other

    def keeping(self) -> "Estimator":
        """Return an estimator of the same times whose stages recompute nothing."""
        other = copy.copy(self)
        other._recompute = RecomputeTables(self.cost, self.workload, may_recompute=False)
        other._stage_tables, other._pipelines, other._least_s = {}, {}, {}
        return other

    def least_s(self, arrangement: Arrangement) -> float:
        """Return about the least seconds of an arrangement: without exchange, and links kept busy.

        Infinite if a pipeline doesn't fit or there is too little work.
        """
        if arrangement not in self._least_s:
            self._least_s[arrangement] = self._find_least_s(arrangement)
        return self._least_s[arrangement]

    def _find_least_s(self, arrangement: Arrangement) -> float:
        parts = self._parts(arrangement, None)
        if self._is_short_of_memory(parts):
            parts = self._parts(arrangement, 0.0) or parts
        if parts is None:
            return np.inf
        usual = self.usual_share(len(arrangement))
        return self._finish_s(arrangement, {key: p.least_s(usual) for key, p in parts.items()})

    def least_work_s(self, arrangement: Arrangement) -> float:
        """Return about what `least_s` is at least: with fractions of layers, in any memory."""
        kinds = self.members(arrangement)
        return self._finish_s(arrangement, {key: self.pipeline_work_s(key) for key in kinds})

    def _finish_s(
        self, arrangement: Arrangement, pipelines_s: Mapping[PipelineKey, tuple[float, float]]
    ) -> float:
        """Return when an arrangement is done whose pipelines take `fill + slope·K` seconds.

        By T they finish Σ (T - fill)/slope micro-batches, or T is below some fill and too little.
        """
        total = self.workload.num_microbatches
        if self.equal_microbatches:
            share = total // len(arrangement)
            return max(fill + share * slope for fill, slope in pipelines_s.values())
        work, power = float(total), 0.0
        for key, members in self.members(arrangement).items():
            fill, slope = pipelines_s[key]
            work += len(members) * fill / slope
            power += len(members) / slope
        return work / power

    def keys(self, arrangement: Arrangement) -> tuple[PipelineKey, ...]:
        """Return the class of each pipeline."""
        found = self._keys_of.get(arrangement)
        if found is None:
            known = {pipeline: self.key(pipeline) for pipeline in dict.fromkeys(arrangement)}
            found = self._keys_of[arrangement] = tuple([known[p] for p in arrangement])
        return found

    def members(self, arrangement: Arrangement) -> Mapping[PipelineKey, Sequence[PipelineNodes]]:
        """Return the pipelines of each class."""
        found = self._members.get(arrangement)
        if found is None:
            found = self._members[arrangement] = {}
            for key, pipeline in zip(self.keys(arrangement), arrangement, strict=True):
                found.setdefault(key, []).append(pipeline)
        return found

    def estimate(self, arrangement: Arrangement) -> Estimate | None:
        """Return an estimate, or None if a pipeline doesn't fit or there is too little work.

        Where memory slows it down, ownership by memory is tried as well: balanced as if every rank
        owned nothing, or the part of an equal share with which all states have room.
        """
        parts = self._parts(arrangement, None)
        found = self._estimate(arrangement, parts, None)
        if not self._is_short_of_memory(parts):
            return found
        used: Counter[str] = Counter()
        for key, members in self.members(arrangement).items():
            for tp_degree, device in zip(key[0], self.devices_of(key), strict=True):
                used[device] += tp_degree * len(members)
        num_params = self.cost.model.num_params - self._idle_capacity(used, len(arrangement))
        # The least part of an equal share for which all ranks leave room, so that all have enough.
        low, high, part = 0.0, 1.0, 0.0
        for _ in range(_SHARE_STEPS):
            owned_params = part * max(0.0, num_params) / used.total()
            parts = self._parts(arrangement, owned_params)
            other = self._estimate(arrangement, parts, owned_params)
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

    def _idle_capacity(self, used: Mapping[str, int], num_pipelines: int) -> float:
        """Return the parameters that devices without layers have room to own."""
        if not self.idle_may_own:
            return 0.0
        return sum(
            (count - used.get(device, 0)) * idle_capacity(self.cost, device, num_pipelines)
            for device, count in self.num_devices.items()
        )

    def _estimate(
        self,
        arrangement: Arrangement,
        parts: Mapping[PipelineKey, PipelineEstimate] | None,
        owned_params: float | None,
    ) -> Estimate | None:
        if parts is None:
            return None
        total, num_pipelines = self.workload.num_microbatches, len(arrangement)
        members, usual = self.members(arrangement), self.usual_share(num_pipelines)
        exchange = self._exchange(arrangement, parts)
        kinds, numbers = list(parts.values()), list(map(len, members.values()))
        rooms = [self.rooms(p, num_pipelines, owned_params) for p in kinds]
        foreign_s = self._foreign_s(arrangement, numbers, rooms)
        weight, pushed = self.cost.layout.weight_bytes, self.cost.layout.pushed_bytes
        pulled_s = _later(
            exchange.pull_start_s([part.times.forward_s for part in kinds]), foreign_s, weight
        )
        waits_s = [_wait_s(part, starts) for part, starts in zip(kinds, pulled_s, strict=True)]
        fills = [self.fill_s(part, usual) + wait for part, wait in zip(kinds, waits_s, strict=True)]
        slopes = [part.slope_s for part in kinds]
        shares = (
            deal_microbatches(numbers, total)
            if self.equal_microbatches
            else share_microbatches(fills, slopes, numbers, total)
        )
        if shares is None:
            return None
        ends_s = [
            [wait + end for end in self.ends_s(part, max(share), usual)]
            for part, share, wait in zip(kinds, shares, waits_s, strict=True)
        ]
        backward_s = [part.times.backward_s for part in kinds]
        pushed_s = _later(
            exchange.push_end_s(ends_s, backward_s, [True] * len(kinds)), foreign_s, pushed
        )
        steps_s = [self.steps_s(part, num_pipelines, owned_params) for part in kinds]
        left = {key: list(share) for key, share in zip(parts, shares, strict=True)}
        keys = self.keys(arrangement)
        return Estimate(
            arrangement=arrangement,
            layers=tuple(parts[key].layers for key in keys),
            num_microbatches=tuple(left[key].pop() for key in keys),
            time_s=max(
                end + step
                for rows in zip(pushed_s, steps_s, strict=True)
                for end, step in zip(*rows, strict=True)
            ),
            is_recomputing=any(part.is_recomputing for part in kinds),
            capacity_params=sum(
                number * room.num_ranks * room.capacity
                for number, row in zip(numbers, rooms, strict=True)
                for room in row
            ),
        )

    def _parts(
        self, arrangement: Arrangement, owned_params: float | None
    ) -> dict[PipelineKey, PipelineEstimate] | None:
        """Return each class of pipelines with its layers; None if one doesn't fit."""
        if len(arrangement) > self.workload.num_microbatches:
            return None
        parts: dict[PipelineKey, PipelineEstimate] = {}
        for key, (pipeline, *_) in self.members(arrangement).items():
            part = self.pipeline(pipeline, len(arrangement), owned_params)
            if part is None:
                return None
            parts[key] = part
        return parts

    def _foreign_s(
        self,
        arrangement: Arrangement,
        numbers: Sequence[int],
        rooms: Sequence[Sequence[StageRoom]],
    ) -> list[list[float]]:
        """Return about the seconds, for each byte of a parameter, of what ranks own for others.

        What a stage's ranks have no room for they send to ranks that have, in proportion to the
        room that those have beside what they hold; every pipeline sends it there. All zeros where
        holders own alike.

        Args:
            arrangement: The pipelines.
            numbers: How many pipelines each class has.
            rooms: What ranks of its stages may own.
        """
        every = [(n * r.num_ranks, r) for n, row in zip(numbers, rooms, strict=True) for r in row]
        given = sum(count * (room.claimed - room.owned) for count, room in every)
        if not given:
            return [[0.0] * len(row) for row in rooms]
        spare = sum(count * (room.capacity - room.owned) for count, room in every)
        taken = len(arrangement) * min(1.0, given / spare) if spare > 0 else 0.0
        ranks = [self.rank_of_node[node] for node in used_nodes(arrangement)]
        bytes_per_s, _ = self.cost.link(ranks[0], ranks[-1])
        return [
            [
                max(room.claimed - room.owned, taken * (room.capacity - room.owned)) / bytes_per_s
                for room in row
            ]
            for row in rooms
        ]

    def _exchange(
        self, arrangement: Arrangement, parts: Mapping[PipelineKey, PipelineEstimate]
    ) -> ExchangeTable:
        """Return the exchange between the classes of pipelines."""
        key = arrangement, tuple([part.layers for part in parts.values()])
        if key not in self._exchanges:
            holders = [
                Holders(
                    layers=part.layers,
                    tp_degrees=members[0].tp_degrees,
                    ranks=tuple([tuple([self.rank_of_node[n] for n in p.nodes]) for p in members]),
                )
                for part, members in zip(
                    parts.values(), self.members(arrangement).values(), strict=True
                )
            ]
            self._exchanges[key] = ExchangeTable(holders, self.cost)
        return self._exchanges[key]


def _later(
    times_s: Sequence[Sequence[float]], more_s: Sequence[Sequence[float]], factor: float
) -> list[list[float]]:
    """Return [pipeline][stage] times, each so much later."""
    return [
        [time + factor * more for time, more in zip(*rows, strict=True)]
        for rows in zip(times_s, more_s, strict=True)
    ]


def _wait_s(part: PipelineEstimate, start_s: Sequence[float]) -> float:
    """Return how much later a pipeline goes on for weights than for hidden states."""
    hops_s = (0.0, *part.times.forward_message_s)
    arrived_s, wait_s = 0.0, 0.0
    for start, forward, hop in zip(start_s, part.times.forward_s, hops_s, strict=True):
        arrived_s += hop
        wait_s = max(wait_s, start - arrived_s)
        arrived_s += forward
    return wait_s
