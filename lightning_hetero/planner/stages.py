"""Times and memory of every stage that a pipeline may have, for all numbers of layers at once.

A stage option is a class of nodes and a TP degree. With n layers and f micro-batches in flight its
memory is linear in n and f (`CostModel`), so one and two layers tell the rest. It takes the least
recomputation that fits. Levels 1 to n recompute that many layers selectively, at few seconds per
byte; each level from n+1 to 2·n recomputes one more of them as a whole. With K, S and R the bytes,
for all tokens in flight, of a layer that is kept, recomputed selectively and as a whole, a stage
that exceeds its device by `over` bytes takes level ⌈over / (K - S)⌉, or
n + ⌈(over - n·(K - S)) / (S - R)⌉. If K = S, there are whole layers only.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.memory import room_to_own
from lightning_hetero.planner.placement import Option, classify_nodes
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape
from lightning_hetero.simulator.memory import push_buffer_bytes

__all__ = ["Ownership", "StageTable", "Stages"]

_MOST_STAGES = 64
"""Stages of a pipeline at most: longer ones lose more to their bubbles than any memory gains."""


class Ownership(NamedTuple):
    """What decides the bytes of states: how many pipelines there are, and who owns."""

    num_pipelines: int
    by_room: bool = False
    """Whether ranks own as much as they have room for; otherwise holders own equal parts."""
    recomputes_all: bool = False
    """Whether stages recompute all layers, for the most room to own."""


class StageTable(NamedTuple):
    """One option's stages by recomputation, micro-batches in flight and layers.

    Arrays are [variants, in flight, layers]; with holders as owners there is one variant, with the
    least recomputation. With ownership by room further ones recompute more, for more room.
    """

    forward_s: FloatArray
    """[layers] seconds of a micro-batch's forward."""
    total_s: FloatArray
    """Seconds of forward and backward with recomputation; infinite where the layers don't fit."""
    levels: IntArray
    """Levels of recomputation."""
    room: FloatArray
    """Parameters that all its ranks together have room to own; zeros if holders own."""


