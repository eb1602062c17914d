"""A column: one composition of a pipeline, its seconds and what it takes.

With K micro-batches a pipeline ends at about f + K·t: t is the slowest cycle of stages and links
(`steady_round_s`), f all the rest: the first micro-batch's way through the stages, the first pull,
the last push and the optimizer step. Both depend on the number D of pipelines, since each rank
exchanges (D - 1)/D of what it holds, and on what placement keeps on a node.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.planner.balancing import Splits, balance_layers
from lightning_hetero.planner.pace import Pace, finish_s
from lightning_hetero.planner.placement import MappingOrder, Option
from lightning_hetero.planner.stages import Ownership, Stages, StageTable

__all__ = ["FEW_MICROBATCHES", "Column", "ColumnTimes", "Rate"]


FEW_MICROBATCHES = 4
"""Micro-batches of a pipeline up to which each of them is timed."""

_Stages = list[tuple[float, float, float]]
"""(forward, backward, room) of every stage of a pipeline."""


class Column(NamedTuple):
    """The composition of a pipeline: its stages, first to last."""

    options: tuple[Option, ...]
    """Class of nodes and TP degree of each."""
    layers: tuple[int, ...]
    """Layers of each."""
    size: int = 1
    """Sequences of a micro-batch."""
    inside: tuple[bool, ...] | None = None
    """Whether each two stages share a node; None until they are placed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rate(Pace):
    """Seconds and needs of a column."""

    uses: FloatArray
    """[rows] what it takes of the nodes."""
    room: float
    """Parameters that it has room to own; 0 if holders own."""


