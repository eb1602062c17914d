"""Time the pull and the push of one unit: a layer, the embedding or the head.

Segments are the layers between two neighbouring cuts, where a cut is any boundary between stages of
any pipeline; so all layers of a segment have the same holders. Let f_q be the share of a unit that
rank q owns, and S the shard of it that a rank holds. In a push the rank sends S·f_q to every owner
q outside of its stage, and receives its own share from every other pipeline; a pull sends the same
in the other direction. A unit takes as long as the slower of both. By default the D pipelines own
equal parts of what they hold: f is 1/D for each of the D ranks of a shard group, and both are
equal. With owner shares, f comes from `spread_ownership`; in addition a rank receives the gradients
of units that it owns but doesn't hold (`foreign_s`).

The seconds are those of what `runtime.exchange` calls. If all holders of a segment have one TP
degree, those that hold the same part are a shard group (`exchange.transfers.ShardGroup`):

- A pull is a ring all-gather of the shard group, and another one of norms in each stage. That needs
  three things: holders own about equal parts, they use collectives (`are_collective`: AUTO on NCCL,
  or for many holders), and they may gather into their weights (`StateLayout.pulls_into_views`).
- A push of equal parts may be summed on each node first (BY_NODE), or be a ring reduce-scatter
  (REDUCE_SCATTER).

All else is pairwise: messages, or an all-to-all, which NCCL makes of messages. Pieces are assumed
to be equal; the runtime pads rows or, if that added more than an eighth, uses an all-to-all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Self

import numpy as np

from lightning_hetero.core.arrays import BoolArray, FloatArray
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.exchange.transfers import MOST_PADDING, ExchangeKind, are_collective
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.links import Peers, push_by_node_s, rings_inside_s, rings_s

_SUM_BYTES = 4
"""Bytes of a gradient's value in a sum."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers with the same holders; embedding and head are segments of one unit."""

    is_layers: bool
    """Whether the units are layers."""
    num_units: int
    """Number of units."""
    params_per_unit: int
    """Parameters of one unit."""
    stages: tuple[int, ...]
    """For each pipeline, the index of the stage that holds them."""


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Pipelines with the same layers and degrees, on equivalent nodes."""

    layers: tuple[int, ...]
    """Layers of each stage."""
    tp_degrees: tuple[int, ...]
    """Ranks of each stage."""
    ranks: tuple[tuple[int, ...], ...]
    """[pipeline][stage] first rank."""

    @classmethod
    def of(cls, pipelines: Sequence[PipelinePlan]) -> Self:
        """Return pipelines of a plan that have the same layers and degrees."""
        first = pipelines[0].stages
        return cls(
            layers=tuple([len(stage.layers) for stage in first]),
            tp_degrees=tuple([stage.tp_degree for stage in first]),
            ranks=tuple([tuple([stage.ranks[0] for stage in p.stages]) for p in pipelines]),
        )


def cut_segments(layers: Sequence[Sequence[int]], model: ModelSpec) -> list[Segment]:
    """Return all segments in the order in which their gradients are complete: last layers first.

    Args:
        layers: Layers of each stage, as [pipeline][stage].
        model: The model, for the parameters of layers, embedding and head.
    """
    edges = [[0, *accumulate(row)] for row in layers]
    stops = sorted({stop for row in edges for stop in row}, reverse=True)
    position = [len(row) - 1 for row in layers]
    segments = [Segment(False, 1, model.head_params, tuple(position))]
    for stop, start in pairwise(stops):
        for index, row in enumerate(edges):
            if row[position[index]] >= stop:
                position[index] -= 1
        segments.append(Segment(True, stop - start, model.params_per_layer, tuple(position)))
    segments.append(Segment(False, 1, model.embedding_params, (0,) * len(layers)))
    return segments


class UnitTimes:
    """Seconds to pull and push a unit if each of its holders owns an equal part, or all of it.

    Args:
        holders: The pipelines; those that are put together count as one, with the slowest links
            among them.
        segments: The segments that they make.
        cost: Times and bytes.
    """

    def __init__(
        self, holders: Sequence[Holders], segments: Sequence[Segment], cost: CostModel
    ) -> None:
        self.segments, self.cost, self._holders = segments, cost, holders
        stages = list(zip(*[segment.stages for segment in segments], strict=True))
        held, node_of = list(zip(holders, stages, strict=True)), cost.node_of_rank
        self.nodes = np.array(
            [[node_of[row[s]] for s in every] for entry, every in held for row in entry.ranks]
        )
        """[D, G] node of the first rank of each of D pipelines' stages, for G segments."""
        self.degrees = np.array([[entry.tp_degrees[s] for s in every] for entry, every in held])
        """[holders, G] ranks of the stage."""
        self.params = np.array([float(segment.params_per_unit) for segment in segments])

    @cached_property
    def have_shard_groups(self) -> BoolArray:
        """[G] whether all stages of the segment have one degree."""
        found: BoolArray = (self.degrees == self.degrees[0]).all(axis=0)
        return found

    @cached_property
    def are_gathered(self) -> BoolArray:
        """[G] whether the segment is pulled by an all-gather if its parts are equal."""
        layout, backend = self.cost.layout, self.cost.cluster.backend
        is_able = are_collective(layout.exchange, backend, len(self.nodes))
        return self.have_shard_groups & (is_able and not layout.pulls_into_views)

    def pull_and_push_s(self) -> tuple[FloatArray, FloatArray]:
        """Return [holders, G] seconds of a pull and of a push."""
        if len(self.nodes) == 1:
            return np.zeros(self.degrees.shape), np.zeros(self.degrees.shape)
        return self._equal_s() if self.cost.layout.sharded else self._replicated_s()

    def _replicated_s(self) -> tuple[FloatArray, FloatArray]:
        """No pull; a push is one ring all-reduce for each part of a stage, at the finest cut."""
        num_bytes = self.params / self.degrees.min(axis=0) * self.cost.layout.pushed_bytes
        push = []
        for segment, size in zip(self.segments, num_bytes.tolist(), strict=True):
            held = zip(self._holders, segment.stages, strict=True)
            ranks = [row[stage] for entry, stage in held for row in entry.ranks]
            push.append(self.cost.all_reduce_s(ranks, size))
        return np.zeros(self.degrees.shape), np.tile(push, (len(self.degrees), 1))

    def _equal_s(self) -> tuple[FloatArray, FloatArray]:
        cost, layout, nodes = self.cost, self.cost.layout, self.nodes
        counts = [len(entry.ranks) for entry in self._holders]
        firsts = [0, *accumulate(counts[:-1])]
        shards = self.params / self.degrees
        pieces = np.repeat(shards, counts, axis=0) / len(nodes)
        peers = Peers.of_holders(cost, nodes)
        pull, push = (
            np.maximum.reduceat(peers.latency_s + peers.carry_s(width * pieces), firsts, axis=0)
            for width in (layout.weight_bytes, layout.pushed_bytes)
        )
        if self.are_gathered.any():
            gathered = rings_s(cost, nodes, layout.weight_bytes * shards[0])
            if self.degrees[0].max() > 1:
                inside = np.maximum.reduceat(self._stage_gathers_s(), firsts, axis=0)
                gathered = gathered + inside
            pull = np.where(self.are_gathered, gathered, pull)
        if layout.exchange is ExchangeKind.REDUCE_SCATTER:
            rings = rings_s(cost, nodes, layout.pushed_bytes * shards[0])
            push = np.where(self.have_shard_groups, rings, push)
        if layout.exchange is ExchangeKind.BY_NODE:
            width = _SUM_BYTES / layout.gradient_bytes
            for index in np.flatnonzero(self.have_shard_groups):
                ranks = [cost.first_rank_of_node[node] for node in nodes[:, index]]
                held = layout.pushed_bytes * float(shards[0, index])
                push[:, index] = push_by_node_s(cost, ranks, held, width=width)
        return pull, push

    def _stage_gathers_s(self) -> FloatArray:
        """Return [D, G] seconds in which stages gather what all of their ranks hold, such as norms.

        Ranks with the same part of a stage exchange norms, too, so each gets only a part of them.
        The ranks of a stage are assumed to be on one node.
        """
        in_layer, outside = self.cost.model.whole_params_per_layer, self.cost.model.norm_params
        whole = [in_layer if segment.is_layers else outside for segment in self.segments]
        num_bytes = self.cost.layout.weight_bytes * np.array(whole, float)
        seconds = rings_inside_s(self.cost, self.nodes, self.degrees[0], num_bytes)
        seconds[:, -1] = 0.0  # Embeddings have no norms.
        return seconds


