"""Times and memory of every stage that a pipeline may have, for all numbers of layers at once.

A *stage option* is a class of nodes and a TP degree. Arrays are [ends, options, in flight, layers]:
which end of its pipeline a stage is (`ENDS`), its option, the number of micro-batches that it holds
at once (minus one), and its number of layers. Memory is linear in the last two (`CostModel`), so
the values for one and two of each give all others.

A stage uses the least recomputation that fits. Levels 1 to n recompute that many layers
selectively, which takes few seconds per byte, if that saves memory; each further level recomputes
one more of them as a whole.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.placement import Option, classify_nodes
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape, StateLayout
from lightning_hetero.simulator.memory import push_buffer_bytes

_MOST_STAGES = 64
"""Largest number of stages of a pipeline: longer ones lose more time to bubbles than their memory
saves."""
_SUM_BYTES = 4
"""Bytes of an fp32 gradient sum on its way to the host."""
_NEARLY = 1 - 1e-6
"""Share of a rank's room that it may own, because shares are rounded."""
ENDS = ((False, False), (False, True), (True, False), (True, True))
"""Whether a stage is the first and the last one of its pipeline, by its index in arrays."""


class Ownership(NamedTuple):
    """The number of pipelines, and who owns: both decide the bytes of states on a rank.

    Unlike `exchange.slices.Ownership` this is the planner's choice between two rules.
    """

    num_pipelines: int
    by_room: bool = False
    """Whether ranks own as much as they have room for; otherwise holders own equal parts."""


class StageTable(NamedTuple):
    """All stages under one kind of ownership, with the least recomputation that fits."""

    total_s: FloatArray
    """Seconds of forward and backward with recomputation; infinite where the layers don't fit."""
    levels: IntArray
    """Levels of recomputation; -1 where the layers don't fit."""
    room: FloatArray
    """Number of parameters that all its ranks together have room to own; zeros if holders own."""


