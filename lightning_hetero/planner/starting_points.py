"""Propose groupings of devices for clusters that are too large to enumerate.

For every TP degree: units dealt evenly over different numbers of groups, and the pipelines that
finish the most micro-batches (`rates`, in place of AutoHet's Eq. 3). Also, units dealt evenly whose
degree depends on their device type, or is doubled at a pipeline's ends. Stages run from the slowest
device to the fastest, as in Algorithm 1. All are starting points, which estimates and then the
simulator judge.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.planner.arrangement import (
    Arrangement,
    Group,
    MappingOrder,
    map_groups,
)
from lightning_hetero.planner.bound import UnitKind, bound_iteration_time_s, bound_work_s
from lightning_hetero.planner.enumeration import every_grouping
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.estimating.recompute_tables import MemoryUse
from lightning_hetero.planner.estimating.stage_times import DeviceTypes
from lightning_hetero.planner.solvers.patterns import deal_evenly, enumerate_compositions
from lightning_hetero.planner.solvers.rates import (
    PipelineRates,
    bottleneck_times_s,
    choose_pipelines,
)
from lightning_hetero.planner.wide_ends import is_head_heavy, with_wide_ends

__all__ = [
    "bound_time_s",
    "glance_at",
    "propose_arrangements",
    "propose_mixed_degrees",
    "propose_wide_ends",
]

_MAX_COMPOSITIONS = 6000
_MAX_EVERY_GROUPING = 1000
_LIKELIEST = 4
"""Best options of each device type that are combined with those of the other types."""
_COMBINED = 12
"""Most combinations that are tried."""
_NEWTON_STEPS = 4
_FEW_DEVICES = 64
"""Up to this many devices, local search finds which units to leave idle."""
_FEW_NUMBERS = 8
"""Numbers of groups that are tried for mixed degrees and at a glance."""
_MIXED_DEGREES, _MIXED_DEGREES_DEVICES = 2, 768
"""Choices of one degree for each device type: at a glance, and proposed where devices are many. The
fewer devices, the more are proposed."""
_WIDENED_NUMBERS = 16
"""The same for pipelines with wide ends."""
_MAX_BOUNDED = 600_000
"""Most compositions for which the bound counts bubbles: about a second of work."""
_MAX_BOUNDED_OF_DEGREES = 20_000
"""The same if stages may differ in degree, so that compositions count units of each degree."""


def propose_arrangements(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int], alone: Sequence[int]
) -> list[Arrangement]:
    """Return arrangements worth estimating.

    Args:
        estimator: Costs, workload and cluster.
        counts: Devices of each node that may be used.
        tp_degrees: Tensor-parallel degrees that pipelines of one plan may have.
        alone: Those of them that are tried for all pipelines alike.
    """
    types = DeviceTypes(estimator, counts, tp_degrees)
    groupings: list[list[Group]] = []
    for tp_degree in alone:
        if sum(types.units(tp_degree)):
            groupings += _dealt(types, [tp_degree] * len(types.names), 64)
            if types.totals.sum() > _FEW_DEVICES:
                groupings += _alike(types, tp_degree)
    groupings += _by_rate(types, tp_degrees, alone)
    groupings += _every_one(types, tp_degrees)
    return _mapped(groupings, types, list(MappingOrder))


def propose_mixed_degrees(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int]
) -> list[Arrangement]:
    """Return arrangements with a degree for each device type, such as A100 TP 1 and V100 TP 4.

    The degrees are from `tp_degrees`; stages of one pipeline may differ.
    """
    types = DeviceTypes(estimator, counts, tp_degrees)
    groupings: list[list[Group]] = []
    most = max(_MIXED_DEGREES, _MIXED_DEGREES_DEVICES // max(1, int(types.totals.sum())))
    for degrees in types.mixed_degrees(tp_degrees, most):
        groupings += _dealt(types, degrees, _FEW_NUMBERS)
    return _mapped(groupings, types, list(MappingOrder))


def propose_wide_ends(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int]
) -> list[Arrangement]:
    """Return arrangements whose pipelines have twice the degree at their ends.

    None unless the head takes as long as a layer. The degrees are from `tp_degrees`.
    """
    types = DeviceTypes(estimator, counts, tp_degrees)
    groupings: list[list[Group]] = []
    for degree in tp_degrees:
        if 2 * degree in tp_degrees and is_head_heavy(types, degree):
            for groups in _dealt(types, [degree] * len(types.names), _WIDENED_NUMBERS):
                groupings += with_wide_ends(groups)
    return _mapped(groupings, types, list(MappingOrder))


def glance_at(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int]
) -> list[Arrangement]:
    """Return a few evenly dealt arrangements, whose estimates show roughly what devices can do.

    They have one of `tp_degrees` for all stages, or one for each device type.
    """
    types = DeviceTypes(estimator, counts, tp_degrees)
    choices = [(tp_degree,) * len(types.names) for tp_degree in tp_degrees]
    choices += types.mixed_degrees(tp_degrees, _MIXED_DEGREES)
    groupings: list[list[Group]] = []
    for degrees in choices:
        if sum(types.units_of(degrees)):
            groupings += _dealt(types, degrees, _FEW_NUMBERS)
    return _mapped(groupings, types, [MappingOrder.STAGES_TOGETHER])


def _mapped(
    groupings: Sequence[Sequence[Group]], types: DeviceTypes, orders: Sequence[MappingOrder]
) -> list[Arrangement]:
    """Return the arrangements of groupings on nodes, placed in each of some orders."""
    cluster = types.estimator.cost.cluster
    arrangements = []
    for groups in dict.fromkeys(map(tuple, groupings)):
        for order in orders:
            arrangement = map_groups(groups, cluster, types.counts, order)
            if arrangement is not None:
                arrangements.append(arrangement)
    return list(dict.fromkeys(arrangements))


def bound_time_s(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int], upper_s: float
) -> float:
    """Return a lower bound in seconds on every plan; `upper_s` is the time of a known plan."""
    types = DeviceTypes(estimator, counts, tp_degrees)
    kinds = {
        UnitKind(node, index, tp_degree): count
        for tp_degree in tp_degrees
        for index, (node, count) in enumerate(zip(types.nodes, types.units(tp_degree), strict=True))
        if count
    }
    most_stages = min(estimator.num_layers, sum(counts))
    units = list(kinds.values())
    limit = _MAX_BOUNDED if len(tp_degrees) == 1 else _MAX_BOUNDED_OF_DEGREES
    if _num_compositions(units, most_stages) > limit:
        return min(upper_s, bound_work_s(estimator, list(kinds), types.totals))
    compositions = enumerate_compositions(units, most_stages)
    return bound_iteration_time_s(estimator, list(kinds), types.totals, compositions, upper_s)


def _dealt(
    types: DeviceTypes, tp_degrees: Sequence[int], most_numbers: int
) -> Iterator[list[Group]]:
    """Deal units evenly over every number of groups, or over a spread of numbers.

    `tp_degrees` has one degree for each type.
    """
    units = types.units_of(tp_degrees)
    most = min(sum(units), types.estimator.workload.num_microbatches)
    least = -(-sum(units) // types.estimator.num_layers)
    spread = np.unique(np.geomspace(least, max(most, least), min(most_numbers, 40)).astype(int))
    every = range(least, most + 1)
    for num_groups in every if len(every) <= most_numbers else spread.tolist():
        dealt = deal_evenly(units, num_groups)
        rows = [row for row, repeats in dealt for _ in range(repeats)]
        if all(map(any, rows)):
            yield types.groups_of(tp_degrees, rows)


def _alike(types: DeviceTypes, tp_degree: int) -> Iterator[list[Group]]:
    """Deal units so that all pipelines have equally many stages, and equally many micro-batches.

    The slowest units stay idle. Pipelines are as long as the units allow, or one stage shorter.
    """
    units, estimator = types.units(tp_degree), types.estimator
    total, num_microbatches = sum(units), estimator.workload.num_microbatches
    for num_groups in range(1, min(total, num_microbatches) + 1):
        if num_microbatches % num_groups:
            continue
        longest = min(total // num_groups, estimator.num_layers)
        for length in range(longest, max(longest - 2, 0), -1):
            kept, surplus = [], total - length * num_groups
            for count in units:
                left_over = min(count, surplus)
                surplus -= left_over
                kept.append(count - left_over)
            dealt = deal_evenly(kept, num_groups)
            rows = [row for row, repeats in dealt for _ in range(repeats)]
            yield types.groups(tp_degree, rows)


def _max_stages(units: Sequence[int], num_layers: int) -> int:
    """Return the longest pipeline to consider, so that compositions stay in the thousands."""
    longest = num_layers
    while _num_compositions(units, longest) > _MAX_COMPOSITIONS and longest > 8:
        longest -= 1
    return longest


def _num_compositions(units: Sequence[int], longest: int) -> int:
    """Return an upper bound on the number of compositions of `longest` units at most."""
    within = math.prod((longest + i) / i for i in range(1, len(units) + 1))
    return int(min(within, math.prod(count + 1 for count in units)))


def _by_rate(
    types: DeviceTypes, tp_degrees: Sequence[int], alone: Sequence[int]
) -> Iterator[list[Group]]:
    """Yield groupings that finish the most: without recomputation, and as if it cost nothing."""
    degrees = [tp for tp in tp_degrees if sum(types.units(tp))]
    # Per TP degree and over all of them.
    choices = dict.fromkeys([*((tp,) for tp in degrees if tp in alone), tuple(degrees)])
    choices.pop((), None)
    plain = {tp: _rates(types, tp, recompute=False) for tp in degrees}
    yield from _each_type_alone(types, choices, plain)
    yield from _chosen_by_rate(types, choices, plain)
    stretched = {tp: _rates(types, tp, recompute=True) for tp in degrees}
    if any(np.any(stretched[tp][1].slope_s < plain[tp][1].slope_s) for tp in degrees):
        yield from _each_type_alone(types, choices, stretched)
        yield from _chosen_by_rate(types, choices, stretched)


def _chosen_by_rate(
    types: DeviceTypes,
    choices: Iterable[Sequence[int]],
    rates: Mapping[int, tuple[IntArray, PipelineRates]],
) -> Iterator[list[Group]]:
    """Yield for each choice of degrees the pipelines that finish the most micro-batches."""
    for chosen in choices:
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
    types: DeviceTypes,
    choices: Iterable[Sequence[int]],
    rates: Mapping[int, tuple[IntArray, PipelineRates]],
) -> Iterator[list[Group]]:
    """Yield groupings without mixed pipelines: the best degrees and lengths of each type, combined.

    By a time T, n pipelines that take t for a micro-batch and f to fill finish n·(T - f)/t. Types
    add up, so the best options of all types are the best combination. Newton steps find the T by
    which all is finished. Slightly slower options may leave more memory and exchange less, so
    several combinations are tried for each choice of degrees.
    """
    kinds = range(len(types.names))
    every = {tp: [list(_alone(types, tp, kind, rates[tp])) for kind in kinds] for tp in rates}
    for degrees in choices:
        rows = [[option for tp in degrees for option in every[tp][kind]] for kind in kinds]
        options = [found for found in rows if found]
        if options:
            for choice in _best_choices(options, types.estimator.workload.num_microbatches):
                yield [group for option in choice for group in option.groups(types)]


def _best_choices(
    options: Sequence[Sequence["_Alone"]], num_microbatches: int
) -> list[tuple["_Alone", ...]]:
    """Return the combinations of one option for each type that finish the most, best first."""
    time_s = math.inf
    for _ in range(_NEWTON_STEPS):
        best = [max(found, key=lambda option: option.finished(time_s)) for found in options]
        lost = sum(option.num_groups * option.fill_s / option.slope_s for option in best)
        time_s = (num_microbatches + lost) / sum(option.finished(math.inf) for option in best)
    likeliest = [
        heapq.nsmallest(_LIKELIEST, found, key=lambda option: -option.finished(time_s))
        for found in options
    ]
    return heapq.nsmallest(
        _COMBINED,
        itertools.product(*likeliest),
        key=lambda choice: -sum(option.finished(time_s) for option in choice),
    )


class _Alone(NamedTuple):
    """Pipelines of one device type: its units, dealt evenly."""

    kind: int
    tp_degree: int
    num_groups: int
    slope_s: float
    fill_s: float

    def finished(self, time_s: float) -> float:
        """Return about the micro-batches finished by a time; those per second if it is infinite."""
        if time_s == math.inf:
            return self.num_groups / self.slope_s
        return self.num_groups * (time_s - self.fill_s) / self.slope_s

    def groups(self, types: DeviceTypes) -> list[Group]:
        """Return the groups of these pipelines."""
        units = [0] * len(types.names)
        units[self.kind] = types.units(self.tp_degree)[self.kind]
        rows = [row for row, repeats in deal_evenly(units, self.num_groups) for _ in range(repeats)]
        return types.groups(self.tp_degree, rows)


def _alone(
    types: DeviceTypes, tp_degree: int, kind: int, found: tuple[IntArray, PipelineRates]
) -> Iterator[_Alone]:
    """Yield the options of one type at one degree: its units dealt over numbers of pipelines.

    With P units, g pipelines are taken to be as fast as pipelines of about P/g stages.
    """
    compositions, rates = found
    lengths, num_units = compositions[:, kind], types.units(tp_degree)[kind]
    alone = (lengths == compositions.sum(axis=1)) & np.isfinite(rates.slope_s)
    rows = {int(lengths[row]): row for row in np.flatnonzero(alone).tolist()}
    numbers = {number for size in rows for number in (num_units // size, -(-num_units // size))}
    for number in sorted(numbers, reverse=True):
        size = min(rows, key=lambda size: abs(num_units / number - size))
        share = num_units / number / size
        slope_s, fill_s = float(rates.slope_s[rows[size]]), float(rates.fill_s[rows[size]])
        yield _Alone(kind, tp_degree, number, slope_s / share, fill_s)


def _every_one(types: DeviceTypes, tp_degrees: Sequence[int]) -> Iterator[list[Group]]:
    """Yield every grouping if there are few, else nothing."""
    found = every_grouping(
        types.totals.tolist(),
        {tp: types.units(tp) for tp in tp_degrees},
        most_stages=types.estimator.num_layers,
        most_pipelines=types.estimator.workload.num_microbatches,
        most=_MAX_EVERY_GROUPING,
    )
    for grouping in found or ():
        yield [group for tp, row in grouping for group in types.groups(tp, [row])]


def _rates(
    types: DeviceTypes, tp_degree: int, *, recompute: bool
) -> tuple[IntArray, PipelineRates]:
    """Return a TP degree's compositions and their rates, with `recompute` as if it cost nothing."""
    estimator = types.estimator
    units = types.units(tp_degree)
    longest = _max_stages(units, estimator.num_layers)
    compositions = enumerate_compositions(units, longest)
    lengths = compositions.sum(axis=1)
    total = estimator.workload.num_microbatches
    uses = [
        MemoryUse(
            num_pipelines=max(1, sum(units) // length),
            num_in_flight=min((length + 2) // 2, total),
            owned_params=0.0 if recompute else None,
        )
        for length in range(1, longest + 1)
    ]
    most = np.array(
        [estimator.most_layers(node, tp_degree, uses, recompute=recompute) for node in types.nodes]
    )
    pairs = [
        estimator.stage_times_s(node, tp_degree, first=False, last=False) for node in types.nodes
    ]
    times = [np.maximum.accumulate(forward + backward) for forward, backward in pairs]
    slope = np.full(len(compositions), np.inf)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        slope[rows] = bottleneck_times_s(compositions[rows], times, most[:, length - 1])
    return compositions, PipelineRates(
        devices=compositions * tp_degree,
        slope_s=slope,
        fill_s=np.where(np.isfinite(slope), slope, 0.0) * (lengths - 1),
    )
