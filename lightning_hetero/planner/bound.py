"""Bound the iteration time T of every plan from below, by linear programmes priced to optimality.

Stage i of a pipeline takes t_i for a micro-batch. It waits while the first one passes the stages
before it, and while the last one's gradient passes back through them. So with K micro-batches K·t_i
+ t_1 + ... + t_{i-1} ≤ T. If stage i finishes at most s_i layers a second, all L layers can be
placed only if

    L ≤ Σ_i s_i·(T/K)·(1 - 1/K)^(i-1),    s_1 ≥ s_2 ≥ ...

(feasible t_i stay feasible when sorted, so the fastest stage may get the most layers). That says
what a pipeline that finishes K micro-batches needs. With prices π of devices, a dynamic programme
finds the cheapest pipeline for every K. If K ≤ θ·(its price) for all K, no mix of pipelines
finishes more than θ·π·devices by T. If that is less than M, T is a lower bound. Memory, exchange,
links and the optimizer are left out, which only lowers the bound.
"""

from collections.abc import Sequence

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.linear_program import LinearProgram
from lightning_hetero.planner.placement import Option
from lightning_hetero.planner.stages import Stages

_PER_LAYER = 4
"""A layer is counted in this many steps; parts of a layer are rounded up to whole steps."""
_GROWTH = 1.03
"""Factor between the numbers of micro-batches that are tried, from 50 on: a bound loses up to half
of it."""
_CLOSE = 2e-3
"""The bisection ends when the upper and lower limits differ by this share."""
_STEPS, _GUESSES, _CUTS = 16, 2, 8
"""Largest number of values of T that are tried; how many of these are extrapolated before the
interval is halved; and rounds of pricing for each."""

_Taking = tuple[float, FloatArray]
"""What a pipeline finishes by T, and the devices it uses of each class."""


def bound_time_s(every: Sequence[Stages], upper_s: float) -> float:
    """Return a lower bound of the seconds of every plan's iteration.

    Args:
        every: Times and memory of all stages, for each size of micro-batches that is allowed.
        upper_s: Seconds of a plan that was found.
    """
    bounds, total = [_Bound(stages) for stages in every], every[0].workload.global_batch_size
    low_s, time_s, high_s = min([upper_s, *(bound.work_s for bound in bounds)]), upper_s, upper_s
    known: list[_Taking] = []
    for step in range(_STEPS):
        most = _most_finished(bounds, time_s, total, known)
        if most < total * (1 - 1e-9):
            low_s = max(low_s, time_s)
        else:
            high_s = time_s
        if high_s < low_s * (1 + _CLOSE):
            break
        # The number of finished samples is about proportional to the time.
        next_s = time_s * total / most * (1 - _CLOSE / 4) if most else 0.0
        if step >= _GUESSES or not low_s * (1 + _CLOSE / 4) < next_s < high_s:
            next_s = (low_s + high_s) / 2
        known = [(count * next_s / time_s, takes) for count, takes in known]
        time_s = next_s
    return low_s


def bound_price(stages: Stages) -> float | None:
    """Return a lower bound on the price of an iteration, or None if a node has no price.

    A device is paid for at least as long as it works, so no layer or head costs less than on the
    device and at the TP degree where it is cheapest.
    """
    layer, ends = np.inf, np.inf
    for node, entry in enumerate(stages.cost.cluster.nodes):
        if entry.price_per_hour is None:
            return None
        for option in stages.options:
            if option.node_class == stages.class_of_node[node] and option.tp_degree <= entry.count:
                price_per_s = entry.price_per_hour / 3600 / entry.count * option.tp_degree
                speed, extra = _speed(stages, option)
                layer = min(layer, price_per_s / speed)
                ends = min(ends, price_per_s * extra / speed)
    work = stages.num_layers * layer + ends
    return float(stages.workload.num_microbatches * work)


def _speed(stages: Stages, option: Option) -> tuple[float, float]:
    """Return the most layers per second of a stage, and the work of both ends in layers."""
    sizes = np.arange(1, stages.num_layers + 1)
    middle_s, whole_s = (
        stages.times_s(option, ends, ends).sum(axis=0)[1:] for ends in (False, True)
    )
    speed = float((sizes / middle_s).max())
    return speed, max(0.0, float((whole_s - middle_s).min())) * speed


