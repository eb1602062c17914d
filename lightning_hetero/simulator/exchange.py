"""Time pulls of weights and pushes of gradients: the exchange between pipelines.

Cutting the layers wherever any pipeline cuts them gives segments: all layers of a segment have the
same holders. With D pipelines that share ownership, a holder of a layer keeps 1/D of its own shard
and sends (D-1)/D of it, straight to the owners, and receives as much. Layers go one after another
in one fixed order, gradients from the last layer to the first, each as soon as its backward ended
on all holders. Within a segment arrivals and sends are evenly spaced, so the queue ends at the
larger of two linear cases, without a loop over layers.

Prices are those of what `runtime.exchange` calls. If all holders of a segment have one TP degree,
those of the same part form a circle (`core.transfers.Circle`):

- A pull is an all-gather around the circle's ring, and one of norms in each stage, if holders use a
  collective (`are_collective`: AUTO on NCCL, or for many holders) and may gather into their weights
  (`StateLayout.pulls_into_views`).
- A push is summed on each node first (BY_NODE), or a ring's reduce-scatter (REDUCE_SCATTER).

All else is pairwise: messages, or an all-to-all, which NCCL makes of messages. So are all segments
whose holders differ in degree, whatever the kind of exchange. Pieces are taken to be equal, where
the runtime pads rows or, if that added more than an eighth, uses an all-to-all.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import PipelinePlan
from lightning_hetero.core.transfers import ExchangeKind, are_collective
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.links import Peers, push_by_node_s, rings_inside_s, rings_s

__all__ = ["SUM_BYTES", "ExchangeTable", "Holders", "Segment", "cut_segments"]

SUM_BYTES = 4
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
    """For each pipeline the stage that holds them."""


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
    edges = [[0, *itertools.accumulate(row)] for row in layers]
    stops = sorted({stop for row in edges for stop in row}, reverse=True)
    position = [len(row) - 1 for row in layers]
    segments = [Segment(False, 1, model.head_params, tuple(position))]
    for stop, start in itertools.pairwise(stops):
        for index, row in enumerate(edges):
            if row[position[index]] >= stop:
                position[index] -= 1
        segments.append(Segment(True, stop - start, model.params_per_layer, tuple(position)))
    segments.append(Segment(False, 1, model.embedding_params, (0,) * len(layers)))
    return segments


class ExchangeTable:
    """Seconds that every pipeline needs to pull and push one unit of every segment.

    Pipelines that `Holders` put together count as one, with the slowest links among them.
    """

    def __init__(self, holders: Sequence[Holders], cost: CostModel) -> None:
        self.segments = cut_segments([entry.layers for entry in holders], cost.model)
        self._holders = holders
        self._cost = cost
        self.push_s: list[list[float]] = []
        """[segment][pipeline] seconds to push one unit."""
        self.pull_s: list[list[float]] = []
        """[segment][pipeline] seconds to pull one unit; zeros if nothing is sharded."""
        self._fill()

    def _fill(self) -> None:
        """Find the seconds of all segments."""
        if sum(len(entry.ranks) for entry in self._holders) == 1:
            self.push_s = self.pull_s = [[0.0]] * len(self.segments)
        elif self._cost.layout.sharded:
            self._fill_sharded()
        else:
            self._fill_replicated()

    def pull_start_s(self, first_forward_s: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return when each stage may start, so that no layer runs before its weights are there.

        Args:
            first_forward_s: Seconds of the first forward, as [pipeline][stage].
        """
        starts = []
        for index, forward in enumerate(first_forward_s):
            total = [0.0] * len(forward)
            first = [0.0] * len(forward)
            units = [0] * len(forward)
            # Pulls run from the first layer to the last.
            for segment, pull in zip(reversed(self.segments), reversed(self.pull_s), strict=True):
                stage = segment.stages[index]
                if units[stage] == 0:
                    first[stage] = pull[index]
                units[stage] += segment.num_units
                total[stage] += segment.num_units * pull[index]
            starts.append(
                [
                    max(first[s], total[s] - forward[s] * (1 - 1 / units[s]))
                    for s in range(len(forward))
                ]
            )
        return starts

    def push_end_s(
        self,
        end_s: Sequence[Sequence[float]],
        last_backward_s: Sequence[Sequence[float]],
        has_work: Sequence[bool],
    ) -> list[list[float]]:
        """Return when each stage has sent and received all gradients, as [pipeline][stage].

        Args:
            end_s: End of each stage's last backward.
            last_backward_s: Seconds of that backward, during which layers finish one by one.
            has_work: Whether the pipeline ran any micro-batch; one that didn't only receives.
        """
        sent = [[0.0] * len(ends) for ends in end_s]
        received = [[0.0] * len(ends) for ends in end_s]
        ready = _ReadyTimes(
            [entry.layers for entry in self._holders],
            end_s,
            last_backward_s,
            overlap=self._cost.layout.overlap,
        )
        workers = [index for index, work in enumerate(has_work) if work]
        # Searches spend much of their time here, so the larger of two is taken without a call.
        for segment, push in zip(self.segments, self.push_s, strict=True):
            units, first_ready, last_ready, last_sent = segment.num_units, 0.0, 0.0, 0.0
            every = ready.next_units(workers, segment)
            for index, (first, last) in zip(workers, every, strict=True):
                stage, seconds = segment.stages[index], push[index]
                busy, after = sent[index][stage], last + seconds
                queue = (busy if busy > first else first) + units * seconds
                sent[index][stage] = end = queue if queue > after else after
                first_ready = first if first > first_ready else first_ready
                last_ready = last if last > last_ready else last_ready
                last_sent = end if end > last_sent else last_sent
            for row, stage, seconds in zip(received, segment.stages, push, strict=True):
                busy = row[stage]
                queue = (busy if busy > first_ready else first_ready) + units * seconds
                row[stage] = max(queue, last_ready + seconds, last_sent)
        return [
            [max(ends) for ends in zip(*columns, strict=True)]
            for columns in zip(sent, received, end_s, strict=True)
        ]

    def _fill_sharded(self) -> None:
        """Fill the table for shared ownership: every holder sends to all others, and receives."""
        cost, layout, every = self._cost, self._cost.layout, self._holders
        node_of, held = cost.node_of_rank, list(zip(every, self._stages, strict=True))
        nodes = np.array(
            [[node_of[row[s]] for s in stages] for entry, stages in held for row in entry.ranks]
        )
        firsts = [0, *itertools.accumulate([len(entry.ranks) for entry in every[:-1]])]
        degrees = np.array(self._degrees)
        shards = np.array([segment.params_per_unit for segment in self.segments]) / degrees
        counts = [len(entry.ranks) for entry in every]
        pieces, peers = np.repeat(shards, counts, axis=0) / len(nodes), Peers(cost, nodes)
        pull, push = (
            np.maximum.reduceat(peers.sends_s(width * pieces), firsts, axis=0)
            for width in (layout.weight_bytes, layout.pushed_bytes)
        )
        if any(self._are_gathered):
            gathered = rings_s(cost, nodes, layout.weight_bytes * shards[0])
            if max(self._degrees[0]) > 1:
                inside = self._stage_gathers_s(nodes, degrees[0])
                gathered = gathered + np.maximum.reduceat(inside, firsts, axis=0)
            pull = np.where(self._are_gathered, gathered, pull)
        if layout.exchange is ExchangeKind.REDUCE_SCATTER:
            rings = rings_s(cost, nodes, layout.pushed_bytes * shards[0])
            push = np.where(self._are_circles, rings, push)
        self.pull_s, self.push_s = pull.T.tolist(), push.T.tolist()
        if layout.exchange is ExchangeKind.BY_NODE:
            for index, segment in enumerate(self.segments):
                if self._are_circles[index]:
                    self.push_s[index] = self._by_node_s(segment, layout.pushed_bytes)

    @cached_property
    def _stages(self) -> list[tuple[int, ...]]:
        """[pipeline][segment] the stage that holds each segment."""
        return list(zip(*[segment.stages for segment in self.segments], strict=True))

    @cached_property
    def _degrees(self) -> list[list[int]]:
        """[pipeline][segment] ranks of that stage."""
        held = zip(self._holders, self._stages, strict=True)
        return [[entry.tp_degrees[stage] for stage in row] for entry, row in held]

    @cached_property
    def _are_circles(self) -> list[bool]:
        """For each segment whether all its stages have one degree."""
        return [len(set(column)) == 1 for column in zip(*self._degrees, strict=True)]

    @cached_property
    def _are_gathered(self) -> list[bool]:
        """For each segment whether it is pulled by an all-gather."""
        layout, backend = self._cost.layout, self._cost.cluster.backend
        num_holders = sum([len(entry.ranks) for entry in self._holders])
        if layout.pulls_into_views or not are_collective(layout.exchange, backend, num_holders):
            return [False] * len(self.segments)
        return self._are_circles

    def _by_node_s(self, segment: Segment, bytes_per_param: int) -> list[float]:
        """Return the seconds of a push that is summed on each node, in fp32."""
        held = list(zip(self._holders, segment.stages, strict=True))
        ranks = [row[stage] for entry, stage in held for row in entry.ranks]
        params = segment.params_per_unit / self._holders[0].tp_degrees[segment.stages[0]]
        width = SUM_BYTES / self._cost.layout.gradient_bytes
        seconds = push_by_node_s(self._cost, ranks, params * bytes_per_param, width=width)
        return [seconds] * len(held)

    def _stage_gathers_s(self, nodes: IntArray, degrees: IntArray) -> FloatArray:
        """Return [holder, segment] seconds in which stages gather what all of their ranks hold.

        Such as norms: ranks with the same part of a stage exchange it, so each gets only a part of
        them. Ranks of a stage are assumed to be on one node.

        Args:
            nodes: The holders' nodes.
            degrees: Ranks of the stages that hold each segment.
        """
        cost, model = self._cost, self._cost.model
        in_layer, outside = model.whole_params_per_layer, model.norm_params
        whole = [in_layer if segment.is_layers else outside for segment in self.segments]
        num_bytes = cost.layout.weight_bytes * np.array(whole, float)
        seconds = rings_inside_s(cost, nodes, degrees, num_bytes)
        seconds[:, -1] = 0.0  # Embeddings have no norms.
        return seconds

    def _fill_replicated(self) -> None:
        """Fill the table for ring all-reduces, one for each part of a stage by the finest cut."""
        for segment in self.segments:
            held = list(zip(self._holders, segment.stages, strict=True))
            shard = segment.params_per_unit / min(e.tp_degrees[stage] for e, stage in held)
            reduce_s = self._cost.all_reduce_s(
                [row[stage] for entry, stage in held for row in entry.ranks],
                shard * self._cost.layout.pushed_bytes,
            )
            self.push_s.append([reduce_s] * len(held))
            self.pull_s.append([0.0] * len(held))