class Stages:
    """All stage options of a cluster for one workload.

    Args:
        cost: Times and bytes.
        workload: The iteration, which gives the micro-batches.
        tp_degrees: TP degrees that stages may have.
        counts: Devices of each node that may be used; None for all.
    """

    def __init__(
        self,
        cost: CostModel,
        workload: Workload,
        tp_degrees: Sequence[int],
        counts: Sequence[int] | None = None,
    ) -> None:
        self.cost, self.workload = cost, workload
        self.num_layers = cost.model.num_layers
        self.tokens = sum(workload.microbatch)
        self.class_of_node = classify_nodes(cost.cluster)
        self.counts = [node.count for node in cost.cluster.nodes] if counts is None else counts
        self.node_of_class: dict[int, int] = {}
        self.counts_of_class: dict[int, list[int]] = {}
        """Devices of each node of a class."""
        for index, kind in enumerate(self.class_of_node):
            if self.counts[index]:
                self.node_of_class.setdefault(kind, index)
                self.counts_of_class.setdefault(kind, []).append(self.counts[index])
        self.options = tuple(
            Option(kind, degree)
            for kind, counts in self.counts_of_class.items()
            for degree in tp_degrees
            if degree <= max(counts)
        )
        self.devices: Counter[int] = Counter()
        for kind, counts in self.counts_of_class.items():
            self.devices[kind] += sum(counts)
        self.table = cache(self._table)
        self.times_s = cache(self._times_s)

    @cached_property
    def max_stages(self) -> int:
        """Most stages of a pipeline."""
        return min(self.num_layers, sum(self.devices.values()), _MOST_STAGES)

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """(class, degree, limit): so many groups of that degree fit into the nodes of the class.

        A stage of degree g takes ⌊g / degree⌋ of them. Degree 1 counts devices.
        """
        return [
            (kind, degree, sum(count // degree for count in counts))
            for kind, counts in self.counts_of_class.items()
            for degree in sorted({1, *(o.tp_degree for o in self.options if o.node_class == kind)})
        ]

    @cached_property
    def uses(self) -> FloatArray:
        """[options, rows] what a stage takes of each row."""
        return np.array(
            [
                [(o.tp_degree // degree) * (o.node_class == kind) for kind, degree, _ in self.rows]
                for o in self.options
            ],
            dtype=float,
        )

    @cached_property
    def limits(self) -> FloatArray:
        """[rows] limits."""
        return np.array([limit for _, _, limit in self.rows], dtype=float)

    def shape(self, option: Option, num_layers: int, *, first: bool, last: bool) -> StageShape:
        """Return the shape of a stage that recomputes nothing."""
        node = self.node_of_class[option.node_class]
        rank = self.cost.first_rank_of_node[node]
        return StageShape(
            device=self.cost.cluster.nodes[node].device,
            tp_degree=option.tp_degree,
            num_layers=num_layers,
            has_embedding=first,
            has_head=last,
            link=self.cost.link(rank, rank) if option.tp_degree > 1 else None,
        )

    def _times_s(self, option: Option, first: bool, last: bool) -> FloatArray:  # noqa: FBT001
        """Return [2, layers] seconds of forward and backward with nothing recomputed."""
        times: FloatArray = np.zeros((2, self.num_layers + 1))
        for count in range(1, self.num_layers + 1):
            shape = self.shape(option, count, first=first, last=last)
            times[:, count] = self.cost.compute_s(shape, self.workload.microbatch)
        return times

    def _table(
        self,
        option: Option,
        ownership: Ownership,
        first: bool,  # noqa: FBT001
        last: bool,  # noqa: FBT001
    ) -> StageTable:
        """Return the table of an option as a pipeline's first or last stage, or as neither."""
        most = 1 if last else self.max_stages
        in_flight = np.minimum(np.arange(1, most + 1), self.workload.num_microbatches)
        shape = self.shape(option, 1, first=first, last=last)
        levels = self._least_levels(shape, ownership, in_flight)
        variants = [levels]
        sizes, selective = np.arange(self.num_layers + 1), self.cost.saves_selectively(shape)
        if ownership.by_room:
            for level in (sizes, 2 * sizes) if selective else (sizes,):
                variants.append(np.where((levels >= 0) & (levels <= level), level, -1))
        levels = np.array(variants[-1:] if ownership.recomputes_all else variants)
        forward_s, backward_s = self.times_s(option, first, last)
        inner_s = self.times_s(option, False, False)[0]
        whole = np.maximum(levels - selective * sizes, 0)
        some = selective * (np.clip(levels, 0, sizes) - whole)
        cheap = self.cost.selective_share(shape, self.workload.microbatch)
        again_s = inner_s * (whole + cheap * some) / np.maximum(sizes, 1)
        total_s = np.where(levels < 0, np.inf, forward_s + backward_s + again_s)
        room = np.zeros(levels.shape)
        if ownership.by_room:
            room = self._room(shape, ownership, in_flight, whole, some)
            total_s = np.where(room < 0, np.inf, total_s)
        return StageTable(forward_s, total_s, levels, room)

    def _least_levels(
        self, shape: StageShape, ownership: Ownership, in_flight: IntArray
    ) -> IntArray:
        """Return [in flight, layers] least levels; -1 where the layers don't fit."""
        cost, layout, sizes = self.cost, self.cost.layout, np.arange(self.num_layers + 1)
        held, passing = self._by_layers(shape, in_flight)
        owned = held / ownership.num_pipelines if layout.sharded else held
        owned = np.asarray(owned * (not ownership.by_room), dtype=np.float64)
        states = held * (layout.weight_bytes + layout.summed_bytes)
        room = cost.usable_bytes(shape.device) - states - owned * layout.device_kept_bytes
        kept, of_input = cost.layer_bytes(shape)
        spared, saved = (self.tokens * (kept - s) for s in (cost.selective_bytes(shape), of_input))
        least = _levels_that_free(passing - room, sizes, in_flight[:, None], spared, saved)
        if layout.sharded:
            number = np.full(held.shape, float(ownership.num_pipelines))
            pushed = push_buffer_bytes(held, owned, number, layout.pushed_bytes)
            least = np.where(pushed <= room, least, -1)
        least[:, 0] = -1
        found: IntArray = least.astype(np.int64)
        return found

    def _room(
        self,
        shape: StageShape,
        ownership: Ownership,
        in_flight: IntArray,
        whole: IntArray,
        some: IntArray,
    ) -> FloatArray:
        """Return parameters that all ranks of the stages have room to own; below 0 for none."""
        cost, layout, sizes = self.cost, self.cost.layout, np.arange(self.num_layers + 1)
        held, passing = self._by_layers(shape, in_flight)
        kept, of_input = cost.layer_bytes(shape)
        spared, saved = (self.tokens * (kept - s) for s in (cost.selective_bytes(shape), of_input))
        # If no layer is kept, none has freed memory for the layer that is being recomputed.
        last = np.where(whole + some < sizes, 0.0, np.where(some > 0, spared, saved))
        freed = in_flight[:, None] * (some * spared + whole * saved) - last
        room = cost.usable_bytes(shape.device) - held * (layout.weight_bytes + layout.summed_bytes)
        each = room_to_own(layout, held, room, passing - freed, ownership.num_pipelines)
        found: FloatArray = shape.tp_degree * each
        return found

    def _by_layers(self, shape: StageShape, in_flight: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return parameters [layers] and bytes of micro-batches [in flight, layers]."""
        sizes = np.arange(self.num_layers + 1, dtype=np.float64)
        params, passing = [], []
        for count in (1, 2):
            sized = shape._replace(num_layers=count)
            one, two = (
                self.cost.passing_memory(sized, held * self.tokens, self.tokens).total
                for held in (1, 2)
            )
            params.append(self.cost.num_stage_params(sized))
            passing.append(one + (in_flight[:, None] - 1) * (two - one))
        return (
            params[0] + (sizes - 1) * (params[1] - params[0]),
            passing[0] + (sizes - 1) * (passing[1] - passing[0]),
        )


def _levels_that_free(
    over: FloatArray, sizes: IntArray, in_flight: IntArray, spared: float, saved: float
) -> FloatArray:
    """Return the least levels that free `over` bytes, [in flight, layers]; -1 where none does.

    Args:
        over: Bytes that are lacking.
        sizes: [layers] numbers of layers.
        in_flight: [in flight, 1] micro-batches in flight.
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
