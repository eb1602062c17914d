"""Find the least recomputation with which a stage fits, for every number of layers at once.

Memory is linear in layers (`CostModel`), so that of n layers follows from one and two layers.
Recomputation has levels: levels 1 to n recompute that many layers selectively, at few seconds per
byte; each level from n+1 to 2·n recomputes one more of them as a whole. With K, S and R the bytes,
for all tokens in flight, of a layer that is kept, recomputed selectively and as a whole, a stage
that exceeds its device by `over` bytes takes level ⌈over / (K - S)⌉, or
n + ⌈(over - n·(K - S)) / (S - R)⌉. n layers don't fit if level 2·n isn't enough, or states and the
buffers of a push are too large. If K = S, levels 1 to n are whole layers and there are no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape
from lightning_hetero.simulator.memory import push_buffer_bytes
from lightning_hetero.simulator.stage import StateLayout

__all__ = ["MemoryUse", "RecomputeTables", "StageTable", "at_level", "room_to_own"]

_Bytes = TypeVar("_Bytes", float, FloatArray)

_FEW_IN_FLIGHT = 16
"""Most micro-batches that stages hold at once in most pipelines."""
_TINY = 1e-30


def at_level(shape: StageShape, level: int, *, is_selective: bool) -> StageShape:
    """Return a stage at a level of recomputation; `is_selective` if the first n are selective."""
    whole = max(0, level - shape.num_layers) if is_selective else level
    selective = min(level, shape.num_layers) - whole if is_selective else 0
    return shape._replace(recomputed_layers=whole, selective_layers=selective)


def room_to_own(
    layout: StateLayout, held: _Bytes, room: _Bytes, passing: _Bytes, num_pipelines: int
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


class MemoryUse(NamedTuple):
    """All that a stage's memory depends on, except its layers."""

    num_pipelines: int
    """Pipelines of the plan."""
    num_in_flight: int
    """Micro-batches that it holds at once."""
    owned_params: float | None = None
    """Parameters that each rank owns; None if holders share ownership equally."""


@dataclass(frozen=True, eq=False)
class StageTable:
    """Seconds of a stage with 0, 1, ... layers, with the least recomputation that fits.

    Stages of one shape that need the same recomputation are one object.
    """

    shape: StageShape
    """The stage; its number of layers is ignored."""
    forward_s: FloatArray
    """Seconds of a micro-batch's forward."""
    unlimited_s: FloatArray
    """Seconds of a micro-batch's forward and backward if everything fitted."""
    total_s: FloatArray
    """The same with recomputation; infinite where the layers don't fit."""
    levels: IntArray
    """Levels of recomputation; below 0 where the layers don't fit."""
    is_selective: bool
    """Whether levels 1 to n of n layers are selective."""

    @property
    def is_unlimited(self) -> bool:
        """Whether any number of layers fits without recomputation."""
        return not self.levels[1:].any()

    def pair_s(self, num_layers: int) -> tuple[float, float]:
        """Return the seconds of forward and backward with this number of layers."""
        forward = float(self.forward_s[num_layers])
        return forward, float(self.total_s[num_layers]) - forward

    def sized(self, num_layers: int) -> StageShape:
        """Return the shape of the stage with this number of layers."""
        shape, level = self.shape._replace(num_layers=num_layers), int(self.levels[num_layers])
        return at_level(shape, level, is_selective=self.is_selective)


