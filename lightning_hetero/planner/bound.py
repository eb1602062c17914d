"""No plan can be faster than this: a lower bound on the iteration time of every plan.

Stage i of a pipeline waits while the first micro-batch passes the stages before it and while the
last one's gradient passes them back, so with K micro-batches K·t_i + t_1 + ... + t_{i-1} ≤ T. If
unit i finishes at most s_i layers a second, the n_i layers it holds cost t_i ≥ n_i/s_i, and all L
layers are placed only if

    K·L ≤ T·Σ_i s_i·(1 - 1/K)^(i-1),    s_1 ≥ s_2 ≥ ...

The best stage holds the most because the feasible t may be sorted that way. Whole layers and memory
give K ≤ T/bottleneck as well. So a composition finishes at most K(T) micro-batches by T, and if no
fractional mix of compositions within the cluster finishes all of them, no plan does: the least T
that passes is the bound. Exchange, links and optimizer are left out, which only lowers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.estimator import Estimator
from lightning_hetero.planner.rates import best_mix, bottleneck_times_s

__all__ = [
    "UnitSpeeds",
    "bound_iteration_price",
    "bound_iteration_time_s",
    "bound_work_s",
    "finished_microbatches",
    "measure_speeds",
]


@dataclass(frozen=True, kw_only=True)
class UnitSpeeds:
    """The best speeds of units of one TP degree."""

    tp_degree: int
    """Devices of a unit."""
    layers_per_s: FloatArray
    """Layers that a unit of each type finishes a second, forward and backward."""
    extra_layers: float
    """Work of embedding and head in layers, on the type where it is least."""


def measure_speeds(estimator: Estimator, nodes: Sequence[int], tp_degree: int) -> UnitSpeeds:
    """Return the best speeds of units on one node of each type."""
    speeds, extras = [], []
    sizes = np.arange(1, estimator.num_layers + 1)
    for node in nodes:
        middle, with_ends = (
            np.sum(estimator.stage_times_s(node, tp_degree, first=ends, last=ends), axis=0)[1:]
            for ends in (False, True)
        )
        speeds.append(float((sizes / middle).max()))
        if np.isfinite(middle).all():
            extras.append(max(0.0, float((with_ends - middle).min())) * speeds[-1])
    return UnitSpeeds(
        tp_degree=tp_degree, layers_per_s=np.array(speeds), extra_layers=min(extras, default=0.0)
    )


def finished_microbatches(
    compositions: IntArray, speeds: UnitSpeeds, num_layers: int, time_s: float, most: int
) -> FloatArray:
    """Return an upper bound on the micro-batches that each composition finishes by a time.

    `most` is the most that a pipeline can be given. Iterates K ← T·Σ s_i·(1-1/K)^(i-1)/L from
    above, so that every iterate is a bound.
    """
    order = np.argsort(-speeds.layers_per_s, kind="stable")
    work = num_layers + speeds.extra_layers
    finished: FloatArray = time_s * (compositions @ speeds.layers_per_s) / work
    for _ in range(4):
        ratio = 1.0 - 1.0 / np.clip(finished, 1.0 + 1e-9, most + 1e-9)
        start, total = np.ones(len(compositions)), np.zeros(len(compositions))
        for kind in order:
            end = start * ratio ** compositions[:, kind]
            total += speeds.layers_per_s[kind] * (start - end) / (1.0 - ratio)
            start = end
        finished = np.minimum(finished, time_s * total / work)
    return np.minimum(finished, most)


def bound_iteration_time_s(
    estimator: Estimator,
    nodes: Sequence[int],
    totals: IntArray,
    compositions: dict[int, IntArray],
    upper_s: float,
) -> float:
    """Return seconds that every plan takes at least.

    Args:
        estimator: Costs, workload and cluster.
        nodes: One node of each device type.
        totals: Devices of each type.
        compositions: For every TP degree the compositions a pipeline may have: all of them, or the
            bound says nothing about the others.
        upper_s: Seconds of a plan that exists.
    """
    total = estimator.workload.num_microbatches
    parts = [
        _compositions_that_fit(estimator, nodes, tp_degree, rows)
        for tp_degree, rows in compositions.items()
    ]
    devices = np.concatenate([part.rows * part.speeds.tp_degree for part in parts])
    if not len(devices):
        return 0.0

    def finishes_all(time_s: float) -> bool:
        work = np.concatenate(
            [
                np.minimum(
                    finished_microbatches(
                        part.rows, part.speeds, estimator.num_layers, time_s, total
                    ),
                    time_s / part.bottleneck_s,
                )
                for part in parts
            ]
        )
        return best_mix(devices, work, totals) >= total

    low = bound_work_s(estimator, nodes, totals, list(compositions))
    high = max(low, upper_s)
    while high - low > 2e-3 * upper_s:
        middle = (low + high) / 2
        if finishes_all(middle):
            high = middle
        else:
            low = middle
    return low


def bound_work_s(
    estimator: Estimator, nodes: Sequence[int], totals: IntArray, tp_degrees: Sequence[int]
) -> float:
    """Return seconds that all layers take with all devices at their best, without bubbles.

    Args:
        estimator: Costs, workload and cluster.
        nodes: One node of each device type.
        totals: Devices of each type.
        tp_degrees: TP degrees that a stage may have.
    """
    per_device = np.max(
        [measure_speeds(estimator, nodes, tp).layers_per_s / tp for tp in tp_degrees], axis=0
    )
    return float(estimator.workload.num_microbatches * estimator.num_layers / (totals @ per_device))


class _Part(NamedTuple):
    """Compositions of one TP degree that hold the model."""

    rows: IntArray
    bottleneck_s: FloatArray
    speeds: UnitSpeeds


def _compositions_that_fit(
    estimator: Estimator, nodes: Sequence[int], tp_degree: int, rows: IntArray
) -> _Part:
    total = estimator.workload.num_microbatches
    pairs = [estimator.stage_times_s(node, tp_degree, first=False, last=False) for node in nodes]
    # Least times of n or more layers: a profile's noise must not raise the bound.
    times = [np.minimum.accumulate((f + b)[::-1])[::-1] for f, b in pairs]
    most = np.array(
        [estimator.most_layers(node, tp_degree, (False, False), total, 1) for node in nodes]
    )
    bottleneck_s = bottleneck_times_s(rows, times, most)
    fits = np.isfinite(bottleneck_s)
    return _Part(rows[fits], bottleneck_s[fits], measure_speeds(estimator, nodes, tp_degree))


def bound_iteration_price(estimator: Estimator, tp_degrees: Sequence[int]) -> float | None:
    """Return the least price of an iteration under any plan, or None if a node has no price.

    A device is paid for at least as long as it works, so no layer and no head costs less than on
    the device and at the TP degree where it is cheapest.
    """
    layer, ends = np.inf, np.inf
    for node, entry in enumerate(estimator.cost.cluster.nodes):
        if entry.price_per_hour is None:
            return None
        for tp_degree in tp_degrees:
            if tp_degree <= entry.count:
                speeds = measure_speeds(estimator, [node], tp_degree)
                price_per_s = entry.price_per_hour / 3600 / entry.count * tp_degree
                price = price_per_s / float(speeds.layers_per_s[0])
                layer, ends = min(layer, price), min(ends, price * speeds.extra_layers)
    work = estimator.num_layers * layer + ends
    return float(estimator.workload.num_microbatches * work)
