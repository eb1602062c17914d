"""Decide what a plan recomputes, and how much each rank owns, so that it fits into memory.

There are two ways. Either a layer's holders own it, and every stage uses the lowest level of
recomputation that fits (`stages`). Or ownership follows memory: all owned states must fit into the
room that weights, gradients and activations leave on all stages together. As long as they don't,
the stage with the least load goes one level higher. A rank then owns its part of what it holds as
far as it has room, and the rest goes to the others in proportion to their remaining room.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.placement import Option
from lightning_hetero.planner.stages import ENDS, Ownership, StageArrays, Stages
from lightning_hetero.simulator import MicroBatchShape

_FEW_RANKS = 6
"""Number of ranks up to which more than the least recomputation is also tried."""
_SHARE_DIGITS = 9


def own_microbatches(plan: ParallelPlan, usual: MicroBatchShape) -> list[list[MicroBatchShape]]:
    """Return every pipeline's micro-batches; pipelines without a size get the usual one."""
    return [
        [usual[:1] * (pipeline.microbatch_size or len(usual))] * (pipeline.num_microbatches or 0)
        for pipeline in plan.pipelines
    ]


def settle_memory(
    plan: ParallelPlan, stages: Mapping[int, Stages], *, idle_may_own: bool = True
) -> list[ParallelPlan]:
    """Return variants of the plan with recomputation and owner shares that fit; [] if none does.

    One variant has holders as owners; others follow memory, if that shortens the busiest stage.

    Args:
        plan: The plan; its pipelines name their numbers of micro-batches.
        stages: Times and memory of stages, by size of micro-batches; the usual size first.
        idle_may_own: Whether ranks without layers may own, too.
    """
    known = _KnownStages(plan, stages)
    by_holders = known.least_levels(by_room=False)
    fits = bool((by_holders >= 0).all())
    found = [known.plan_with(by_holders, None)] if fits else []
    if not known.cost.layout.is_owned_by_room:
        return found
    # Ranks without layers add room, but also messages: make plans with and without them.
    for idle in (True, False) if idle_may_own and known.idle_room.any() else (False,):
        idle_room = known.idle_room * idle
        by_memory = known.levels_for_owners(float(idle_room.sum()))
        if by_memory is not None and (
            not fits or known.load_s(by_memory).max() < known.load_s(by_holders).max()
        ):
            for levels in known.recomputations(by_memory):
                for shares in known.owner_shares(levels, idle_room):
                    found.append(known.plan_with(levels, shares))
    return list(dict.fromkeys(found))


class _Kind(NamedTuple):
    """What equal stages have in common."""

    size: int
    end: int
    option: Option
    num_layers: int
    num_in_flight: int
    num_microbatches: int