class OwnedTimes:
    """Seconds to pull and push a unit if ranks own what they have room for.

    Args:
        plan: The plan.
        equal: The times if holders owned equal parts, of every pipeline by itself.
        owned: For each segment the share of it that each rank owns, above 0.
    """

    def __init__(
        self, plan: ParallelPlan, equal: UnitTimes, owned: Sequence[Mapping[int, float]]
    ) -> None:
        self._plan, self._equal, self._owned, self._cost = plan, equal, owned, equal.cost
        cost, shape = equal.cost, (len(owned), len(equal.cost.cluster.nodes))
        node_of = np.array(cost.node_of_rank)
        self._shares, self._owners, self._holders = np.zeros((3, *shape))
        """[G, nodes] what ranks of each node own, how many do, and how many pipelines hold."""
        most = max(len(stage.ranks) for _, _, stage in plan.iter_stages())
        self._own = np.zeros((*equal.nodes.shape, most))
        """[D, G, most] what each rank of a stage owns."""
        self._own_nodes = np.zeros(self._own.shape, np.int64)
        self._held: list[set[int]] = []
        """Ranks that hold each segment."""
        for index, (segment, shares) in enumerate(zip(equal.segments, owned, strict=True)):
            np.add.at(self._shares[index], node_of[[*shares]], [*shares.values()])
            np.add.at(self._owners[index], node_of[[*shares]], 1.0)
            np.add.at(self._holders[index], equal.nodes[:, index], 1.0)
            self._held.append(set())
            for p, stage in enumerate(segment.stages):
                ranks = plan.pipelines[p].stages[stage].ranks
                self._held[-1].update(ranks)
                self._own[p, index, : len(ranks)] = [shares.get(rank, 0.0) for rank in ranks]
                self._own_nodes[p, index, : len(ranks)] = node_of[[*ranks]]
        self._are_alike = np.array(
            [
                shares.keys() <= held and max(shares.values()) * len(held) <= 1 + MOST_PADDING
                for shares, held in zip(owned, self._held, strict=True)
            ]
        )
        """[G] whether a unit's holders own it, in parts that are about equal."""

    def pull_and_push_s(self) -> tuple[FloatArray, FloatArray]:
        """Return [pipeline, G] seconds of a pull and of a push."""
        layout, (pull, _) = self._cost.layout, self._equal.pull_and_push_s()
        owned_pull, push = map(self._between_s, (layout.weight_bytes, layout.pushed_bytes))
        return np.where(self._are_alike & self._equal.are_gathered, pull, owned_pull), push

    def foreign_s(self) -> tuple[list[list[float]], float]:
        """Return seconds in which stages, and idle ranks, receive what they own but don't hold."""
        found = [[0.0] * pipeline.num_stages for pipeline in self._plan.pipelines]
        seconds: dict[int, float] = {}
        num_units = [segment.num_units for segment in self._equal.segments]
        num_bytes = self._equal.params * num_units * self._cost.layout.pushed_bytes
        for index, (shares, held) in enumerate(zip(self._owned, self._held, strict=True)):
            ranks = [rank for rank in shares if rank not in held]
            nodes = np.array([[self._cost.node_of_rank[rank]] for rank in ranks], np.int64)
            if ranks:
                holders = self._holders[index : index + 1]
                peers = Peers(self._cost, nodes, holders, np.zeros((*nodes.shape, 1)))
                size = num_bytes[index] * np.array([[shares[rank]] for rank in ranks])
                for rank, more_s in zip(ranks, peers.carry_s(size)[:, 0].tolist(), strict=True):
                    seconds[rank] = seconds.get(rank, 0.0) + more_s
        idle = 0.0
        for rank, value in seconds.items():
            place = self._plan.place(rank)
            if place is None:
                idle = max(idle, value)
            else:
                row = found[place.pipeline_index]
                row[place.stage_index] = max(row[place.stage_index], value)
        return found, idle

    def _between_s(self, width: float) -> FloatArray:
        """Return [D, G] seconds between a stage's ranks and owners, at `width` bytes a value."""
        cost, nodes, own = self._cost, self._equal.nodes, self._own
        sends = Peers(cost, nodes, self._shares, own, self._own_nodes)
        owners = Peers(cost, nodes, self._owners, (own > 0).astype(float), self._own_nodes)
        holders = Peers.of_holders(cost, nodes)
        scale, first = width * self._equal.params, own[..., 0]
        busy_s = np.maximum(
            sends.carry_s(scale / self._equal.degrees),
            holders.carry_s(scale * first),
        )
        late_s: FloatArray = np.maximum(
            np.where(owners.near + owners.far > 0, owners.latency_s, 0.0),
            np.where(first > 0, holders.latency_s, 0.0),
        )
        return late_s + busy_s
