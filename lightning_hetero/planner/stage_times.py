"""What stages of 0, 1, ... layers take on every node, as memory allows; cached by class of node."""

import itertools
from collections.abc import Sequence

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.planner.arrangement import PipelineNodes, classify_nodes
from lightning_hetero.planner.balancing import balance_layers
from lightning_hetero.planner.recompute_tables import MemoryUse, RecomputeTables, StageTable
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape

__all__ = ["PipelineKey", "StageTimes"]

PipelineKey = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]
"""TP degrees, classes of its nodes, and whether each two neighbours share a node."""


class StageTimes:
    """Times and memory of stages on one cluster for one workload."""

    def __init__(self, cost: CostModel, workload: Workload) -> None:
        self.cost = cost
        self.workload = workload
        self.classes = classify_nodes(cost.cluster)
        self.num_layers = cost.model.num_layers
        self._rank_of_node = [cost.cluster.ranks_of(i)[0] for i in range(len(self.classes))]
        self._devices = [node.device for node in cost.cluster.nodes]
        self._largest: dict[str, int] = {}
        for entry in cost.cluster.nodes:
            self._largest[entry.device] = max(entry.count, self._largest.get(entry.device, 0))
        self._tables: dict[tuple[int, int, bool, bool], tuple[FloatArray, FloatArray]] = {}
        self._recompute = RecomputeTables(cost, workload)
        self._unlimited: dict[tuple[StageShape, ...], float] = {}
        self._balanced: dict[tuple[StageTable, ...], tuple[int, ...] | None] = {}

    def shape(
        self, node: int, tp_degree: int, num_layers: int, *, first: bool, last: bool
    ) -> StageShape:
        """Return the shape of a stage on a node."""
        rank = self._rank_of_node[node]
        return StageShape(
            device=self._devices[node],
            tp_degree=tp_degree,
            num_layers=num_layers,
            has_embedding=first,
            has_head=last,
            link=self.cost.link(rank, rank) if tp_degree > 1 else None,
        )

    def stage_times_s(
        self, node: int, tp_degree: int, *, first: bool, last: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Return forward and backward seconds of a micro-batch with 0, 1, ... layers.

        Infinite where the device type has no node that large.
        """
        key = (self.classes[node], tp_degree, first, last)
        if tp_degree > self._largest[self._devices[node]]:
            never = np.append(0.0, np.full(self.num_layers, np.inf))
            return never, never
        if key not in self._tables:
            times = np.zeros((2, self.num_layers + 1))
            for count in range(1, self.num_layers + 1):
                shape = self.shape(node, tp_degree, count, first=first, last=last)
                times[:, count] = self.cost.compute_s(shape, self.workload.microbatch)
            self._tables[key] = times[0], times[1]
        return self._tables[key]

    def seconds_per_device(self, node: int, tp_degrees: Sequence[int]) -> float:
        """Return seconds of a micro-batch through all layers, times the devices it takes."""
        best = np.inf
        for tp_degree in tp_degrees:
            forward, backward = self.stage_times_s(node, tp_degree, first=False, last=False)
            best = min(best, tp_degree * float(forward[-1] + backward[-1]))
        return best

    def most_layers(
        self, node: int, tp_degree: int, use: MemoryUse, *, recompute: bool = False
    ) -> int:
        """Return how many layers fit into a stage in the middle of a pipeline.

        Args:
            node: Where it stands.
            tp_degree: Its devices.
            use: What else its memory depends on.
            recompute: Whether it may recompute them.
        """
        shape = self.shape(node, tp_degree, 1, first=False, last=False)
        least = self._recompute.least(shape, use)
        fitting = np.flatnonzero(least >= 0 if recompute else least == 0)
        return int(fitting[-1]) if len(fitting) else 0

    def key(self, pipeline: PipelineNodes) -> PipelineKey:
        """Return what a pipeline's times depend on."""
        nodes = pipeline.nodes
        classes = tuple(self.classes[node] for node in nodes)
        same = tuple(a == b for a, b in itertools.pairwise(nodes))
        return pipeline.tp_degrees, classes, same

    def stage_tables(
        self,
        pipeline: PipelineNodes,
        num_pipelines: int,
        most_microbatches: int,
        owned_params: float | None,
    ) -> list[StageTable]:
        """Return what every number of layers takes on each stage, recomputation included."""
        nodes = pipeline.nodes
        tables = []
        for stage, (node, tp_degree) in enumerate(pipeline.stages):
            ends = {"first": stage == 0, "last": stage == len(nodes) - 1}
            in_flight = min(len(nodes) - stage, most_microbatches)
            tables.append(
                self._recompute.table(
                    self.shape(node, tp_degree, 1, **ends),
                    MemoryUse(num_pipelines, in_flight, owned_params),
                    self.stage_times_s(node, tp_degree, **ends),
                    self.stage_times_s(node, tp_degree, first=False, last=False)[0],
                )
            )
        return tables

    def balanced(self, tables: Sequence[StageTable]) -> tuple[int, ...] | None:
        """Return the layers of each stage by Eq. 4, or None if they don't fit."""
        key = tuple(tables)
        if key not in self._balanced:
            self._balanced[key] = balance_layers([t.total_s for t in tables], self.num_layers)
        return self._balanced[key]

    def is_slowed(self, tables: Sequence[StageTable], layers: Sequence[int]) -> bool:
        """Return whether a pipeline of these stages would be faster with more memory."""
        if all(table.is_unlimited for table in tables):
            return False
        key = tuple([table.shape for table in tables])
        if key not in self._unlimited:
            every = [table.unlimited_s for table in tables]
            best = balance_layers(every, self.num_layers)
            assert best is not None, "with less memory it has a split"
            self._unlimited[key] = max(float(t[n]) for t, n in zip(every, best, strict=True))
        bottleneck_s = max(float(t.total_s[n]) for t, n in zip(tables, layers, strict=True))
        return bottleneck_s > self._unlimited[key] * (1 + 1e-9)