class _KnownStages:
    """The kinds of a plan's stages; arrays are by kind."""

    def __init__(self, plan: ParallelPlan, stages: Mapping[int, Stages]) -> None:
        self.plan, self.stages = plan, stages
        usual, any_stages = next(iter(stages.items()))
        self.cost, self.number = any_stages.cost, plan.num_pipelines
        kinds, node_of_rank = any_stages.class_of_node, self.cost.node_of_rank
        rows = []
        for pipeline in plan.pipelines:
            last, count = pipeline.num_stages - 1, pipeline.num_microbatches or 0
            for index, stage in enumerate(pipeline.stages):
                end = ENDS.index((index == 0, index == last))
                option = Option(kinds[node_of_rank[stage.ranks[0]]], stage.tp_degree)
                held, size = min(last - index + 1, count), pipeline.microbatch_size or usual
                rows.append(_Kind(size, end, option, len(stage.layers), held, count))
        copies = Counter(rows)
        self.kinds = sorted(copies, key=lambda kind: kind.size)
        place = {kind: index for index, kind in enumerate(self.kinds)}
        self.kind_of_stage = np.array([place[kind] for kind in rows])
        self.degrees = np.array([kind.option.tp_degree for kind in self.kinds])
        self.ranks = self.degrees * [copies[kind] for kind in self.kinds]
        """Ranks of all stages of a kind."""
        self.counts = np.array([kind.num_microbatches for kind in self.kinds])
        parts = [stages[size].arrays.at(index) for size, index in self._indices()]
        self.arrays = StageArrays(*map(np.concatenate, zip(*parts, strict=True)))

    def _indices(self) -> list[tuple[int, tuple[IntArray, ...]]]:
        """Return the index in arrays of stages for the kinds of each size of micro-batches."""
        found = []
        for size, row in itertools.groupby(self.kinds, key=lambda kind: kind.size):
            index = self.stages[size].index
            values = [(k.end, index[k.option], k.num_in_flight - 1, k.num_layers) for k in row]
            found.append((size, tuple(np.array(values).T)))
        return found

    def least_levels(self, *, by_room: bool) -> IntArray:
        """Return the least levels of recomputation that fit; -1 where none does."""
        ownership = Ownership(self.number, by_room)
        rows = [self.stages[size].table(ownership).levels[at] for size, at in self._indices()]
        return np.concatenate(rows)

    def load_s(self, levels: IntArray) -> FloatArray:
        """Return the seconds of all micro-batches of a stage."""
        return self.counts * self.arrays.seconds_at(levels)

    def room(self, levels: IntArray) -> FloatArray:
        """Return the parameters that each rank has room to own."""
        return self.arrays.room_to_own(levels, self.cost.layout, self.number)

    @cached_property
    def idle_room(self) -> FloatArray:
        """[ranks] parameters that ranks without layers have room to own."""
        stages, busy = next(iter(self.stages.values())), set(self.plan.ranks)
        rooms = [
            0.0 if rank in busy else stages.idle_room(node, self.number)
            for rank, node in enumerate(self.cost.node_of_rank)
        ]
        return np.array(rooms)

    def levels_for_owners(self, elsewhere: float) -> IntArray | None:
        """Return levels with which all ranks together have room for all states; None if none do.

        Args:
            elsewhere: Parameters that ranks without layers have room to own.
        """
        levels = self.least_levels(by_room=True)
        if (levels < 0).any():
            return None
        lacking = self.cost.model.num_params - elsewhere - float(self.ranks @ self.room(levels))
        if lacking <= 0:
            return levels
        # One level after another, beginning with that of the least load.
        steps = range(1, int(self.arrays.most.max()) + 1)
        loads = np.stack([self.load_s(np.full_like(levels, level)) for level in steps])
        rooms = np.stack([self.room(np.full_like(levels, level)) for level in (0, *steps)])
        gains = np.maximum(np.diff(rooms, axis=0), 0.0) * self.ranks
        numbers = np.array(steps)[:, None]
        loads[(numbers <= levels) | (numbers > self.arrays.most)] = np.inf
        order = np.argsort(loads.T, axis=None, kind="stable")
        order = order[: int(np.isfinite(loads).sum())]
        enough = int(np.searchsorted(np.cumsum(gains.T.ravel()[order]), lacking)) + 1
        if enough > len(order):
            return None
        return levels + np.bincount(order[:enough] // len(steps), minlength=len(levels))

    def recomputations(self, least: IntArray) -> list[IntArray]:
        """Return choices of levels: the least that fit, and on few ranks also higher ones.

        Recomputation frees memory in which ranks can own what they hold, which pays on slow links.
        """
        if len(self.plan.ranks) > _FEW_RANKS:
            return [least]
        almost = np.where(np.eye(len(least), dtype=bool), self.arrays.most - 1, least)
        return [least, self.arrays.most, *almost[self.arrays.most - 1 > least]]

    def owner_shares(self, levels: IntArray, idle: FloatArray) -> list[tuple[float, ...]]:
        """Return choices of all ranks' owner shares: the nearest and the most even ones.

        Nearest: a rank owns its part of what it holds as far as it has room. The rest goes, by
        room, to ranks with layers first, or to all ranks, because messages to a few ranks may take
        long. Most even: everything is divided by room.

        Args:
            levels: Levels of recomputation.
            idle: [ranks] parameters that ranks without layers may own.
        """
        total = float(self.cost.model.num_params)
        room, claim = np.zeros_like(idle), np.zeros_like(idle)
        of_kind = self.room(levels), self.arrays.owned / self.number
        for (_, _, stage), kind in zip(self.plan.iter_stages(), self.kind_of_stage, strict=True):
            room[list(stage.ranks)], claim[list(stage.ranks)] = of_kind[0][kind], of_kind[1][kind]
        claim, every = np.minimum(claim, room), room + idle

        def filled(owned: FloatArray, rooms: Sequence[FloatArray]) -> FloatArray:
            """Return what ranks own if parameters that aren't claimed fill rooms in turn."""
            for room in rooms:
                spare = np.maximum(room - owned, 0.0)
                left = max(0.0, total - float(owned.sum()))
                owned = owned + spare * (left / spare.sum() if left < spare.sum() else 1.0)
            return owned

        found = [filled(claim, (room, every)), total / every.sum() * every]
        if idle.any():
            found.insert(1, filled(claim, (every,)))
        return [tuple(np.round(owned / total, _SHARE_DIGITS).tolist()) for owned in found]

    def plan_with(self, levels: IntArray, shares: tuple[float, ...] | None) -> ParallelPlan:
        """Return the plan with levels and shares; stages name no recomputation if none has any."""
        if not levels.any():
            return replace(self.plan, owner_shares=shares)
        counts = zip(*(rows.tolist() for rows in self.arrays.recomputed(levels)), strict=True)
        again = [
            {"recomputed_layers": whole, "selective_layers": some or None} for whole, some in counts
        ]
        kinds = iter(self.kind_of_stage.tolist())
        pipelines = tuple(
            replace(p, stages=tuple(replace(stage, **again[next(kinds)]) for stage in p.stages))
            for p in self.plan.pipelines
        )
        return replace(self.plan, pipelines=pipelines, owner_shares=shares)
