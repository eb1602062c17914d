"""A column: one composition of a pipeline, its seconds, and what it needs.

With K micro-batches a pipeline ends at about f + K·t. The bottleneck t is the slowest cycle of
stages and links (`steady_round_s`). The fill f is all the rest: the first micro-batch's way through
the stages, the first pull, the last push and the optimizer step. Both depend on the number D of
pipelines, since each rank exchanges (D - 1)/D of what it holds, and on what is placed on one node.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.planner.pace import Pace, balance_layers, finish_s
from lightning_hetero.planner.placement import MappingOrder, Option
from lightning_hetero.planner.stages import ENDS, Ownership, Stages

FEW_MICROBATCHES = 4
"""Number of micro-batches of a pipeline up to which each of them is timed."""


class Column(NamedTuple):
    """The composition of a pipeline: its stages, first to last."""

    options: tuple[Option, ...]
    """Class of nodes and TP degree of each."""
    layers: tuple[int, ...]
    """Layers of each; none where they are still to be chosen."""
    size: int = 1
    """Sequences of a micro-batch."""
    inside: tuple[bool, ...] | None = None
    """For each two consecutive stages whether they share a node; None until they are placed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rate(Pace):
    """The seconds and needs of a column."""

    uses: FloatArray
    """[rows] how much of each row of the nodes it uses."""
    room: float
    """Parameters that it has room to own; 0 if holders own."""
    is_recomputing: bool
    """Whether a stage recomputes a layer."""


class _Places(NamedTuple):
    """What the seconds of stages depend on, apart from their layers; arrays of one shape."""

    end: IntArray
    """Indices of `ENDS`."""
    option: IntArray
    """Indices of options."""
    position: IntArray
    """Number of stages that follow."""
    latency_s: FloatArray
    """Latency of an exchange with other pipelines."""
    byte_s: FloatArray
    """Seconds in which a byte of a holder's shard is exchanged."""


class Pool(NamedTuple):
    """Columns and their rates, as arrays with one entry for each column."""

    columns: list[Column]
    slope_s: FloatArray
    """Seconds of a sequence."""
    fill_s: FloatArray
    uses: FloatArray
    """[columns, rows]"""
    room: FloatArray

    @classmethod
    def of(cls, rates: Mapping[Column, Rate]) -> Self:
        """Return some columns as arrays."""
        rows = [
            (rate.slope_s / column.size, rate.fill_s, rate.room) for column, rate in rates.items()
        ]
        slope_s, fill_s, room = np.array(rows).T
        return cls(list(rates), slope_s, fill_s, np.stack([r.uses for r in rates.values()]), room)

    def value(self, time_s: float) -> FloatArray:
        """Return the sequences that pipelines finish in a time."""
        found: FloatArray = (time_s - self.fill_s) / self.slope_s
        return found

    def finish_s(self, x: FloatArray | IntArray, total: int) -> float:
        """Return when pipelines, x of each column, have finished all sequences; 0 for none."""
        per_s = float(x @ (1 / self.slope_s))
        return float((total + x @ (self.fill_s / self.slope_s)) / per_s) if per_s > 0 else 0.0


