"""Estimate how long an arrangement takes, with the layers and owners that suit it.

The search considers thousands of arrangements: an estimate takes microseconds, a simulation from
the same cost model milliseconds. Pipelines of one class are balanced by Eq. 4 and timed once
(`pipeline_estimator`). Where that is too simple more is tried: other owners if memory is short, and
the same cut of the layers in all pipelines of a depth if gradients take long.
"""

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning_hetero.planner.arrangement import Arrangement
from lightning_hetero.planner.estimating.arrangement_estimator import (
    ArrangementEstimator,
    Estimate,
    Parts,
)
from lightning_hetero.planner.estimating.memory_fit import idle_capacity
from lightning_hetero.planner.estimating.pipeline_estimator import PipelineEstimate
from lightning_hetero.planner.estimating.recompute_tables import RecomputeTables
from lightning_hetero.planner.estimating.stage_times import PipelineKey
from lightning_hetero.planner.solvers.balancing import balance_layers

__all__ = ["Estimator"]

_LONG_EXCHANGE = 1.02
"""Common cuts are tried if exchange makes an iteration longer by this factor."""
_SLOWED = 1.03
"""Stages may take longer by a power of this factor, to leave room for owned states."""
_MOST_SLOWED = 47
"""The highest power."""
_SHARE_STEPS = 5
"""Steps of the bisection for the part of an equal share that ranks should own."""