class _ReadyTimes:
    """When units become ready to push: layers one by one in the last backward, last layer first."""

    def __init__(
        self,
        num_layers: Sequence[Sequence[int]],
        end_s: Sequence[Sequence[float]],
        last_backward_s: Sequence[Sequence[float]],
        *,
        overlap: bool,
    ) -> None:
        self._end_s = end_s
        self._span_s = last_backward_s
        self._num_layers = num_layers
        self._left = [list(counts) for counts in num_layers]
        self._overlap = overlap

    def next_units(self, pipelines: Sequence[int], segment: Segment) -> list[tuple[float, float]]:
        """Return for each pipeline when the first and last unit of its next segment are ready."""
        found = []
        for pipeline in pipelines:
            stage = segment.stages[pipeline]
            end = self._end_s[pipeline][stage]
            if not self._overlap:
                found.append((end, end))
                continue
            per_layer_s = self._span_s[pipeline][stage] / self._num_layers[pipeline][stage]
            left = self._left[pipeline][stage]
            if segment.is_layers:
                last = left - segment.num_units
                found.append((end - per_layer_s * (left - 1), end - per_layer_s * last))
                self._left[pipeline][stage] = last
            else:
                # The head is ready before any layer, the embedding after all of them.
                ready = end - per_layer_s * left
                found.append((ready, ready))
        return found
