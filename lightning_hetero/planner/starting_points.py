"""Which groupings are worth looking at: all of them on tiny clusters, else the solvers' favourites.

For every TP degree Eq. 3's optimum, units dealt evenly over different numbers of groups, and the
pipelines that finish the most micro-batches (`rates`). Stages run from the slowest device to the
fastest, as in Algorithm 1. All are starting points; estimates and then the simulator judge them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.arrangement import (
    Arrangement,
    Group,
    MappingOrder,
    PipelineNodes,
    map_groups,
    num_units,
)
from lightning_hetero.planner.bound import bound_iteration_time_s, bound_work_s
from lightning_hetero.planner.estimator import Estimator
from lightning_hetero.planner.every_grouping import every_grouping
from lightning_hetero.planner.grouping import deal_evenly, group_devices
from lightning_hetero.planner.patterns import enumerate_compositions
from lightning_hetero.planner.rates import PipelineRates, bottleneck_times_s, choose_pipelines

__all__ = ["bound_time_s", "enumerate_arrangements", "propose_arrangements"]

_MAX_COMPOSITIONS = 6000
_GROUPING_PROGRAMS = 500
"""Most linear programmes for one grouping; 30 to 130 are usual."""
_MAX_EVERY_GROUPING = 1000
_LIKELIEST = 4
_MAX_BOUNDED = 600_000
"""Most compositions for which the bound counts bubbles: about a second of work."""


class _Types:
    """Device types of a cluster, slowest first, and what the solvers need to know of them."""

    def __init__(
        self, estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int]
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
        """Return tensor-parallel groups of each type that nodes can hold."""
        cluster = self.estimator.cost.cluster
        return [num_units(cluster, self.counts, name, tp_degree) for name in self.names]

    def seconds(self, node: int, tp_degree: int) -> float:
        """Return seconds of a micro-batch through all layers on one unit of a node."""
        forward, backward = self.estimator.stage_times_s(node, tp_degree, first=False, last=False)
        return float(forward[-1] + backward[-1])

    def powers(self, tp_degree: int) -> list[float]:
        """Return micro-batches per second of a unit of each type."""
        return [1.0 / self.seconds(node, tp_degree) for node in self.nodes]

    def min_memory_bytes(self, tp_degree: int, num_groups: int, num_stages: int) -> int:
        """Return what all ranks of one tp_rank of a group need together."""
        estimator = self.estimator
        held = min((num_stages + 2) // 2, estimator.workload.num_microbatches)
        batches = [estimator.workload.microbatch] * held
        return int(
            max(
                estimator.cost.stage_memory(
                    estimator.shape(node, tp_degree, estimator.num_layers, first=True, last=True),
                    num_groups,
                    batches,
                    held,
                ).total
                for node in self.nodes
            )
        )

    def groups(self, tp_degree: int, compositions: Sequence[Sequence[int]]) -> list[Group]:
        """Return groups with their stages from the slowest type to the fastest."""
        return [
            Group(
                tp_degree,
                tuple(n for n, k in zip(self.names, row, strict=True) for _ in range(k)),
            )
            for row in compositions
        ]


def propose_arrangements(
    estimator: Estimator,
    counts: Sequence[int],
    tp_degrees: Sequence[int],
    *,
    is_thorough: bool = True,
) -> list[Arrangement]:
    """Return arrangements worth estimating.

    Args:
        estimator: Costs, workload and cluster.
        counts: Devices of each node that may be used.
        tp_degrees: Tensor-parallel degrees to consider.
        is_thorough: Whether to ask the solvers, too; else units are dealt evenly only.
    """
    types = _Types(estimator, counts, tp_degrees)
    groupings: list[list[Group]] = []
    for tp_degree in tp_degrees:
        if sum(types.units(tp_degree)):
            groupings += _dealt(types, tp_degree, 64 if is_thorough else 8)
            if is_thorough:
                groupings += _by_effective_power(types, tp_degree)
    if is_thorough:
        groupings += _by_rate(types, tp_degrees)
        groupings += _every_one(types, tp_degrees)
    arrangements = []
    for groups in dict.fromkeys(map(tuple, groupings)):
        for order in MappingOrder:
            arrangement = map_groups(groups, estimator.cost.cluster, counts, order)
            if arrangement is not None:
                arrangements.append(arrangement)
    return list(dict.fromkeys(arrangements))


def bound_time_s(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int], upper_s: float
) -> float:
    """Return seconds that every plan takes at least; `upper_s` are those of a plan that exists."""
    types = _Types(estimator, counts, tp_degrees)
    most_stages = min(estimator.num_layers, sum(counts))
    units = {tp: types.units(tp) for tp in tp_degrees if sum(types.units(tp))}
    if sum(_num_compositions(row, most_stages) for row in units.values()) > _MAX_BOUNDED:
        return min(upper_s, bound_work_s(estimator, types.nodes, types.totals, list(units)))
    compositions = {tp: enumerate_compositions(row, most_stages) for tp, row in units.items()}
    return bound_iteration_time_s(estimator, types.nodes, types.totals, compositions, upper_s)


def _dealt(types: _Types, tp_degree: int, most_numbers: int) -> Iterator[list[Group]]:
    """Deal units evenly over every number of groups, or over a spread of numbers."""
    units = types.units(tp_degree)
    most = min(sum(units), types.estimator.workload.num_microbatches)
    least = -(-sum(units) // types.estimator.num_layers)
    spread = np.unique(np.geomspace(least, max(most, least), min(most_numbers, 40)).astype(int))
    every = range(least, most + 1)
    for num_groups in every if len(every) <= most_numbers else spread.tolist():
        dealt = deal_evenly(units, num_groups)
        rows = [row for row, repeats in dealt for _ in range(repeats)]
        if all(map(any, rows)):
            yield types.groups(tp_degree, rows)


def _by_effective_power(types: _Types, tp_degree: int) -> Iterator[list[Group]]:
    """Solve Eq. 3, with the memory and micro-batches of the number of groups it finds."""
    estimator, units = types.estimator, types.units(tp_degree)
    cost = estimator.cost
    rooms = [int(cost.usable_bytes(name)) for name in types.names]
    total = estimator.workload.num_microbatches
    seen: set[int] = set()
    num_groups = min(sum(units), total)
    while num_groups not in seen and len(seen) < 4:
        seen.add(num_groups)
        num_stages = -(-sum(units) // num_groups)
        try:
            grouping = group_devices(
                units,
                types.powers(tp_degree),
                rooms,
                types.min_memory_bytes(tp_degree, num_groups, num_stages),
                max(1, total // num_groups),
                _max_stages(units, estimator.num_layers),
                max_programs=_GROUPING_PROGRAMS,
            )
        except PlanningError:
            # Fewer groups own larger shares of the states; more of them need less each.
            if num_groups == sum(units):
                return
            num_groups = min(2 * num_groups, sum(units))
            continue
        yield types.groups(tp_degree, grouping.groups)
        num_groups = len(grouping.groups)


def _max_stages(units: Sequence[int], num_layers: int) -> int:
    """Return the longest pipeline to consider, so that compositions stay in the thousands."""
    longest = num_layers
    while _num_compositions(units, longest) > _MAX_COMPOSITIONS and longest > 8:
        longest -= 1
    return longest


def _num_compositions(units: Sequence[int], longest: int) -> int:
    """Return about how many compositions there are of so many units of each type."""
    within = math.prod((longest + i) / i for i in range(1, len(units) + 1))
    return int(min(within, math.prod(count + 1 for count in units)))


def _by_rate(types: _Types, tp_degrees: Sequence[int]) -> Iterator[list[Group]]:
    """Choose the pipelines that finish the most, per TP degree and over all of them."""
    degrees = [tp for tp in tp_degrees if sum(types.units(tp))]
    rates = {tp: _rates(types, tp) for tp in degrees}
    yield from _each_type_alone(types, rates)
    for chosen in [*([tp] for tp in degrees), degrees] if len(degrees) > 1 else [degrees]:
        if not chosen:
            continue
        merged = PipelineRates(
            devices=np.concatenate([rates[tp][1].devices for tp in chosen]),
            slope_s=np.concatenate([rates[tp][1].slope_s for tp in chosen]),
            fill_s=np.concatenate([rates[tp][1].fill_s for tp in chosen]),
        )
        totals = types.totals
        if len(chosen) == 1:
            totals = np.array(types.units(chosen[0])) * chosen[0]
        times = choose_pipelines(merged, totals, types.estimator.workload.num_microbatches)
        if times is None:
            continue
        groups: list[Group] = []
        start = 0
        for tp in chosen:
            compositions = rates[tp][0]
            used = times[start : start + len(compositions)]
            start += len(compositions)
            for index in np.flatnonzero(used):
                groups += types.groups(tp, [compositions[index].tolist()]) * int(used[index])
        yield groups


def _each_type_alone(
    types: _Types, rates: dict[int, tuple[IntArray, PipelineRates]]
) -> Iterator[list[Group]]:
    """Let no pipeline mix types: the likeliest degrees and lengths of each type, combined."""
    total = types.estimator.workload.num_microbatches
    options: list[list[list[Group]]] = []
    scored: list[tuple[float, int, int]]
    for kind in range(len(types.names)):
        scored = []
        for tp, (compositions, rate) in rates.items():
            num_units = types.units(tp)[kind]
            lengths = compositions[:, kind]
            alone = (lengths == compositions.sum(axis=1)) & np.isfinite(rate.slope_s)
            for row in np.flatnonzero(alone).tolist():
                length = int(lengths[row])
                num_groups = num_units // length
                share = total / num_groups
                power = num_groups / rate.slope_s[row] * share / (share + length - 1)
                scored.append((-power, tp, num_groups))
        scored.sort()
        # The best of every degree first: what is only a little behind may leave more memory.
        best = {tp: (tp, num_groups) for _, tp, num_groups in reversed(scored)}
        likeliest = dict.fromkeys([*best.values(), *(entry[1:] for entry in scored)])
        found = []
        for tp, num_groups in list(likeliest)[: _LIKELIEST if len(types.names) < 4 else 2]:
            units = [0] * len(types.names)
            units[kind] = types.units(tp)[kind]
            rows = [row for row, n in deal_evenly(units, num_groups) for _ in range(n)]
            found.append(types.groups(tp, rows))
        if found:
            options.append(found)
    for choice in itertools.product(*options) if options else ():
        yield [group for groups in choice for group in groups]


def _every_one(types: _Types, tp_degrees: Sequence[int]) -> Iterator[list[Group]]:
    """Return every grouping where there are few."""
    found = every_grouping(
        types.totals.tolist(),
        tp_degrees,
        most_stages=types.estimator.num_layers,
        most_pipelines=types.estimator.workload.num_microbatches,
        most=_MAX_EVERY_GROUPING,
    )
    for grouping in found or ():
        yield [group for tp, row in grouping for group in types.groups(tp, [row])]


def _rates(types: _Types, tp_degree: int) -> tuple[IntArray, PipelineRates]:
    """Return compositions of a TP degree and how fast each is."""
    estimator = types.estimator
    units = types.units(tp_degree)
    longest = _max_stages(units, estimator.num_layers)
    compositions = enumerate_compositions(units, longest)
    lengths = compositions.sum(axis=1)
    pairs = [
        estimator.stage_times_s(node, tp_degree, first=False, last=False) for node in types.nodes
    ]
    times = [np.maximum.accumulate(forward + backward) for forward, backward in pairs]
    slope = np.full(len(compositions), np.inf)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        held = min((length + 2) // 2, estimator.workload.num_microbatches)
        replicas = max(1, sum(units) // length)
        most = np.array(
            [
                estimator.most_layers(node, tp_degree, (False, False), replicas, held)
                for node in types.nodes
            ]
        )
        slope[rows] = bottleneck_times_s(compositions[rows], times, most)
    return compositions, PipelineRates(
        devices=compositions * tp_degree,
        slope_s=slope,
        fill_s=np.where(np.isfinite(slope), slope, 0.0) * (lengths - 1),
    )


def enumerate_arrangements(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int], limit: int
) -> list[Arrangement] | None:
    """Return all arrangements up to swapping equal nodes, or None if they are above `limit`."""
    cluster = estimator.cost.cluster
    most_stages = estimator.num_layers
    most_pipelines = estimator.workload.num_microbatches
    pipelines = sorted(
        PipelineNodes(tp, nodes)
        for tp in tp_degrees
        for nodes in _node_sequences([count // tp for count in counts], most_stages)
    )
    if len(pipelines) > limit:
        return None
    sizes = [(node.count, node.price_per_hour) for node in cluster.nodes]
    alike = [(estimator.classes[i], *sizes[i]) for i in range(len(sizes))]
    # Of equal nodes the first is used first: that is so in the least arrangement of any that
    # differ by swapping equal nodes, if pipelines come in order.
    earlier = [
        next((j for j in reversed(range(i)) if alike[j] == alike[i]), None)
        for i in range(len(alike))
    ]
    found: dict[Arrangement, Arrangement] = {}
    visited = 0
    stack: list[tuple[Arrangement, int, tuple[int, ...]]] = [((), 0, tuple(counts))]
    while stack:
        arrangement, start, free = stack.pop()
        if arrangement:
            found.setdefault(_relabel(arrangement, alike), arrangement)
        if len(arrangement) == most_pipelines:
            continue
        for index in range(start, len(pipelines)):
            pipeline = pipelines[index]
            left = list(free)
            in_order = True
            for node in pipeline.nodes:
                before = earlier[node]
                in_order &= before is None or left[before] < counts[before]
                left[node] -= pipeline.tp_degree
            if in_order and min(left) >= 0:
                visited += 1
                if visited > 8 * limit or len(found) > limit:
                    return None
                stack.append(((*arrangement, pipeline), index, tuple(left)))
    return list(found.values())


def _node_sequences(units: Sequence[int], longest: int) -> Iterator[tuple[int, ...]]:
    """Yield every sequence of nodes that uses each at most as often as it has units."""
    stack: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), tuple(units))]
    while stack:
        nodes, left = stack.pop()
        if nodes:
            yield nodes
        if len(nodes) == longest:
            continue
        for node in range(len(units)):
            if left[node]:
                rest = (*left[:node], left[node] - 1, *left[node + 1 :])
                stack.append(((*nodes, node), rest))


def _relabel(arrangement: Arrangement, alike: Sequence[object]) -> Arrangement:
    """Rename equal nodes by first appearance; arrangements that then agree are the same."""
    order = sorted(arrangement, key=lambda p: (p.tp_degree, [str(alike[node]) for node in p.nodes]))
    free: dict[object, list[int]] = {}
    for node in reversed(range(len(alike))):
        free.setdefault(alike[node], []).append(node)
    names: dict[int, int] = {}
    renamed = []
    for pipeline in order:
        for node in pipeline.nodes:
            if node not in names:
                names[node] = free[alike[node]].pop()
        renamed.append(PipelineNodes(pipeline.tp_degree, tuple(names[n] for n in pipeline.nodes)))
    return tuple(sorted(renamed))