class Estimator(ArrangementEstimator):
    """Estimates arrangements on one cluster for one workload; caches everything by class."""

    def unequal(self) -> "Estimator":
        """Return an estimator with the same caches whose pipelines may run unequal shares."""
        other = copy.copy(self)
        other.equal_microbatches = False
        other._least_s = {}
        return other

    def with_degrees(self, tp_degrees: Sequence[int]) -> "Estimator":
        """Return an estimator with the same caches, for searches of these TP degrees alone."""
        other = copy.copy(self)
        other.tp_degrees = tuple(tp_degrees)
        return other

    def keeping(self) -> "Estimator":
        """Return an estimator with the same times whose stages recompute nothing."""
        other = copy.copy(self)
        other._recompute = RecomputeTables(self.cost, self.workload, may_recompute=False)
        other._stage_tables, other._pipelines, other._least_s = {}, {}, {}
        other._roomiest, other._roomy = {}, {}
        return other

    def least_s(self, arrangement: Arrangement) -> float:
        """Return about the least seconds of an arrangement: work and links alone, no exchange.

        Infinite if a pipeline doesn't fit or there are fewer micro-batches than pipelines.
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
        """Return about a lower bound on `least_s`: fractions of layers, unlimited memory."""
        kinds = self.members(arrangement)
        return self._finish_s(arrangement, {key: self.pipeline_work_s(key) for key in kinds})

    def _finish_s(
        self, arrangement: Arrangement, pipelines_s: Mapping[PipelineKey, tuple[float, float]]
    ) -> float:
        """Return the seconds of an arrangement whose pipelines take `fill + slope·K` seconds.

        By T they finish Σ (T - fill)/slope micro-batches. A T below some fill is too short.
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

    def estimate(self, arrangement: Arrangement, below_s: float = np.inf) -> Estimate | None:
        """Return an estimate; None if a pipeline doesn't fit or there are too few micro-batches.

        If memory slows it down, ownership by memory is tried as well: layers are balanced as if
        every rank owned nothing, or the part of an equal share with which all states have room; or
        to leave the most room within a time, if that could take less than `below_s`. If exchange
        takes long, pipelines of a depth get the same cut if that is faster.
        """
        parts = self._parts(arrangement, None)
        found = self._estimate(arrangement, parts, None)
        if self._is_short_of_memory(parts):
            return self._with_other_owners(arrangement, found, below_s)
        if parts and found and found.alone_s * _LONG_EXCHANGE < min(found.time_s, below_s):
            other = self._estimate(arrangement, self._cut_alike(arrangement, parts), None)
            if other and other.time_s < found.time_s:
                return replace(other, otherwise=found)
        return found

    def _cut_alike(self, arrangement: Arrangement, parts: Parts) -> Parts | None:
        """Return pipelines of equal depth with the same layers; None if that changes nothing.

        Then gradients of a layer are summed by the same ranks as those of neighbouring layers.
        Stages are balanced by their time, relative to their pipeline's slope.
        """
        cut: dict[PipelineKey, PipelineEstimate] = {}
        for depth in {len(part.layers) for part in parts.values()}:
            alike = {key: part for key, part in parts.items() if len(part.layers) == depth}
            layers = None
            if len({part.layers for part in alike.values()}) > 1:
                shares = [[t.total_s / p.slope_s for t in p.tables] for p in alike.values()]
                layers = balance_layers(np.max(shares, axis=0), self.num_layers)
            for key, part in alike.items():
                pipeline = self.members(arrangement)[key][0]
                cut[key] = self._timed_stages(pipeline, part.tables, layers) if layers else part
        return {key: cut[key] for key in parts} if cut != parts else None

    def _with_other_owners(
        self, arrangement: Arrangement, found: Estimate | None, below_s: float
    ) -> Estimate | None:
        """Return the best of an estimate and of some with ownership by memory.

        Args:
            arrangement: The pipelines.
            found: The one with holders as equal owners; None if that doesn't fit.
            below_s: Seconds that an iteration has to stay below.
        """
        used: Counter[str] = Counter()
        for key, members in self.members(arrangement).items():
            for tp_degree, device in zip(key[0], self.devices_of(key), strict=True):
                used[device] += tp_degree * len(members)
        num_params = self.cost.model.num_params - self._idle_capacity(used, len(arrangement))
        # Bisect for the least part of an equal share with which all states together have room.
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
                return found
            part = (low + high) / 2 if part else 1.0
        return self._with_most_room(arrangement, found, num_params, below_s)

    def _with_most_room(
        self, arrangement: Arrangement, found: Estimate | None, num_params: float, below_s: float
    ) -> Estimate | None:
        """Return the best of an estimate and of some balanced to leave the most room for states.

        Stages may take a factor longer than the slowest one of their pipeline if it owned nothing.
        The least factor with which all states have room is searched for, starting at the largest
        one with which an iteration could take less.

        Args:
            arrangement: The pipelines.
            found: The other estimate.
            num_params: Parameters that all ranks have to own.
            below_s: Seconds that an iteration has to stay below.
        """
        least_s = self.least_s(arrangement)
        best_s = min(below_s, found.time_s if found else np.inf)
        if not least_s < best_s:
            return found
        usual_s = {key: p.slowest_s for key, p in (self._parts(arrangement, 0.0) or {}).items()}
        if self.equal_microbatches:
            usual_s = dict.fromkeys(usual_s, max(usual_s.values()))
        owned_params = max(0.0, num_params) / sum(sum(p.tp_degrees) for p in arrangement)
        factor = min(best_s / least_s, _SLOWED**_MOST_SLOWED)
        power = most = math.ceil(math.log(factor, _SLOWED)) - 1
        best, low, high = found, 0, most + 1
        while low < high:
            limits_s = {key: seconds * _SLOWED**power for key, seconds in usual_s.items()}
            parts = self._roomiest_parts(arrangement, limits_s)
            other = self._estimate(arrangement, parts, owned_params)
            if other is not None and other.capacity_params >= num_params:
                high = power
                if best is None or other.time_s < best.time_s:
                    best = replace(other, otherwise=found)
            elif power == most:
                break
            else:
                low = power + 1
            power = (low + high) // 2
        return best

    def _roomiest_parts(
        self, arrangement: Arrangement, limits_s: Mapping[PipelineKey, float]
    ) -> dict[PipelineKey, PipelineEstimate] | None:
        """Return each class of pipelines balanced for the most room; None if one doesn't fit."""
        parts: dict[PipelineKey, PipelineEstimate] = {}
        for key, (pipeline, *_) in self.members(arrangement).items():
            part = self.roomiest(pipeline, len(arrangement), limits_s[key])
            if part is None:
                return None
            parts[key] = part
        return parts

    def _is_short_of_memory(self, parts: Parts | None) -> bool:
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