class StageArrays(NamedTuple):
    """Seconds and bytes of some stages, as arrays of one shape; bytes are those of one rank."""

    layers: IntArray
    in_flight: IntArray
    """Micro-batches that are held at once."""
    work_s: FloatArray
    """Seconds of forward and backward if nothing is recomputed."""
    layer_s: FloatArray
    """Seconds in which a layer is recomputed as a whole."""
    selective_s: FloatArray
    """Seconds in which a layer is recomputed selectively."""
    held: FloatArray
    """Parameters that are computed with."""
    owned: FloatArray
    """Parameters that would be owned in a lone pipeline."""
    passing: FloatArray
    """Bytes of the activations in flight if nothing is recomputed, and of frozen weights."""
    frozen: FloatArray
    """Bytes of frozen weights alone."""
    room: FloatArray
    """Bytes that weights and their gradients leave on a device."""
    spared: FloatArray
    """Bytes of a micro-batch that a layer frees if it is recomputed selectively; 0 if that frees
    none."""
    saved: FloatArray
    """Bytes that it frees if it is recomputed as a whole."""

    def at(self, index: Any) -> "StageArrays":
        """Return those of some stages, by an index that NumPy takes."""
        return StageArrays(*(item[index] for item in self))

    @property
    def most(self) -> IntArray:
        """The highest levels of recomputation."""
        found: IntArray = self.layers * (1 + (self.spared > 0))
        return found

    def recomputed(self, levels: IntArray) -> tuple[IntArray, IntArray]:
        """Return how many layers are recomputed as a whole, and how many selectively."""
        is_selective = self.spared > 0
        whole = np.maximum(levels - is_selective * self.layers, 0)
        return whole, is_selective * (np.clip(levels, 0, self.layers) - whole)

    def seconds_at(self, levels: IntArray) -> FloatArray:
        """Return the seconds of forward and backward at levels of recomputation."""
        whole, some = self.recomputed(levels)
        found: FloatArray = self.work_s + whole * self.layer_s + some * self.selective_s
        return found

    def passing_at(self, levels: IntArray) -> FloatArray:
        """Return the bytes of micro-batches and frozen weights at levels of recomputation."""
        whole, some = self.recomputed(levels)
        # If no layer is kept, none has freed memory for the layer that is being recomputed.
        one = np.where(some > 0, self.spared, self.saved) * (whole + some >= self.layers)
        freed = self.in_flight * (some * self.spared + whole * self.saved)
        found: FloatArray = self.passing - freed + one
        return found

    def least_levels(self, room: FloatArray) -> IntArray:
        """Return the least levels at which micro-batches fit into bytes; the highest must fit."""
        low, high = np.zeros_like(self.layers), self.most
        while (low < high).any():
            middle = (low + high) // 2
            fits = self.passing_at(middle) <= room
            low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
        return low

    def room_to_own(self, levels: IntArray, layout: StateLayout, num_pipelines: int) -> FloatArray:
        """Return the parameters that a rank has room to own; below 0 where it has none.

        Owned states must fit beside micro-batches, and beside the buffers of a push, which grow
        with them (`push_buffer_bytes`).
        """
        own, gradient, room = layout.kept_bytes, layout.pushed_bytes, self.room - self.frozen
        # Buffers of a push are two linear pieces: up to the holder's own share, and beyond.
        within = (room - self.held * gradient) / (own + (num_pipelines - 2) * gradient)
        fixed = (1 - 2 / num_pipelines) * self.held * gradient
        beyond = (room - fixed) / (own + num_pipelines * gradient)
        beside_buffers = np.where(within > self.held / num_pipelines, beyond, within)
        beside_passing = (self.room - self.passing_at(levels)) / own
        found: FloatArray = np.minimum(beside_passing, beside_buffers) * _NEARLY
        return found


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
        self.index = {option: index for index, option in enumerate(self.options)}
        self.devices = Counter({kind: sum(row) for kind, row in self.counts_of_class.items()})
        self.table = cache(self._table)
        self.times_s = cache(self._times_s)

    @cached_property
    def max_stages(self) -> int:
        """Most stages of a pipeline."""
        return min(self.num_layers, sum(self.devices.values()), _MOST_STAGES)

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """(class, degree, limit): at most `limit` groups of that degree fit into the class's nodes.

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

    def nodes_of(self, option: Option) -> list[int]:
        """Return the nodes that have the devices of a stage."""
        kind, degree = option
        every = zip(self.class_of_node, self.counts, strict=True)
        return [node for node, (of, count) in enumerate(every) if of == kind and count >= degree]

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

    @cached_property
    def degrees(self) -> IntArray:
        """[options] TP degrees."""
        return np.array([option.tp_degree for option in self.options])

    @cached_property
    def step_s(self) -> FloatArray:
        """[options] seconds of the optimizer's step for each parameter that a rank owns."""
        shapes = [self.shape(option, 1, first=False, last=False) for option in self.options]
        return np.array([self.cost.update_s(shape, 1.0) for shape in shapes])

    @cached_property
    def work_s(self) -> FloatArray:
        """[2, ends, options, layers] seconds of forward and backward, nothing recomputed."""
        every = [[self.times_s(option, *ends) for option in self.options] for ends in ENDS]
        return np.moveaxis(np.array(every), 2, 0)

    @cached_property
    def arrays(self) -> StageArrays:
        """Seconds and bytes of all stages."""
        cost, tokens, sizes = self.cost, self.tokens, np.arange(self.num_layers + 1)
        in_flight = np.arange(1, self.max_stages + 1)[:, None]
        in_flight = np.minimum(in_flight, self.workload.num_microbatches)

        def by_layers(shape: StageShape) -> list[float]:
            """Return what is linear in layers: for passing bytes, of one and of two in flight."""
            one, two = (cost.passing_memory(shape, n * tokens, tokens) for n in (1, 2))
            own = cost.num_stage_params(shape), cost.num_owned_params(shape, 1)
            return [*own, one.total, two.total, one.frozen]

        def of_layer(shape: StageShape) -> list[float]:
            kept, of_input = cost.layer_bytes(shape)
            spared, saved = kept - cost.selective_bytes(shape), kept - of_input
            share = cost.selective_share(shape, self.workload.microbatch) if spared > 0 else 0.0
            return [share, cost.usable_bytes(shape.device), spared * tokens, saved * tokens]

        def measure(function: Callable[[StageShape], list[float]], count: int) -> FloatArray:
            """Return [values, ends, options, 1, 1] of stages with `count` layers."""
            rows = [
                [function(self.shape(o, count, first=first, last=last)) for o in self.options]
                for first, last in ENDS
            ]
            return np.moveaxis(np.array(rows), 2, 0)[..., None, None]

        one, two = measure(by_layers, 1), measure(by_layers, 2)
        held, owned, passing, passing_two, frozen = one + (sizes - 1) * (two - one)
        share, usable, spared, saved = measure(of_layer, 1)
        work_s = self.work_s[..., None, :]
        layer_s = work_s[0, :1] / np.maximum(sizes, 1)
        every = StageArrays(
            layers=sizes,
            in_flight=in_flight,
            work_s=work_s.sum(axis=0),
            layer_s=layer_s,
            selective_s=share * layer_s,
            held=held,
            owned=owned,
            passing=passing + (in_flight - 1) * (passing_two - passing),
            frozen=frozen,
            room=usable - held * (cost.layout.weight_bytes + cost.layout.summed_bytes),
            spared=spared,
            saved=saved,
        )
        return StageArrays(*np.broadcast_arrays(*every))

    def idle_room(self, node: int, num_pipelines: int) -> float:
        """Return the parameters that a device of a node has room to own if it has no layers."""
        layout = self.cost.layout
        per_param = layout.kept_bytes + num_pipelines * layout.pushed_bytes
        return self.cost.usable_bytes(self.cost.cluster.nodes[node].device) / per_param * _NEARLY

    def _table(self, ownership: Ownership) -> StageTable:
        arrays, layout, number = self.arrays, self.cost.layout, ownership.num_pipelines
        owned = arrays.owned / (number if layout.sharded else 1) * (not ownership.by_room)
        own_room = arrays.room - owned * layout.device_kept_bytes
        levels = np.where(arrays.passing_at(arrays.most) > own_room, -1, 0)
        levels[1::2, :, 1:] = -1  # A last stage holds one micro-batch.
        is_over = (levels == 0) & (arrays.passing > own_room)
        levels[is_over] = arrays.at(is_over).least_levels(own_room[is_over])
        if layout.sharded:
            buffers = push_buffer_bytes(
                arrays.held, owned, np.array(float(number)), layout.pushed_bytes
            )
            if not layout.device_kept_bytes:
                # The sums of one layer at a time, on their way to the host.
                buffers += _SUM_BYTES * np.minimum(owned, self.cost.model.params_per_layer)
            levels[buffers + arrays.frozen > own_room] = -1
        room = np.zeros(levels.shape)
        if ownership.by_room:
            room = self.degrees[:, None, None] * arrays.room_to_own(levels, layout, number)
            levels[room < 0] = -1
        levels[..., 0] = -1
        return StageTable(np.where(levels < 0, np.inf, arrays.seconds_at(levels)), levels, room)
