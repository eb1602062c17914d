"""Time stages of 0, 1, ... layers on every node, as memory allows; cached by class of node."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.arrangement import Group, PipelineNodes, classify_nodes, num_units
from lightning_hetero.planner.estimating.recompute_tables import (
    MemoryUse,
    RecomputeTables,
    StageTable,
)
from lightning_hetero.planner.solvers.balancing import balance_layers
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape

__all__ = ["DeviceTypes", "PipelineKey", "StageTimes"]

_MOST_MIXED = 4_096
"""Choices of a TP degree for each device type that are rated."""
PipelineKey = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]
"""A class of pipelines: TP degrees, node classes, and whether neighbouring stages share a node."""


class StageTimes:
    """Times and memory of stages on one cluster for one workload."""

    def __init__(self, cost: CostModel, workload: Workload) -> None:
        self.cost = cost
        self.workload = workload
        self.classes = classify_nodes(cost.cluster)
        self.num_layers = cost.model.num_layers
        self.rank_of_node = [cost.cluster.ranks_of(i)[0] for i in range(len(self.classes))]
        self.node_of_class = {kind: node for node, kind in reversed([*enumerate(self.classes)])}
        """The first node of each class."""
        self._devices = [node.device for node in cost.cluster.nodes]
        self.num_devices: Counter[str] = Counter()
        for entry in cost.cluster.nodes:
            self.num_devices[entry.device] += entry.count
        self._largest: dict[str, int] = {}
        for entry in cost.cluster.nodes:
            self._largest[entry.device] = max(entry.count, self._largest.get(entry.device, 0))
        self._tables: dict[tuple[int, int, bool, bool], tuple[FloatArray, FloatArray]] = {}
        self._rates: dict[tuple[int, int], float] = {}
        self._keys: dict[PipelineNodes, PipelineKey] = {}
        self._stage_tables: dict[tuple[int, int, bool, bool, MemoryUse], StageTable] = {}
        self._recompute = RecomputeTables(cost, workload)
        self._unlimited: dict[tuple[StageShape, ...], float] = {}
        self._balanced: dict[tuple[StageTable, ...], tuple[int, ...] | None] = {}

    def shape(
        self, node: int, tp_degree: int, num_layers: int, *, first: bool, last: bool
    ) -> StageShape:
        """Return the shape of a stage on a node."""
        rank = self.rank_of_node[node]
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
        """Return the device-seconds of a micro-batch through all layers at the best TP degree."""
        best = np.inf
        for tp_degree in tp_degrees:
            forward, backward = self.stage_times_s(node, tp_degree, first=False, last=False)
            best = min(best, tp_degree * float(forward[-1] + backward[-1]))
        return best

    def most_per_s(self, node: int, tp_degree: int) -> float:
        """Return a unit's micro-batches a second through all layers, at its best layer count."""
        key = self.classes[node], tp_degree
        if key not in self._rates:
            seconds = np.add(*self.stage_times_s(node, tp_degree, first=False, last=False))
            rates = np.arange(1, self.num_layers + 1) / seconds[1:]
            self._rates[key] = float(rates.max()) / self.num_layers
        return self._rates[key]

    def most_layers(
        self, node: int, tp_degree: int, uses: Sequence[MemoryUse], *, recompute: bool = False
    ) -> IntArray:
        """Return how many layers fit into a stage in the middle of a pipeline, for each use.

        Args:
            node: Its node.
            tp_degree: Its devices.
            uses: What else its memory depends on; either all or none have `owned_params`.
            recompute: Whether it may recompute them.
        """
        shape = self.shape(node, tp_degree, 1, first=False, last=False)
        least = self._recompute.least(shape, uses)
        fits = least >= 0 if recompute else least == 0
        most: IntArray = np.where(fits, np.arange(fits.shape[1]), 0).max(axis=1)
        return most

    def key(self, pipeline: PipelineNodes) -> PipelineKey:
        """Return the class of a pipeline: what its times depend on."""
        key = self._keys.get(pipeline)
        if key is None:
            nodes = pipeline.nodes
            classes = tuple([self.classes[node] for node in nodes])
            same = tuple([a == b for a, b in itertools.pairwise(nodes)])
            key = self._keys[pipeline] = pipeline.tp_degrees, classes, same
        return key

    def devices_of(self, key: PipelineKey) -> list[str]:
        """Return the device type of each stage."""
        return [self._devices[self.node_of_class[kind]] for kind in key[1]]

    def stage_tables(
        self,
        pipeline: PipelineNodes,
        num_pipelines: int,
        owned_params: float | None,
    ) -> list[StageTable]:
        """Return each stage's seconds for every number of layers, recomputation included."""
        tables = []
        last = len(pipeline.nodes) - 1
        for stage, (tp_degree, node) in enumerate(zip(*pipeline, strict=True)):
            in_flight = min(last + 1 - stage, self.workload.num_microbatches)
            use = MemoryUse(num_pipelines, in_flight, owned_params)
            key = self.classes[node], tp_degree, stage == 0, stage == last, use
            table = self._stage_tables.get(key)
            if table is None:
                ends = {"first": stage == 0, "last": stage == last}
                table = self._stage_tables[key] = self._recompute.table(
                    self.shape(node, tp_degree, 1, **ends),
                    use,
                    self.stage_times_s(node, tp_degree, **ends),
                    self.stage_times_s(node, tp_degree, first=False, last=False)[0],
                )
            tables.append(table)
        return tables

    def balanced(self, tables: Sequence[StageTable]) -> tuple[int, ...] | None:
        """Return the layers of each stage by Eq. 4, or None if they don't fit."""
        key = tuple(tables)
        if key not in self._balanced:
            self._balanced[key] = balance_layers([t.total_s for t in tables], self.num_layers)
        return self._balanced[key]

    def is_slowed(self, tables: Sequence[StageTable]) -> bool:
        """Return whether a pipeline of these stages fits and would be faster with more memory."""
        layers = self.balanced(tables)
        if layers is None or all(table.is_unlimited for table in tables):
            return False
        key = tuple([table.shape for table in tables])
        if key not in self._unlimited:
            every = [table.unlimited_s for table in tables]
            best = balance_layers(every, self.num_layers)
            assert best is not None, "with less memory it has a split"
            self._unlimited[key] = max(float(t[n]) for t, n in zip(every, best, strict=True))
        bottleneck_s = max(float(t.total_s[n]) for t, n in zip(tables, layers, strict=True))
        return bottleneck_s > self._unlimited[key] * (1 + 1e-9)