class RecomputeTables:
    """Finds the least recomputation of stages of 0, 1, ... layers, and caches it.

    Args:
        cost: Times and bytes.
        workload: The iteration, which gives the micro-batches.
        may_recompute: Whether stages may recompute; else those that would have to don't fit.
    """

    def __init__(self, cost: CostModel, workload: Workload, *, may_recompute: bool = True) -> None:
        self._cost = cost
        self._may_recompute = may_recompute
        self._microbatch = workload.microbatch
        self._tokens = sum(workload.microbatch)
        self._num_microbatches = workload.num_microbatches
        self._num_layers = cost.model.num_layers
        self._known: dict[tuple[StageShape, int, float | None, int], IntArray] = {}
        self._tables: dict[tuple[StageShape, bytes], StageTable] = {}
        self._linear: dict[tuple[StageShape, bytes], tuple[FloatArray, FloatArray]] = {}

    def table(
        self,
        shape: StageShape,
        use: MemoryUse,
        times_s: tuple[FloatArray, FloatArray],
        inner_s: FloatArray,
    ) -> StageTable:
        """Return the table of a stage with 0, 1, ... layers.

        Args:
            shape: The stage; its number of layers is ignored.
            use: What else its memory depends on.
            times_s: Forward and backward seconds by layers, nothing recomputed.
            inner_s: Forward seconds by layers, without embedding and head.
        """
        again = self._least(shape, use)
        key = shape, again.tobytes()
        if key not in self._tables:
            total_s, is_selective = times_s[0] + times_s[1], self._cost.saves_selectively(shape)
            kept = StageTable(shape, times_s[0], total_s, total_s, again, is_selective)
            self._tables[key] = self._at_levels(kept, again, inner_s)
        return self._tables[key]

    def _at_levels(self, table: StageTable, levels: IntArray, inner_s: FloatArray) -> StageTable:
        """Return a table at the given level for each number of layers; below 0 they don't fit."""
        sizes = np.arange(len(levels))
        whole = np.maximum(levels - table.is_selective * sizes, 0)
        selective = table.is_selective * (np.clip(levels, 0, sizes) - whole)
        cheap = self._cost.selective_share(table.shape, self._microbatch)
        share = (whole + cheap * selective) / np.maximum(sizes, 1)
        total_s = np.where(levels < 0, np.inf, table.unlimited_s + inner_s * share)
        return replace(table, total_s=total_s, levels=levels)

    def roomiest(
        self, table: StageTable, use: MemoryUse, inner_s: FloatArray, limit_s: float
    ) -> tuple[StageTable, FloatArray]:
        """Return a stage that recomputes all it can within a time limit, and what it can own then.

        Args:
            table: The stage.
            use: What its memory depends on; `owned_params` is ignored.
            inner_s: Forward seconds by layers, without embedding and head.
            limit_s: Most seconds that it may take for a micro-batch.

        Returns:
            The stage, and by layers the parameters that all its ranks together have room to own;
            minus infinity where the layers don't fit.
        """
        shape, cost, layout = table.shape, self._cost, self._cost.layout
        sizes = np.arange(self._num_layers + 1)
        first = sizes * table.is_selective
        # How many layers could be recomputed as a whole in the seconds that are left.
        left = (limit_s - table.unlimited_s) * sizes / np.maximum(inner_s, _TINY)
        cheap = first * cost.selective_share(shape, self._microbatch)
        selective = first * np.clip(left / np.maximum(cheap, _TINY), 0, 1) // 1
        whole = sizes * np.clip((left - cheap) / np.maximum(sizes - cheap, _TINY), 0, 1) // 1
        levels = ((selective + whole) * self._may_recompute).astype(np.int64)
        held, passing = self._by_layers(shape._replace(num_layers=1), np.array([use.num_in_flight]))
        kept, of_input = cost.layer_bytes(shape)
        spared, saved = (self._tokens * (kept - s) for s in (cost.selective_bytes(shape), of_input))
        spared *= table.is_selective
        selective = np.minimum(levels, first)
        whole = levels - selective
        # If no layer is kept, none has freed memory for the layer that is being recomputed.
        last = np.where(whole >= sizes, saved, np.where(levels >= first, spared, 0.0))
        freed = use.num_in_flight * (selective * spared + whole * (saved - spared)) - last
        room = cost.usable_bytes(shape.device) - held * (layout.weight_bytes + layout.summed_bytes)
        capacity = room_to_own(layout, held, room, passing[0] - freed, use.num_pipelines)
        fits = (capacity >= 0) & (sizes > 0) & (table.unlimited_s <= limit_s)
        found = self._at_levels(table, np.where(fits, levels, -1), inner_s)
        return found, np.where(fits, shape.tp_degree * capacity, -np.inf)

    def _least(self, shape: StageShape, use: MemoryUse) -> IntArray:
        """Return the row of `least` for one use; rows of several numbers in flight are cached."""
        num_pipelines, num_in_flight, owned_params = use
        # Stages of a pipeline differ in micro-batches in flight; the last one has one.
        most = min(self._num_layers, self._num_microbatches)
        if num_in_flight <= _FEW_IN_FLIGHT:
            most = 1 if shape.has_head else min(most, _FEW_IN_FLIGHT)
        key = shape, num_pipelines, owned_params, most
        if key not in self._known:
            uses = [MemoryUse(num_pipelines, n, owned_params) for n in range(1, most + 1)]
            self._known[key] = self.least(shape, uses)
        row: IntArray = self._known[key][num_in_flight - 1]
        return row

    def least(self, shape: StageShape, uses: Sequence[MemoryUse]) -> IntArray:
        """Return the least levels of stages of 0, 1, ... layers; -1 where they don't fit.

        Args:
            shape: The stage; its number of layers is ignored.
            uses: What else its memory depends on; either all or none have `owned_params`.

        Returns:
            [uses, layers] levels.
        """
        cost, layout = self._cost, self._cost.layout
        sizes = np.arange(self._num_layers + 1)
        every, flying, shares = zip(*uses, strict=True)
        num_pipelines = np.array(every, dtype=np.float64)[:, None]
        in_flight = np.array(flying)
        held, passing = self._by_layers(shape._replace(num_layers=1), in_flight)
        owned = held / num_pipelines if layout.sharded else held
        if shares[0] is not None:
            owned = np.array(shares)[:, None]
        states = held * (layout.weight_bytes + layout.summed_bytes)
        states = states + owned * layout.device_kept_bytes
        room = cost.usable_bytes(shape.device) - states
        over = passing - room
        kept, of_input = cost.layer_bytes(shape)
        saved = [self._tokens * (kept - s) for s in (cost.selective_bytes(shape), of_input)]
        least = _least_levels(over, sizes, in_flight[:, None], *saved)
        fits = least >= 0
        if layout.sharded:
            fits &= push_buffer_bytes(held, owned, num_pipelines, layout.pushed_bytes) <= room
        if not self._may_recompute:
            fits &= over <= 0
        least = np.where(fits, least, -1)
        least[:, 0] = -1
        return least.astype(np.int64)

    def _by_layers(self, shape: StageShape, in_flight: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return parameters [layers] and bytes of micro-batches [numbers in flight, layers].

        Nothing is recomputed, so the bytes are linear in both.
        """
        key = shape, in_flight.tobytes()
        if key not in self._linear:
            cost, sizes = self._cost, np.arange(self._num_layers + 1, dtype=np.float64)
            params, passing = [], []
            for count in (1, 2):
                sized = shape._replace(num_layers=count)
                one, two = (
                    cost.passing_memory(sized, held * self._tokens, self._tokens).total
                    for held in (1, 2)
                )
                params.append(cost.num_stage_params(sized))
                passing.append(one + (in_flight[:, None] - 1) * (two - one))
            self._linear[key] = (
                params[0] + (sizes - 1) * (params[1] - params[0]),
                passing[0] + (sizes - 1) * (passing[1] - passing[0]),
            )
        return self._linear[key]


def _least_levels(
    over: FloatArray, sizes: IntArray, in_flight: IntArray, spared: float, saved: float
) -> FloatArray:
    """Return the least levels that free `over` bytes, [numbers, layers]; -1 where none does.

    Args:
        over: [numbers, layers] bytes, by numbers in flight and layers.
        sizes: [layers] numbers of layers.
        in_flight: [numbers, 1] micro-batches in flight.
        spared: Bytes of a micro-batch that a layer saves if recomputed selectively, 0 if none.
        saved: The same if recomputed as a whole.
    """

    def count(num_bytes: FloatArray, of_layer: float) -> FloatArray:
        if not of_layer:
            return np.where(num_bytes > 0, np.inf, 0.0)
        needed: FloatArray = np.maximum(num_bytes, 0.0) / (of_layer * in_flight)
        return np.ceil(needed * (1 - 1e-12))

    # If no layer is kept, none has freed memory for the layer that is being recomputed.
    all_whole = over - sizes * in_flight * saved + saved <= 0
    selective = count(over, spared)
    whole = count(over - sizes * in_flight * spared + spared, saved - spared)
    first = sizes if spared else 0
    highest = np.where(all_whole, first + sizes, -1)
    return np.where(selective < sizes, selective, np.where(whole < sizes, first + whole, highest))