class _Bound:
    def __init__(self, stages: Stages) -> None:
        self.stages, self.total = stages, stages.workload.num_microbatches
        speeds, extras = zip(*(_speed(stages, option) for option in stages.options), strict=True)
        self.speeds, self.extra = np.array(speeds), min(extras)
        self.kinds = list(stages.devices)
        self.devices = np.array([stages.devices[kind] for kind in self.kinds], dtype=float)
        # [options, classes] devices.
        self.takes = np.array(
            [[o.tp_degree * (o.node_class == kind) for kind in self.kinds] for o in stages.options],
            dtype=float,
        )
        best = np.where(self.takes > 0, self.speeds[:, None] / np.maximum(self.takes, 1), 0.0)
        self.per_device: FloatArray = best.max(axis=0)
        """[classes] the most layers per second and device."""
        work = self.total * stages.num_layers
        self.work_s = work / max(1e-300, float(self.devices @ self.per_device))
        small = np.arange(1, min(50, self.total) + 1)
        steps = int(np.log(max(1.0, self.total / 50)) / np.log(_GROWTH)) + 2
        large = np.ceil(50 * _GROWTH ** np.arange(steps)).astype(np.int64)
        tops = np.unique(np.minimum(np.concatenate([small, large]), self.total))
        self.tops: IntArray = tops
        """The largest number of micro-batches of each interval."""
        self.least: IntArray = np.append(1, tops[:-1] + 1)
        """The smallest number of each interval."""

    def cheapest(self, time_s: float, prices: FloatArray) -> tuple[float, list[_Taking]]:
        """Return the largest number of micro-batches for a price of 1, and the best columns."""
        layers = (self.stages.num_layers + self.extra) * _PER_LAYER
        size = int(np.floor(layers + 1e-9)) + 1
        count = len(self.tops)
        cost = np.full((count, size), np.inf)
        cost[:, 0] = 0.0
        price = self.takes @ prices
        steps, costs = [], [cost]
        best = np.full(count, np.inf)
        at = np.zeros(count, dtype=np.int64)
        rows, padded = np.arange(count)[:, None], np.zeros((count, 2 * size))
        for position in range(self.stages.max_stages):
            placed = self._placed(time_s, position).T
            # A stage that places more than is left places the rest, which [0] says costs nothing.
            padded[:, size:] = costs[-1]
            before = np.lib.stride_tricks.sliding_window_view(padded, size, axis=1)
            reached = before[rows, size - np.minimum(placed, size)]
            reached += np.where(placed > 0, price, np.inf)[..., None]
            cost = reached.min(axis=1)
            cost[:, 0] = 0.0
            steps.append(placed)
            costs.append(cost)
            gained = cost[:, -1] < best * (1 - 1e-12)
            at[gained] = position
            best = np.minimum(best, cost[:, -1])
            if not gained.any() and position > 0 and not np.isinf(best).all():
                break
        worth = self.tops / best
        order = np.argsort(-worth, kind="stable")[:4]
        found = [
            (float(self.tops[i]), self._takes(i, int(at[i]), price, steps, costs))
            for i in order.tolist()
            if np.isfinite(best[i])
        ]
        return float(worth.max(initial=0.0)), found

    def _placed(self, time_s: float, position: int) -> IntArray:
        """Return [options, numbers] steps of layers that a stage places at most."""
        left = (1 - 1 / self.tops) ** position if position else np.ones(len(self.tops))
        placed = self.speeds[:, None] * (time_s / self.least * left)[None] * _PER_LAYER
        found: IntArray = np.ceil(placed - 1e-9).astype(np.int64)
        return found

    def _takes(
        self,
        index: int,
        position: int,
        price: FloatArray,
        steps: list[IntArray],
        costs: list[FloatArray],
    ) -> FloatArray:
        """Return the devices of the cheapest pipeline of one number, from its last stage back."""
        found = np.zeros(len(self.kinds))
        left = costs[0].shape[1] - 1
        for place in range(position, -1, -1):
            placed = steps[place][index]
            before = np.maximum(left - placed, 0)
            cost = np.where(placed > 0, costs[place][index, before] + price, np.inf)
            option = int(cost.argmin())
            found += self.takes[option]
            left = int(before[option])
            if not left:
                break
        return found


def _most_finished(
    bounds: Sequence[_Bound], time_s: float, total: int, known: list[_Taking]
) -> float:
    """Return a number of samples that no mix of pipelines exceeds by a time.

    Any prices give such a number; this looks for the prices that give the least.

    Args:
        bounds: Those of each size of micro-batches.
        time_s: Seconds of an iteration.
        total: Samples of an iteration, below which the search ends.
        known: Samples and devices of pipelines, to which new ones are added.
    """
    devices, most = bounds[0].devices, np.inf
    prices = _prices(known, devices)[1] if known else bounds[0].per_device
    for _ in range(_CUTS):
        worth = 0.0
        for bound in bounds:
            size = bound.stages.workload.sequences_per_microbatch
            own, found = bound.cheapest(time_s, prices)
            worth = max(worth, own * size)
            known += [(count * size, takes) for count, takes in found]
        most = min(most, worth * float(prices @ devices))
        if not known or most < total * (1 - _CLOSE):
            break
        value, prices = _prices(known, devices)
        if value > min(total, most * (1 - _CLOSE / 4)):
            break
    return most


def _prices(known: Sequence[_Taking], devices: FloatArray) -> tuple[float, FloatArray]:
    """Return what mixes of some pipelines finish, and prices at which none of them pays."""
    program = LinearProgram()
    value = np.array([count for count, _ in known])
    x = program.add_variables(upper=np.full(len(known), np.inf), cost=-value)
    for column, limit in zip(np.array([t for _, t in known]).T, devices, strict=True):
        program.add_row(x, column, upper=limit)
    solution = program.minimize()
    return -solution.objective, np.maximum(-solution.row_duals, 1e-12)
