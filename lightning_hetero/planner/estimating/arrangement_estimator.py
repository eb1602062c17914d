"""Estimate an arrangement whose layers are placed, and share micro-batches among its pipelines.

K micro-batches of a pipeline take `fill + slope·K`; shares equalise that (`microbatch_shares`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes, used_nodes
from lightning_hetero.planner.estimating.pipeline_estimator import (
    PipelineEstimate,
    PipelineEstimator,
    StageRoom,
)
from lightning_hetero.planner.estimating.stage_times import PipelineKey
from lightning_hetero.planner.solvers.microbatch_shares import deal_microbatches, share_microbatches
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel
from lightning_hetero.simulator.exchange import ExchangeTable
from lightning_hetero.simulator.unit_times import Holders

__all__ = ["ArrangementEstimator", "Estimate", "Parts"]

Parts = Mapping[PipelineKey, PipelineEstimate]
"""Each class of an arrangement's pipelines, with its layers."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An arrangement with layers and micro-batches, and its estimated iteration time."""

    arrangement: Arrangement
    """The pipelines; each has work."""
    layers: tuple[tuple[int, ...], ...]
    """[pipeline][stage] layers."""
    num_microbatches: tuple[int, ...]
    """Micro-batches of each pipeline."""
    time_s: float
    """Estimated seconds of an iteration."""
    is_recomputing: bool
    """Whether a stage recomputes a layer."""
    alone_s: float
    """The same without exchange and optimizer steps."""
    capacity_params: float
    """Parameters that all ranks together have room to own."""
    otherwise: "Estimate | None" = None
    """A simpler and slower estimate of the same arrangement; None if there is none."""


class ArrangementEstimator(PipelineEstimator):
    """Times arrangements on one cluster for one workload; caches everything by class."""

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
        self._least_s: dict[Arrangement, float] = {}
        self._exchanges: dict[tuple[Arrangement, tuple[tuple[int, ...], ...]], ExchangeTable] = {}
        self._keys_of: dict[Arrangement, tuple[PipelineKey, ...]] = {}
        self._members: dict[Arrangement, dict[PipelineKey, list[PipelineNodes]]] = {}

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

    def _estimate(
        self,
        arrangement: Arrangement,
        parts: Parts | None,
        owned_params: float | None,
    ) -> Estimate | None:
        """Return an estimate; None without parts, or with fewer micro-batches than pipelines.

        Args:
            arrangement: The pipelines.
            parts: The pipelines' estimates, by class; None if one doesn't fit.
            owned_params: Parameters that each rank owns; None if holders share them alike.
        """
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
            alone_s=max(
                end - wait for row, wait in zip(ends_s, waits_s, strict=True) for end in row
            ),
            is_recomputing=any(part.is_recomputing for part in kinds),
            capacity_params=sum(
                number * room.num_ranks * room.capacity
                for number, row in zip(numbers, rooms, strict=True)
                for room in row
            ),
        )

    def _foreign_s(
        self,
        arrangement: Arrangement,
        numbers: Sequence[int],
        rooms: Sequence[Sequence[StageRoom]],
    ) -> list[list[float]]:
        """Estimate [class][stage] seconds, per byte of a parameter, of what ranks own for others.

        What a stage's ranks have no room to own, every pipeline sends to ranks that have room left,
        in proportion to it. All zeros if holders share ownership equally.

        Args:
            arrangement: The pipelines.
            numbers: How many pipelines each class has.
            rooms: [class][stage] what ranks may own.
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

    def _exchange(self, arrangement: Arrangement, parts: Parts) -> ExchangeTable:
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
    """Return `times_s` plus `factor` times `more_s`, both [pipeline][stage]."""
    return [
        [time + factor * more for time, more in zip(*rows, strict=True)]
        for rows in zip(times_s, more_s, strict=True)
    ]


def _wait_s(part: PipelineEstimate, start_s: Sequence[float]) -> float:
    """Return by how many seconds late weights delay a pipeline's first micro-batch."""
    hops_s = (0.0, *part.times.forward_message_s)
    arrived_s, wait_s = 0.0, 0.0
    for start, forward, hop in zip(start_s, part.times.forward_s, hops_s, strict=True):
        arrived_s += hop
        wait_s = max(wait_s, start - arrived_s)
        arrived_s += forward
    return wait_s