class ColumnTimes:
    """Times columns for a number of pipelines and an order of placement.

    Args:
        stages: Times and memory of all stages.
        ownership: Pipelines, and who owns.
        order: What placement keeps together on a node.
    """

    def __init__(self, stages: Stages, ownership: Ownership, order: MappingOrder) -> None:
        self.stages, self.ownership, self.order = stages, ownership, order
        self.index = {option: i for i, option in enumerate(stages.options)}
        self.hop_s = cache(self._hop_s)
        self.unit_s = cache(self._unit_s)
        self.exchange = cache(self._exchange)
        self.exchange_rows = cache(self._exchange_rows)
        self.hops_s = cache(self._hops_s)
        self._known: dict[Column, Rate | None] = {}
        self.uses = cache(self._uses)
        self.is_recomputing = cache(self._is_recomputing)
        self.balance = cache(self._balance)
        self.splits = Splits(self)
        share = stages.workload.num_microbatches / ownership.num_pipelines
        self.usual = max(1, round(share))

    def _tables(self, options: Sequence[Option]) -> list[tuple[int, StageTable]]:
        """Return each stage's position from the end, and its table."""
        last, table = len(options) - 1, self.stages.table
        return [
            (last - index, table(option, self.ownership, index == 0, index == last))
            for index, option in enumerate(options)
        ]

    def _is_recomputing(self, column: Column) -> bool:
        """Return whether a stage recomputes a layer."""
        tables = zip(self._tables(column.options), column.layers, strict=True)
        return any(table.levels[0, place, count] != 0 for (place, table), count in tables)

    def _stage_times(self, column: Column) -> _Stages | None:
        """Return (forward, backward, room) of each stage; None if one doesn't fit."""
        found = []
        tables = zip(self._tables(column.options), column.layers, strict=True)
        for (place, table), count in tables:
            if place >= table.total_s.shape[1]:
                return None
            times_s = table.total_s[:, place, count]
            variant = int(np.argmin(times_s))
            total_s = float(times_s[variant])
            if total_s == np.inf:
                return None
            forward_s = float(table.forward_s[count])
            rooms = table.room[:, place, count]
            found.append((forward_s, total_s - forward_s, float(rooms[variant])))
        return found

    def _uses(self, options: tuple[Option, ...]) -> FloatArray:
        """Return [rows] what stages take of the nodes."""
        found: FloatArray = self.stages.uses[[self.index[option] for option in options]].sum(axis=0)
        return found

    def rate(self, column: Column) -> Rate | None:
        """Return the seconds and needs of a column; None if it doesn't fit."""
        return self.rates([column])[0]

    def rates(self, columns: Sequence[Column]) -> list[Rate | None]:
        """Return the seconds and needs of columns; None for one that doesn't fit."""
        new = [column for column in dict.fromkeys(columns) if column not in self._known]
        alike: dict[int, list[tuple[Column, _Stages]]] = {}
        for column in new:
            stages = self._stage_times(column)
            self._known[column] = None
            if stages is not None:
                alike.setdefault(len(stages), []).append((column, stages))
        for pairs in alike.values():
            self._time([column for column, _ in pairs], [stages for _, stages in pairs])
        return [self._known[column] for column in columns]

    def _time(self, columns: Sequence[Column], stages: Sequence[_Stages]) -> None:
        """Time columns with equally many stages."""
        rows = np.array(stages)
        forward_s, backward_s, rooms = rows[..., 0], rows[..., 1], rows[..., 2]
        hops = [self.hops_s(column.options, column.inside) for column in columns]
        there_s, back_s = np.moveaxis(np.array(hops).reshape(len(columns), -1, 2), -1, 0)
        exchange = np.moveaxis(np.array([self._exchanges(column) for column in columns]), -1, 0)
        work_s = forward_s, backward_s
        slope_s, ends_s = finish_s(work_s, (there_s, back_s), exchange, self.usual)
        fill_s = ends_s - slope_s * self.usual
        numbers = range(1, self.usual + 3) if self.usual <= FEW_MICROBATCHES else ()
        early = [finish_s(work_s, (there_s, back_s), exchange, n)[1] for n in numbers]
        for index, column in enumerate(columns):
            self._known[column] = Rate(
                float(slope_s[index]),
                float(fill_s[index]),
                tuple([float(row[index]) for row in early]),
                uses=self.uses(column.options),
                room=float(rooms[index].sum()),
            )

    def _exchanges(self, column: Column) -> list[tuple[float, ...]]:
        """Return what `_exchange` gives for each stage."""
        devices, last = self._devices(column.options), len(column.layers) - 1
        return [
            self.exchange(option, count, devices[option.node_class], (index == 0, index == last))
            for index, (option, count) in enumerate(zip(*column[:2], strict=True))
        ]

    def _devices(self, options: Sequence[Option]) -> Counter[int]:
        """Return a pipeline's devices of each class; none where other pipelines fill its nodes."""
        found: Counter[int] = Counter()
        if self.order is MappingOrder.STAGES_TOGETHER:
            return found
        for kind, degree in options:
            found[kind] += degree
        return found

    def _exchange(
        self, option: Option, count: int, in_pipeline: int, ends: tuple[bool, bool]
    ) -> tuple[float, ...]:
        """Return seconds of a stage's exchange, and the share of them that layers hide.

        They are those of the pull of one unit and of all, of the push of one and of all, and of the
        step.
        """
        stages, layout = self.stages, self.stages.cost.layout
        model, num = stages.cost.model, self.ownership.num_pipelines
        shape = stages.shape(option, count, first=ends[0], last=ends[1])
        step_s = stages.cost.update_s(shape, stages.cost.num_owned_params(shape, num))
        hidden = 1 - 1 / (count + sum(ends))
        if num == 1:
            return 0.0, 0.0, 0.0, 0.0, step_s, hidden
        latency_s, byte_s = self.unit_s(option, in_pipeline)
        sizes = [model.params_per_layer] * count
        sizes += [model.embedding_params] * ends[0] + [model.head_params] * ends[1]
        total = sum(sizes) / option.tp_degree
        edge = (sizes[-1] if ends[0] else sizes[0]) / option.tp_degree
        found = []
        for width in (layout.weight_bytes * layout.sharded, layout.pushed_bytes):
            factor = 1 if layout.sharded else 2
            found.append((latency_s + edge * width * byte_s * factor) * bool(width))
            found.append(len(sizes) * latency_s + total * width * byte_s * factor)
        return *found, step_s, hidden

    def _unit_s(self, option: Option, in_pipeline: int) -> tuple[float, float]:
        """Return seconds of latency, and per byte of a holder's shard, to exchange with others.

        Pipelines whose holders share a node exchange over its own links.
        """
        stages, num = self.stages, self.ownership.num_pipelines
        size = max(stages.counts_of_class[option.node_class])
        inside = size // option.tp_degree
        if self.order is MappingOrder.PIPELINES_TOGETHER:
            # Other pipelines of the mix may be longer, so a node holds its share of all at most.
            share = num * size / sum(stages.devices.values())
            inside = min(size // in_pipeline, max(1, round(share)))
        is_lone = sum(map(bool, stages.counts)) == 1
        inside = num - 1 if is_lone else min(num, max(1, inside)) - 1
        rank = stages.cost.first_rank_of_node[stages.node_of_class[option.node_class]]
        own_rate, own_latency_s = stages.cost.link(rank, rank)
        cluster = stages.cost.cluster
        rate, latency_s = cluster.inter_node_bytes_per_s, cluster.inter_node_latency_s
        outside = num - 1 - inside
        byte_s = (inside / own_rate + outside / rate) / num
        return (latency_s if outside else own_latency_s), byte_s

    def _balance(self, options: tuple[Option, ...]) -> tuple[int, ...] | None:
        """Return the layers of a pipeline's stages by Eq. 4, or None if they don't fit."""
        tables = self._tables(options)
        if any(place >= table.total_s.shape[1] for place, table in tables):
            return None
        rows = [table.total_s[:, place].min(axis=0) for place, table in tables]
        return balance_layers(rows, self.stages.num_layers)

    def split_rows(self, options: tuple[Option, ...]) -> FloatArray:
        """Return [8, stages, layers] seconds of each stage with so many layers.

        They are those of a forward and of a backward, and the six of `_exchange`.
        """
        devices, rows = self._devices(options), []
        for option, (place, table) in zip(options, self._tables(options), strict=True):
            ends = place == len(options) - 1, place == 0
            total_s = table.total_s[:, place].min(axis=0)
            exchange = self.exchange_rows(option, devices[option.node_class], ends)
            rows.append(np.vstack([table.forward_s, total_s - table.forward_s, exchange]))
        return np.stack(rows, axis=1)

    def _exchange_rows(
        self, option: Option, in_pipeline: int, ends: tuple[bool, bool]
    ) -> FloatArray:
        """Return [6, layers] what `_exchange` gives for each number of layers."""
        found = np.zeros((6, self.stages.num_layers + 1))
        for count in range(1, self.stages.num_layers + 1):
            found[:, count] = self.exchange(option, count, in_pipeline, ends)
        return found

    def _hops_s(
        self, options: tuple[Option, ...], placed: tuple[bool, ...] | None
    ) -> list[tuple[float, float]]:
        """Return the seconds of all messages of a pipeline: stages fill one node after another."""
        if placed is None:
            placed = self._inside(options)
        pairs = zip(itertools.pairwise(options), placed, strict=True)
        return [self.hop_s(one, other, inside) for (one, other), inside in pairs]

    def _inside(self, options: tuple[Option, ...]) -> tuple[bool, ...]:
        """Return which neighbouring stages share a node if stages fill one node after another."""
        if self.order is MappingOrder.STAGES_TOGETHER:
            return (False,) * (len(options) - 1)
        found = []
        left = {kind: max(self.stages.counts_of_class[kind]) for kind, _ in options}
        left[options[0].node_class] -= options[0].tp_degree
        for one, (kind, degree) in itertools.pairwise(options):
            found.append(one.node_class == kind and degree <= left[kind])
            if degree > left[kind]:
                left[kind] = max(self.stages.counts_of_class[kind])
            left[kind] -= degree
        return tuple(found)

    def _hop_s(self, one: Option, other: Option, inside: bool) -> tuple[float, float]:  # noqa: FBT001
        """Return seconds of a hidden state between two stages, and of its gradient back."""
        stages, cost = self.stages, self.stages.cost
        first = stages.node_of_class[one.node_class]
        second = stages.node_of_class[other.node_class]
        is_alone = len(stages.counts_of_class[one.node_class]) == 1
        if first == second and not is_alone and not inside:
            alike = (n for n, k in enumerate(stages.class_of_node) if k == one.node_class)
            second = next(n for n in alike if n != first and stages.counts[n])
        offset = one.tp_degree if first == second else 0
        plans = []
        for index, (node, degree) in enumerate(((first, one.tp_degree), (second, other.tp_degree))):
            start = cost.first_rank_of_node[node] + offset * index
            if start + degree > len(cost.node_of_rank):
                start = cost.first_rank_of_node[node]
            plans.append(
                StagePlan(ranks=tuple(range(start, start + degree)), layers=range(index, index + 1))
            )
        tokens = stages.tokens
        one_stage, next_stage = plans
        return (
            cost.activation_s(one_stage, next_stage, tokens),
            cost.activation_s(next_stage, one_stage, tokens),
        )

    def first_s(self, option: Option) -> FloatArray:
        """Return [layers] seconds of exchange and step that end a pipeline, for its first stage."""
        found: FloatArray = np.zeros(self.stages.num_layers + 1)
        times_s = self.stages.times_s(option, True, False)
        for count in range(1, self.stages.num_layers + 1):
            pull, _, push, pushes, step, hidden = self.exchange(
                option, count, option.tp_degree, (True, False)
            )
            hidden_s = times_s[1, count] * hidden
            found[count] = pull + max(push, pushes - hidden_s) + step
        return found
