"""How long weights are pulled and gradients pushed: the part of an iteration between pipelines.

Cutting the layers wherever any pipeline cuts them gives segments: all layers of a segment have the
same holders. With D pipelines that share ownership, a holder of a layer keeps 1/D of its own shard
and sends (D-1)/D of it, straight to the owners, and receives as much. Layers go one after another
in one fixed order, gradients from the last layer to the first, each as soon as its backward ended
on all holders. Within a segment arrivals and sends are evenly spaced, so the end of the queue is
the larger of two linear cases and no layer is walked through.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator.cost import CostModel

__all__ = ["ExchangeTable", "Segment", "cut_segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers with the same holders; embedding and head are segments of one unit."""

    is_layers: bool
    """Whether the units are layers."""
    num_units: int
    """Number of layers."""
    params_per_unit: int
    """Parameters of one of them."""
    stages: tuple[int, ...]
    """For each pipeline the stage that holds them."""


def cut_segments(plan: ParallelPlan, cost: CostModel) -> list[Segment]:
    """Return all segments in the order in which their gradients are complete: last layers first."""
    model = cost.model
    stops = sorted({stage.layers.stop for p in plan.pipelines for stage in p.stages}, reverse=True)
    position = [pipeline.num_stages - 1 for pipeline in plan.pipelines]
    segments = [Segment(False, 1, model.head_params, tuple(position))]
    for stop, start in zip(stops, (*stops[1:], 0), strict=True):
        for index, pipeline in enumerate(plan.pipelines):
            if pipeline.stages[position[index]].layers.start >= stop:
                position[index] -= 1
        segments.append(Segment(True, stop - start, model.params_per_layer, tuple(position)))
    segments.append(Segment(False, 1, model.embedding_params, (0,) * plan.num_pipelines))
    return segments


class ExchangeTable:
    """Seconds that every pipeline needs to pull and push one unit of every segment."""

    def __init__(self, plan: ParallelPlan, cost: CostModel) -> None:
        self.segments = cut_segments(plan, cost)
        self._overlap = cost.layout.overlap
        self._plan = plan
        self._cost = cost
        self.push_s: list[list[float]] = []
        """[segment][pipeline] seconds to push one unit."""
        self.pull_s: list[list[float]] = []
        """[segment][pipeline] seconds to pull one unit; zeros if nothing is sharded."""
        for segment in self.segments:
            push, pull = self._unit_s(segment)
            self.push_s.append(push)
            self.pull_s.append(pull)

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
        ready = _ReadyTimes(self._plan, end_s, last_backward_s, overlap=self._overlap)
        workers = [index for index, work in enumerate(has_work) if work]
        for segment, push in zip(self.segments, self.push_s, strict=True):
            units, first_ready, last_ready, last_sent = segment.num_units, 0.0, 0.0, 0.0
            for index in workers:
                stage = segment.stages[index]
                first, last = ready.next_units(index, stage, segment)
                queue = max(sent[index][stage], first) + units * push[index]
                sent[index][stage] = max(queue, last + push[index])
                first_ready, last_ready = max(first_ready, first), max(last_ready, last)
                last_sent = max(last_sent, sent[index][stage])
            for index, stage in enumerate(segment.stages):
                queue = max(received[index][stage], first_ready) + units * push[index]
                received[index][stage] = max(queue, last_ready + push[index], last_sent)
        return [
            [max(ends) for ends in zip(*columns, strict=True)]
            for columns in zip(sent, received, end_s, strict=True)
        ]

    def _unit_s(self, segment: Segment) -> tuple[list[float], list[float]]:
        """Return the seconds in which each pipeline's holder pushes and pulls one unit."""
        cost, layout = self._cost, self._cost.layout
        pipelines = self._plan.pipelines
        holders = [
            pipeline.stages[stage].ranks
            for pipeline, stage in zip(pipelines, segment.stages, strict=True)
        ]
        count = len(holders)
        if count == 1:
            return [0.0], [0.0]
        if not layout.sharded:
            # Ranks of one tp_rank form a ring; unequal degrees share the finer cut's rings.
            shard = segment.params_per_unit / min(map(len, holders))
            reduce_s = cost.all_reduce_s(
                [ranks[0] for ranks in holders], shard * layout.gradient_bytes
            )
            return [reduce_s] * count, [0.0] * count
        seconds_per_byte, latency_s = _rates_to_peers(cost, [ranks[0] for ranks in holders])
        push, pull = [], []
        for ranks, rate, latency in zip(holders, seconds_per_byte, latency_s, strict=True):
            params = segment.params_per_unit / len(ranks) / count
            push.append(latency + params * layout.gradient_bytes * rate)
            pull.append(latency + params * layout.weight_bytes * rate)
        return push, pull


class _ReadyTimes:
    """When units become ready to push: layers one by one in the last backward, last layer first."""

    def __init__(
        self,
        plan: ParallelPlan,
        end_s: Sequence[Sequence[float]],
        last_backward_s: Sequence[Sequence[float]],
        *,
        overlap: bool,
    ) -> None:
        self._end_s = end_s
        self._span_s = last_backward_s
        self._num_layers = [[len(s.layers) for s in p.stages] for p in plan.pipelines]
        self._left = [list(counts) for counts in self._num_layers]
        self._overlap = overlap

    def next_units(self, pipeline: int, stage: int, segment: Segment) -> tuple[float, float]:
        """Return when the first and the last unit of a stage's next segment are ready."""
        end = self._end_s[pipeline][stage]
        if not self._overlap:
            return end, end
        per_layer_s = self._span_s[pipeline][stage] / self._num_layers[pipeline][stage]
        left = self._left[pipeline][stage]
        if not segment.is_layers:
            # The head is ready before any layer, the embedding after all of them.
            return end - per_layer_s * left, end - per_layer_s * left
        self._left[pipeline][stage] = left - segment.num_units
        return end - per_layer_s * (left - 1), end - per_layer_s * (left - segment.num_units)


def _rates_to_peers(cost: CostModel, ranks: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return for each rank the sum over its peers of 1 / bandwidth, and its largest latency.

    Linear in ranks and links: peers on other nodes count at the cluster's rate, and the few links
    that differ correct that.
    """
    nodes = [cost.node_of_rank[rank] for rank in ranks]
    per_node = Counter(nodes)
    default_bytes_per_s = cost.cluster.inter_node_bytes_per_s
    default_latency_s = cost.cluster.inter_node_latency_s
    far = {node: len(ranks) - count for node, count in per_node.items()}
    rate = {node: count / default_bytes_per_s for node, count in far.items()}
    latency = dict.fromkeys(per_node, 0.0)
    for (node_a, node_b), (bytes_per_s, latency_s) in cost.special_links.items():
        for node, peer in ((node_a, node_b), (node_b, node_a)):
            if node in per_node and peer in per_node:
                far[node] -= per_node[peer]
                rate[node] += per_node[peer] * (1 / bytes_per_s - 1 / default_bytes_per_s)
                latency[node] = max(latency[node], latency_s)
    for node, rank in dict(zip(nodes, ranks, strict=True)).items():
        if far[node]:
            latency[node] = max(latency[node], default_latency_s)
        if per_node[node] > 1:
            bytes_per_s, latency_s = cost.link(rank, rank)
            rate[node] += (per_node[node] - 1) / bytes_per_s
            latency[node] = max(latency[node], latency_s)
    return [rate[node] for node in nodes], [latency[node] for node in nodes]
