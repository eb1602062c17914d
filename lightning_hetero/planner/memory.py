"""Settle a plan's memory: the least recomputation that fits, and how much each rank owns.

There are two ways. Either a layer's holders own it, and every stage takes the lowest level of
recomputation that fits (`stages`). Or ownership follows memory: the room that weights,
gradients and activations leave on all stages must hold all owned states. As long as it doesn't, the
stage whose load stays least goes one level higher. A rank then owns its part of what it holds as
far as it has room, and the rest goes to the others in proportion to the room that they have left.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.simulator import CostModel, MicroBatchShape, StageShape, StateLayout

__all__ = [
    "at_level",
    "idle_capacity",
    "own_microbatches",
    "room_to_own",
    "settle_memory",
]

_Number = TypeVar("_Number", float, FloatArray)

_FEW_RANKS = 6
"""Up to this number of ranks, more than the least recomputation is tried, too."""
_SHARE_DIGITS = 9
_NEARLY = 1 - 1e-6
"""Share of a rank's room that it may own, because shares are rounded."""


def at_level(shape: StageShape, level: int, *, is_selective: bool) -> StageShape:
    """Return a stage at a level of recomputation; `is_selective` if the first n are selective."""
    whole = max(0, level - shape.num_layers) if is_selective else level
    selective = min(level, shape.num_layers) - whole if is_selective else 0
    return shape._replace(recomputed_layers=whole, selective_layers=selective)