class ColumnTimes:
    """Times columns for a number of pipelines and an order of placement.

    Args:
        stages: Times and memory of all stages.
        ownership: Pipelines, and who owns.
        order: What placement keeps together on a node.
    """

    def __init__(self, stages: Stages, ownership: Ownership, order: MappingOrder) -> None:
        self.stages, self.ownership, self.order = stages, ownership, order
        self.table = stages.table(ownership)
        self.hop_s = cache(self._hop_s)
        self.hops_s = cache(self._hops_s)
        self.uses = cache(self._uses)
        self.balance = cache(self._balance)
        self._unit_s = cache(self._find_unit_s)
        self._places = cache(self._find_places)
        self._known: dict[Column, Rate | None] = {}
        self.splits: dict[tuple[Column, int], tuple[int, ...] | None] = {}
        """Layers that were chosen for columns and micro-batches, see `splitting`."""
        self.num_together = {
            MappingOrder.PIPELINES_TOGETHER: 1,
            MappingOrder.STAGES_TOGETHER: ownership.num_pipelines,
            MappingOrder.APART: max(stages.counts) + 1,
        }[order]
        """Number of pipelines whose equal stages are placed one after another; for APART more than
        a node has room for."""
        share = stages.workload.num_microbatches / ownership.num_pipelines
        self.usual = max(1, round(share))

    def rate(self, column: Column) -> Rate | None:
        """Return the seconds and needs of a column; None if it doesn't fit."""
        return self.rates([column])[0]

    def rates(self, columns: Sequence[Column]) -> list[Rate | None]:
        """Return the seconds and needs of columns; None for one that doesn't fit."""
        alike: dict[int, list[Column]] = {}
        for column in dict.fromkeys(columns):
            if column not in self._known:
                self._known[column] = None
                alike.setdefault(len(column.layers), []).append(column)
        for number, group in alike.items():
            if number <= self.stages.max_stages:
                self._rate(group)
        return [self._known[column] for column in columns]

    def _rate(self, columns: Sequence[Column]) -> None:
        """Rate columns that have the same number of stages."""
        layers = np.array([column.layers for column in columns])
        places, hops_s = self._together(columns)
        index = *places[:3], layers
        fits = np.isfinite(self.table.total_s[index]).all(axis=1)
        slope_s, ends_s = self._finish_s(places, hops_s, layers, self.usual)
        fill_s = ends_s - slope_s * self.usual
        numbers = range(1, self.usual + 3) if self.usual <= FEW_MICROBATCHES else ()
        early = [self._finish_s(places, hops_s, layers, number)[1] for number in numbers]
        room = self.table.room[index].sum(axis=1)
        is_recomputing = (self.table.levels[index] != 0).any(axis=1)
        for i in np.flatnonzero(fits).tolist():
            self._known[columns[i]] = Rate(
                float(slope_s[i]),
                float(fill_s[i]),
                tuple([float(row[i]) for row in early]),
                uses=self.uses(columns[i].options),
                room=float(room[i]),
                is_recomputing=bool(is_recomputing[i]),
            )

    def ends_s(
        self, columns: Sequence[Column], splits: Sequence[IntArray], count: int
    ) -> list[FloatArray]:
        """Return when columns with the same number of stages end; infinite if layers don't fit.

        Args:
            columns: Columns, whose own layers are ignored.
            splits: [splits, stages] layers that are tried for each.
            count: Micro-batches of every pipeline.
        """
        numbers = [len(rows) for rows in splits]
        places, hops_s = self._together(columns)
        repeated = _Places._make(np.repeat(item, numbers, axis=0) for item in places)
        layers = np.concatenate(splits)
        _, found = self._finish_s(repeated, np.repeat(hops_s, numbers, axis=1), layers, count)
        found[~np.isfinite(self.table.total_s[(*repeated[:3], layers)]).all(axis=1)] = np.inf
        return np.split(found, np.cumsum(numbers)[:-1])

    def _together(self, columns: Sequence[Column]) -> tuple[_Places, FloatArray]:
        """Return the places of columns' stages, and [2, columns, stages - 1] messages' seconds."""
        rows = zip(*(self._places(column.options) for column in columns), strict=True)
        hops_s = [self.hops_s(column.options, column.inside) for column in columns]
        return _Places(*map(np.stack, rows)), np.stack(hops_s, axis=1)

    def _finish_s(
        self, places: _Places, hops_s: FloatArray, layers: IntArray, count: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return [columns] slopes, and when `count` micro-batches have ended."""
        index = places.end, places.option, layers
        forward_s = self.stages.work_s[(0, *index)]
        total_s = self.table.total_s[(*places[:3], layers)]
        backward_s = np.where(np.isfinite(total_s), total_s - forward_s, 0.0)
        exchange = self.exchange_s(places, layers)
        return finish_s((forward_s, backward_s), (hops_s[0], hops_s[1]), exchange, count)

    def exchange_s(self, places: _Places, layers: IntArray) -> tuple[FloatArray, ...]:
        """Return seconds of stages' exchange and step, and the share that layers hide.

        They are those of the pull of one unit and of all, of the push of one and of all, and of the
        step.
        """
        cost, num = self.stages.cost, self.ownership.num_pipelines
        model, layout = cost.model, cost.layout
        degrees, step_s = self.stages.degrees[places.option], self.stages.step_s[places.option]
        is_first, is_last = places.end >> 1, places.end & 1
        ends = is_first * model.embedding_params + is_last * model.head_params
        owned = layers * model.params_per_layer + ends - is_first * is_last * model.tied_params
        step_s = step_s * owned / degrees / (num if layout.sharded else 1)
        units = layers + is_first + is_last
        hidden = 1 - 1 / np.maximum(units, 1)
        if num == 1:
            nothing = np.zeros(step_s.shape)
            return nothing, nothing, nothing, nothing, step_s, hidden
        # The unit at the end of a pull and at the beginning of a push.
        edge = np.where(is_last, model.head_params, model.embedding_params)
        edge = np.where(is_first, edge, model.params_per_layer)
        found = []
        for width in (layout.weight_bytes * layout.sharded, layout.pushed_bytes):
            param_s = places.byte_s / degrees * width * (1 if layout.sharded else 2)
            latency_s = places.latency_s * bool(width)
            found.append(latency_s + edge * param_s)
            found += [latency_s * units + (layers * model.params_per_layer + ends) * param_s]
        return *found, step_s, hidden

    def _find_places(self, options: tuple[Option, ...]) -> _Places:
        devices: Counter[int] = Counter()
        if self.order is MappingOrder.PIPELINES_TOGETHER:
            for kind, degree in options:
                devices[kind] += degree
        last = len(options) - 1
        units = [self._unit_s(option, devices[option.node_class]) for option in options]
        latency_s, byte_s = np.array(units).T
        return _Places(
            end=np.array([ENDS.index((i == 0, i == last)) for i in range(len(options))]),
            option=np.array([self.stages.index[option] for option in options]),
            position=np.arange(last, -1, -1),
            latency_s=latency_s,
            byte_s=byte_s,
        )

    def _uses(self, options: tuple[Option, ...]) -> FloatArray:
        """Return [rows] how much of each row of the nodes stages use."""
        found: FloatArray = self.stages.uses[self._places(options).option].sum(axis=0)
        return found

    def _find_unit_s(self, option: Option, in_pipeline: int) -> tuple[float, float]:
        """Return seconds of latency, and per byte of a holder's shard, to exchange with others.

        Pipelines whose holders share a node exchange over its own links.

        Args:
            option: Of a stage.
            in_pipeline: Devices of its class in its pipeline, which fill nodes one after another;
                0 where the same stages of all pipelines do.
        """
        stages, num = self.stages, self.ownership.num_pipelines
        size = max(stages.counts_of_class[option.node_class])
        inside = size // option.tp_degree
        if in_pipeline:
            # Other pipelines of the mix may be longer, so a node has at most its share of all.
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
        if len(options) > self.stages.max_stages:
            return None
        return balance_layers(self.stage_s(options), self.stages.num_layers)

    def stage_s(self, options: tuple[Option, ...]) -> FloatArray:
        """Return [stages, layers] seconds of a micro-batch; infinite where layers don't fit."""
        found: FloatArray = self.table.total_s[self._places(options)[:3]]
        return found

    def _hops_s(self, options: tuple[Option, ...], placed: tuple[bool, ...] | None) -> FloatArray:
        """Return [2, stages - 1] seconds of all messages of a pipeline, forward and back.

        Stages that aren't placed yet are assumed to fill one node after another.
        """
        if placed is None:
            placed = self._inside(options)
        pairs = zip(itertools.pairwise(options), placed, strict=True)
        rows = [self.hop_s(one, other, inside) for (one, other), inside in pairs]
        return np.array(rows).reshape(-1, 2).T

    def _inside(self, options: tuple[Option, ...]) -> tuple[bool, ...]:
        """Return which neighbouring stages share a node if stages fill one node after another.

        In the order STAGES_TOGETHER, each stage does so together with those of equal pipelines.
        """
        sizes = {kind: max(self.stages.counts_of_class[kind]) for kind, _ in options}
        left, before, found = dict(sizes), -1, []
        for kind, degree in options:
            needed = degree * self.num_together
            fits = needed <= left[kind]
            found.append(fits and kind == before)
            left[kind] = left[kind] - needed if fits else -needed % sizes[kind]
            before = kind
        return tuple(found[1:])

    def _hop_s(self, one: Option, other: Option, inside: bool) -> tuple[float, float]:  # noqa: FBT001
        """Return seconds of a hidden state between two stages, and of its gradient back."""
        stages, cost = self.stages, self.stages.cost
        first, second = stages.nodes_of(one)[0], stages.nodes_of(other)[0]
        if inside:
            both = Option(one.node_class, one.tp_degree + other.tp_degree)
            first, *_ = stages.nodes_of(both) or stages.nodes_of(max(one, other))
            second = first
        elif first == second:
            second = next((n for n in stages.nodes_of(other) if n != first), first)
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
        sizes = np.arange(self.stages.num_layers + 1)
        first = self._places((option,))._replace(end=np.array([ENDS.index((True, False))]))
        pull, _, push, pushes, step, hidden = self.exchange_s(first, sizes)
        backward_s = self.stages.work_s[1, first.end[0], first.option[0]]
        found: FloatArray = pull + np.maximum(push, pushes - backward_s * hidden) + step
        return found