class DeviceTypes:
    """Device types of a cluster, slowest first, with their units, speeds and groups."""

    def __init__(
        self, estimator: StageTimes, counts: Sequence[int], tp_degrees: Sequence[int]
    ) -> None:
        cluster = estimator.cost.cluster
        self.estimator = estimator
        self.counts = counts
        node_of: dict[str, int] = {}
        for index, node in enumerate(cluster.nodes):
            if counts[index]:
                node_of.setdefault(node.device, index)
        seconds = {
            name: estimator.seconds_per_device(node, tp_degrees) for name, node in node_of.items()
        }
        self.names = sorted(node_of, key=lambda name: (-seconds[name], name))
        self.nodes = [node_of[name] for name in self.names]
        self.totals = np.array(self.units(1), dtype=np.int64)

    def units(self, tp_degree: int) -> list[int]:
        """Return how many tensor-parallel groups of each type nodes can hold."""
        return self.units_of([tp_degree] * len(self.names))

    def units_of(self, tp_degrees: Sequence[int]) -> list[int]:
        """Return the same as `units` if each type has its own degree."""
        cluster = self.estimator.cost.cluster
        return [
            num_units(cluster, self.counts, name, tp_degree)
            for name, tp_degree in zip(self.names, tp_degrees, strict=True)
        ]

    def seconds(self, node: int, tp_degree: int) -> float:
        """Return seconds of a micro-batch through all layers on one unit of a node."""
        forward, backward = self.estimator.stage_times_s(node, tp_degree, first=False, last=False)
        return float(forward[-1] + backward[-1])

    def powers(self, tp_degree: int) -> list[float]:
        """Return micro-batches per second of a unit of each type."""
        return [1.0 / self.seconds(node, tp_degree) for node in self.nodes]

    def groups(self, tp_degree: int, compositions: Sequence[Sequence[int]]) -> list[Group]:
        """Return the groups of compositions, with stages from the slowest type to the fastest."""
        return self.groups_of([tp_degree] * len(self.names), compositions)

    def groups_of(
        self, tp_degrees: Sequence[int], compositions: Sequence[Sequence[int]]
    ) -> list[Group]:
        """Return the same as `groups` if each type has its own degree."""
        rows, known = list(map(tuple, compositions)), {}
        for row in set(rows):
            kinds = zip(tp_degrees, self.names, row, strict=True)
            stages = [(degree, name) for degree, name, count in kinds for _ in range(count)]
            degrees, devices = zip(*stages, strict=True)
            known[row] = Group(degrees, devices)
        return [known[row] for row in rows]

    def mixed_degrees(self, tp_degrees: Sequence[int], most: int) -> list[tuple[int, ...]]:
        """Return the best choices of a degree for each type, not all equal, `most` of them.

        M micro-batches on U units of total power P take about (M + U)/P: larger groups make
        pipelines shorter and bubbles smaller, smaller ones spend less on their collectives. Of many
        types, each has only the degrees that give it the most power.
        """
        options: list[list[tuple[int, int, float]]] = [[] for _ in self.names]
        for degree in tp_degrees:
            rows = zip(options, self.units(degree), self.powers(degree), strict=True)
            for found, count, power in rows:
                if count:
                    found.append((degree, count, count * power))
        each = max(2, int(_MOST_MIXED ** (1 / len(self.names))))
        strongest = [sorted(found, key=lambda item: -item[-1])[:each] for found in options]
        num_microbatches, rated = self.estimator.workload.num_microbatches, []
        for chosen in itertools.islice(itertools.product(*strongest), _MOST_MIXED):
            degrees, counts, powers = zip(*chosen, strict=True)
            if len(set(degrees)) > 1:
                rated.append(((num_microbatches + sum(counts)) / sum(powers), degrees))
        return [degrees for _, degrees in sorted(rated)[:most]]