def room_to_own(
    layout: StateLayout, held: _Number, room: _Number, passing: _Number, num_pipelines: int
) -> FloatArray:
    """Return the parameters that a rank has room to own; below 0 where it has none.

    Args:
        layout: Bytes per parameter.
        held: Parameters that it computes with.
        room: Usable bytes of its device that weights and gradients leave.
        passing: Bytes of micro-batches in flight.
        num_pipelines: Pipelines of the plan, each of which pushes gradients to owners.
    """
    own, gradient = layout.kept_bytes, layout.pushed_bytes
    # Buffers of a push are two linear pieces: up to the holder's own share, and beyond.
    within = (room - held * gradient) / (own + (num_pipelines - 2) * gradient)
    fixed = (1 - 2 / num_pipelines) * held * gradient
    beyond = (room - fixed) / (own + num_pipelines * gradient)
    beside_buffers = np.where(within > held / num_pipelines, beyond, within)
    return np.minimum((room - passing) / own, beside_buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One stage of a plan and what it may recompute."""

    cost: CostModel
    shape: StageShape
    is_selective: bool
    """Whether the first levels are selective."""
    num_pipelines: int
    num_microbatches: int
    num_in_flight: int
    microbatch: MicroBatchShape

    def most(self) -> int:
        """Return the highest level of recomputation."""
        return self.shape.num_layers * (1 + self.is_selective)

    def at(self, level: int) -> StageShape:
        """Return the stage at a level of recomputation."""
        return at_level(self.shape, level, is_selective=self.is_selective)

    def load_s(self, level: int) -> float:
        """Return the seconds of all its micro-batches at a level."""
        return self.num_microbatches * sum(self.cost.compute_s(self.at(level), self.microbatch))

    def least_by_holders(self) -> int | None:
        """Return the least level that fits if holders own equal parts; None if none does."""
        return self._least(lambda level: self._room(level) >= 0)

    def least_without_states(self) -> int | None:
        """Return the least level that fits if it owns nothing."""
        return self._least(lambda level: self.capacity(level) >= 0)

    def capacity(self, level: int) -> float:
        """Return the parameters that each rank has room to own; below 0 if nothing fits."""
        tokens = sum(self.microbatch)
        return _owned_capacity(
            self.cost, self.at(level), self.num_pipelines, tokens * self.num_in_flight, tokens
        )

    def _room(self, level: int) -> float:
        shape = self.at(level)
        batches = [self.microbatch] * self.num_in_flight
        memory = self.cost.stage_memory(shape, self.num_pipelines, batches, self.num_in_flight)
        return self.cost.usable_bytes(shape.device) - memory.total

    def _least(self, fits: Callable[[int], bool]) -> int | None:
        levels = range(self.most() + 1)
        found = 0 if fits(0) else bisect_left(levels, True, key=fits)
        return found if found < len(levels) else None


def _owned_capacity(
    cost: CostModel, shape: StageShape, num_pipelines: int, held_tokens: int, longest: int
) -> float:
    """Return the parameters that a rank of a stage has room to own; below 0 if it has none.

    Owned states must fit beside activations, and beside the buffers of a push, which grow with
    them (`push_buffer_bytes`).
    """
    memory = cost.memory_of_tokens(shape, num_pipelines, held_tokens, longest, owned_params=0.0)
    states = memory.weights + memory.gradients
    passing = memory.total - states - memory.exchange
    room, held = cost.usable_bytes(shape.device) - states, float(cost.num_stage_params(shape))
    return float(room_to_own(cost.layout, held, room, passing, num_pipelines)) * _NEARLY


def idle_capacity(cost: CostModel, device: str, num_pipelines: int) -> float:
    """Return the parameters that a device without layers has room to own."""
    layout = cost.layout
    per_param = layout.kept_bytes + num_pipelines * layout.pushed_bytes
    return cost.usable_bytes(device) / per_param * _NEARLY


def settle_memory(
    plan: ParallelPlan,
    cost: CostModel,
    microbatch: MicroBatchShape,
    *,
    idle_may_own: bool = True,
) -> list[ParallelPlan]:
    """Return variants of the plan with recomputation and owner shares that fit; [] if none does.

    They are one with holders as owners, and some by memory if that shortens the busiest stage.

    Args:
        plan: The plan; its pipelines name their numbers of micro-batches.
        cost: Times and bytes.
        microbatch: Sequence lengths of a micro-batch, for pipelines without a size of their own.
        idle_may_own: Whether ranks without layers may own, too.
    """
    idle = _idle_rooms(plan, cost) if idle_may_own else {}
    stages = _stages(plan, cost, microbatch)
    copies = Counter(stage for row in stages for stage in row)
    by_holders = {stage: stage.least_by_holders() for stage in copies}
    found = []
    if None not in by_holders.values():
        found.append(_with_memory(plan, stages, by_holders, None))
    # Ranks without layers add room but also messages, so plans are made with and without them.
    for others in (idle, {}) if idle else (idle,):
        by_memory = _recompute_for_owners(copies, cost, sum(others.values()))
        if by_memory is not None and (
            None in by_holders.values() or _load_s(by_memory) < _load_s(by_holders)
        ):
            for levels in _recomputations(plan, by_memory):
                for shares in _owner_shares(plan, stages, levels, others):
                    found.append(_with_memory(plan, stages, levels, shares))
    return list(dict.fromkeys(found))


def _stages(plan: ParallelPlan, cost: CostModel, microbatch: MicroBatchShape) -> list[list[_Stage]]:
    """Return all stages, as [pipeline][stage]; identical pipelines share a row."""
    rows: dict[object, list[_Stage]] = {}
    found = []
    for pipeline in plan.pipelines:
        shapes = tuple([cost.shape_of(stage) for stage in pipeline.stages])
        count = pipeline.num_microbatches or 0
        key = shapes, count, pipeline.microbatch_size
        if key not in rows:
            rows[key] = [
                _Stage(
                    cost=cost,
                    shape=at_level(shape, 0, is_selective=False),
                    is_selective=cost.saves_selectively(shape),
                    num_pipelines=plan.num_pipelines,
                    num_microbatches=count,
                    num_in_flight=min(pipeline.num_stages - index, count),
                    microbatch=_own_microbatch(pipeline, microbatch),
                )
                for index, shape in enumerate(shapes)
            ]
        found.append(rows[key])
    return found


def _recomputations(
    plan: ParallelPlan, least: Mapping[_Stage, int | None]
) -> list[Mapping[_Stage, int | None]]:
    """Return choices of levels: the least that fit, and on few ranks also higher ones.

    Memory that recomputation frees lets ranks own what they hold, which pays on slow links.
    """
    if len(plan.ranks) > _FEW_RANKS:
        return [least]
    every = {stage: stage.most() for stage in least}
    almost = [
        {**least, stage: stage.most() - 1}
        for stage in least
        if (least[stage] or 0) < stage.most() - 1
    ]
    return [least, every, *almost]


def _own_microbatch(pipeline: PipelinePlan, usual: MicroBatchShape) -> MicroBatchShape:
    """Return the sequence lengths of a pipeline's micro-batch, all equal."""
    return usual if pipeline.microbatch_size is None else usual[:1] * pipeline.microbatch_size


def own_microbatches(plan: ParallelPlan, usual: MicroBatchShape) -> list[list[MicroBatchShape]]:
    """Return every pipeline's micro-batches; pipelines without a size have the usual one."""
    return [
        [_own_microbatch(pipeline, usual)] * (pipeline.num_microbatches or 0)
        for pipeline in plan.pipelines
    ]


def _idle_rooms(plan: ParallelPlan, cost: CostModel) -> dict[int, float]:
    """Return the parameters that each rank without layers has room to own."""
    return {
        rank: idle_capacity(cost, cost.cluster.nodes[node].device, plan.num_pipelines)
        for rank, node in enumerate(cost.node_of_rank)
        if plan.place(rank) is None
    }


def _load_s(levels: Mapping[_Stage, int | None]) -> float:
    return max(stage.load_s(level or 0) for stage, level in levels.items())


def _recompute_for_owners(
    copies: Mapping[_Stage, int], cost: CostModel, elsewhere: float
) -> dict[_Stage, int | None] | None:
    """Return levels with which all stages together have room for all states; None if none do.

    `elsewhere` are the parameters that ranks without layers have room to own.
    """
    if not cost.layout.is_owned_by_room:
        return None
    levels: dict[_Stage, int | None] = {}
    lacking = cost.model.num_params - elsewhere
    for stage, count in copies.items():
        least = stage.least_without_states()
        if least is None:
            return None
        levels[stage] = least
        lacking -= stage.capacity(least) * stage.shape.tp_degree * count
    queue = [
        (stage.load_s((least or 0) + 1), position, stage)
        for position, (stage, least) in enumerate(levels.items())
        if (least or 0) < stage.most()
    ]
    heapq.heapify(queue)
    while lacking > 0:
        if not queue:
            return None
        _, position, stage = heapq.heappop(queue)
        before = levels[stage] or 0
        gained = stage.capacity(before + 1) - stage.capacity(before)
        lacking -= max(0.0, gained) * stage.shape.tp_degree * copies[stage]
        levels[stage] = before + 1
        if before + 1 < stage.most():
            heapq.heappush(queue, (stage.load_s(before + 2), position, stage))
    return levels


def _owner_shares(
    plan: ParallelPlan,
    stages: Sequence[Sequence[_Stage]],
    levels: Mapping[_Stage, int | None],
    idle: Mapping[int, float],
) -> list[tuple[float, ...]]:
    """Return choices of all ranks' owner shares, the nearest and the most even ones.

    Nearest: a rank owns its part of what it holds as far as it has room. The rest goes, by room, to
    ranks with layers first, or to all ranks, because messages to few of them may take long. Most
    even: everything goes by room.
    """
    cost = stages[0][0].cost
    room, claim = {}, {}
    capacity = {known: known.capacity(level or 0) for known, level in levels.items()}
    for row, pipeline in zip(stages, plan.pipelines, strict=True):
        for known, stage in zip(row, pipeline.stages, strict=True):
            for rank in stage.ranks:
                room[rank] = capacity[known]
                claim[rank] = cost.num_owned_params(known.shape, plan.num_pipelines)
    total = float(cost.model.num_params)
    claimed = {rank: min(claim[rank], room[rank]) for rank in room}
    every = {**room, **idle}
    found = [_filled(claimed, (room, idle), total)]
    if idle:
        found.append(_filled(claimed, (every,), total))
    part = total / sum(every.values())
    found.append({rank: part * size for rank, size in every.items()})
    return [
        tuple(
            round(shares.get(rank, 0.0) / total, _SHARE_DIGITS)
            for rank in range(cost.cluster.num_ranks)
        )
        for shares in found
    ]


def _filled(
    claimed: Mapping[int, float], rooms: Sequence[Mapping[int, float]], total: float
) -> dict[int, float]:
    """Return what ranks own if parameters that aren't claimed fill `rooms`, one after another."""
    owned = dict(claimed)
    for room in rooms:
        spare = {rank: room[rank] - owned.get(rank, 0.0) for rank in room}
        left = max(0.0, total - sum(owned.values()))
        part = min(1.0, left / sum(spare.values())) if left and any(spare.values()) else 0.0
        for rank, size in spare.items():
            owned[rank] = owned.get(rank, 0.0) + part * size
    return owned


def _with_memory(
    plan: ParallelPlan,
    stages: Sequence[Sequence[_Stage]],
    levels: Mapping[_Stage, int | None],
    shares: tuple[float, ...] | None,
) -> ParallelPlan:
    """Return the plan with levels and shares; stages name no recomputation if none recomputes."""
    if any(levels.values()):
        shapes = {known: known.at(level or 0) for known, level in levels.items()}
        pipelines = tuple(
            replace(
                pipeline,
                stages=tuple(
                    replace(
                        stage,
                        recomputed_layers=shapes[known].recomputed_layers,
                        selective_layers=shapes[known].selective_layers or None,
                    )
                    for stage, known in zip(pipeline.stages, row, strict=True)
                ),
            )
            for pipeline, row in zip(plan.pipelines, stages, strict=True)
        )
    else:
        pipelines = plan.pipelines
    return ParallelPlan(pipelines=pipelines, owner_shares=shares)
