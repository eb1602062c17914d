"""Compute a lower bound on the iteration time T of every plan.

Stage i of a pipeline, which takes t_i for a micro-batch, waits while the first one passes the
stages before it and while the last one's gradient passes back through them, so with K micro-batches
K·t_i + t_1 + ... + t_{i-1} ≤ T. If stage i finishes at most s_i layers a second, its n_i layers
take t_i ≥ n_i/s_i, and all L layers are placed only if

    K·L ≤ T·Σ_i s_i·(1 - 1/K)^(i-1),    s_1 ≥ s_2 ≥ ...

Feasible t_i stay feasible when sorted, so the fastest stage may be given the most. Whole layers and
memory limit the bottleneck, which gives K ≤ T/bottleneck. Stages may differ in TP degree, so a
composition counts a pipeline's units of each device type and degree. It finishes at most K(T)
micro-batches by T. The bound is the least T by which a fractional mix of compositions within the
cluster finishes them all. Exchange, links and optimizer are left out, which only lowers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.estimating.recompute_tables import MemoryUse
from lightning_hetero.planner.solvers.rates import best_mix, bottleneck_times_s

__all__ = [
    "UnitKind",
    "UnitSpeeds",
    "bound_iteration_price",
    "bound_iteration_time_s",
    "bound_work_s",
    "finished_microbatches",
    "measure_speeds",
]


class UnitKind(NamedTuple):
    """A kind of tensor-parallel group; groups of one kind are equally fast."""

    node: int
    """A node of their device type."""
    device_type: int
    """Index of that type."""
    tp_degree: int
    """Devices of each group."""


@dataclass(frozen=True, kw_only=True)
class UnitSpeeds:
    """The best speeds of units over all numbers of layers."""

    layers_per_s: FloatArray
    """Layers that a unit of each kind finishes a second, forward and backward."""
    extra_layers: float
    """Work of embedding and head, counted in layers, on the kind where it is least."""


def measure_speeds(estimator: Estimator, kinds: Sequence[UnitKind]) -> UnitSpeeds:
    """Return the best speeds of units of each kind."""
    speeds, extras = [], []
    sizes = np.arange(1, estimator.num_layers + 1)
    for node, _, tp_degree in kinds:
        middle, with_ends = (
            np.sum(estimator.stage_times_s(node, tp_degree, first=ends, last=ends), axis=0)[1:]
            for ends in (False, True)
        )
        speeds.append(float((sizes / middle).max()))
        if np.isfinite(middle).all():
            extras.append(max(0.0, float((with_ends - middle).min())) * speeds[-1])
    return UnitSpeeds(layers_per_s=np.array(speeds), extra_layers=min(extras, default=0.0))


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
    kinds: Sequence[UnitKind],
    totals: IntArray,
    compositions: IntArray,
    upper_s: float,
) -> float:
    """Return a lower bound in seconds on the iteration of every plan; 0 if nothing fits.

    Args:
        estimator: Costs, workload and cluster.
        kinds: The kinds of units that a stage may be.
        totals: Devices of each type.
        compositions: [compositions, kinds] units of a pipeline. Must be complete: the bound
            doesn't hold for plans with other pipelines.
        upper_s: Iteration time of a known plan.
    """
    total = estimator.workload.num_microbatches
    sizes: IntArray = np.zeros((len(kinds), len(totals)), dtype=np.int64)
    for row, kind in zip(sizes, kinds, strict=True):
        row[kind.device_type] = kind.tp_degree
    rows = compositions[(compositions @ sizes <= totals).all(axis=1)]
    bottleneck_s = _bottlenecks_s(estimator, kinds, rows)
    fits = np.isfinite(bottleneck_s)
    if not fits.any():
        return 0.0
    rows, bottleneck_s, devices = rows[fits], bottleneck_s[fits], rows[fits] @ sizes
    speeds = measure_speeds(estimator, kinds)

    def finishes_all(time_s: float) -> bool:
        work = finished_microbatches(rows, speeds, estimator.num_layers, time_s, total)
        return best_mix(devices, np.minimum(work, time_s / bottleneck_s), totals) >= total

    low = bound_work_s(estimator, kinds, totals)
    high = max(low, upper_s)
    while high - low > 2e-3 * upper_s:
        middle = (low + high) / 2
        if finishes_all(middle):
            high = middle
        else:
            low = middle
    return low


def bound_work_s(estimator: Estimator, kinds: Sequence[UnitKind], totals: IntArray) -> float:
    """Return the seconds of all layers on all devices at their best degree, without bubbles.

    Args:
        estimator: Costs, workload and cluster.
        kinds: The kinds of units that a stage may be.
        totals: Devices of each type.
    """
    per_device = np.zeros(len(totals))
    speeds = measure_speeds(estimator, kinds).layers_per_s
    for kind, speed in zip(kinds, speeds.tolist(), strict=True):
        best = per_device[kind.device_type], speed / kind.tp_degree
        per_device[kind.device_type] = max(best)
    return float(estimator.workload.num_microbatches * estimator.num_layers / (totals @ per_device))


def _bottlenecks_s(estimator: Estimator, kinds: Sequence[UnitKind], rows: IntArray) -> FloatArray:
    """Return each composition's least bottleneck; infinite where the model doesn't fit."""
    total = estimator.workload.num_microbatches
    pairs = [estimator.stage_times_s(k.node, k.tp_degree, first=False, last=False) for k in kinds]
    # Least times of n or more layers: a profile's noise must not raise the bound.
    times = [np.minimum.accumulate((f + b)[::-1])[::-1] for f, b in pairs]
    # For a bound, stages may recompute everything at no cost. They own nothing, or are a single
    # pipeline's, which needs no buffers for pushes.
    uses = (
        MemoryUse(num_pipelines=total, num_in_flight=1, owned_params=0.0),
        MemoryUse(num_pipelines=1, num_in_flight=1),
    )
    most = [
        max(
            int(estimator.most_layers(kind.node, kind.tp_degree, [use], recompute=True)[0])
            for use in uses
        )
        for kind in kinds
    ]
    return bottleneck_times_s(rows, times, np.array(most))


def bound_iteration_price(estimator: Estimator, tp_degrees: Sequence[int]) -> float | None:
    """Return a lower bound on the price of an iteration, or None if a node has no price.

    A device is paid for at least as long as it works, so no layer and no head costs less than on
    the device and at the TP degree where it is cheapest.
    """
    layer, ends = np.inf, np.inf
    for node, entry in enumerate(estimator.cost.cluster.nodes):
        if entry.price_per_hour is None:
            return None
        for tp_degree in tp_degrees:
            if tp_degree <= entry.count:
                speeds = measure_speeds(estimator, [UnitKind(node, 0, tp_degree)])
                price_per_s = entry.price_per_hour / 3600 / entry.count * tp_degree
                price = price_per_s / float(speeds.layers_per_s[0])
                layer, ends = min(layer, price), min(ends, price * speeds.extra_layers)
    work = estimator.num_layers * layer + ends
    return float(estimator.workload.num_microbatches * work)
