"""Choose how many layers each stage of a pipeline holds, exactly (AutoHet §III-C, Eq. 4).

With n_i layers on stage i, the programme is

    minimise    max_i time_i(n_i), then Σ_i time_i(n_i)
    subject to  Σ_i n_i = num_layers, n_i ≥ 1,
                memory_i(n_i) ≤ capacity_i.

time_i is the seconds of a micro-batch's forward and backward on stage i, embedding and head
included (the paper prints the fraction l_i/g_i upside down); memory_i counts the micro-batches that
the stage holds at once. The functions are tables, so they need be neither linear nor monotone: a
dynamic programme over (stage, layers placed) finds the least maximum, a second one the least sum
among the splits that reach it. If times rise with layers, as they nearly always do, bisection finds
the least maximum.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.plan import PipelinePlan, StagePlan

__all__ = ["balance_layers", "split_layers", "without_chunks"]


def balance_layers(times_s: Sequence[FloatArray], num_layers: int) -> tuple[int, ...] | None:
    """Return layers per stage, or None if no split fits.

    Args:
        times_s: For every stage, seconds of a micro-batch with 0, 1, ..., `num_layers` layers;
            infinite where that many don't fit into the stage's memory. Entry 0 is ignored.
        num_layers: Layers to place.
    """
    if not 1 <= len(times_s) <= num_layers:
        return None
    tables = np.array(times_s, dtype=np.float64)
    tables[:, 0] = np.inf
    slowest = _least_slowest(tables, num_layers)
    if slowest is None:
        return None
    return split_layers(np.where(tables <= slowest, tables, np.inf), num_layers, np.add)


def _least_slowest(tables: FloatArray, num_layers: int) -> float | None:
    """Return the least maximum of the stages' times, or None if no split fits."""
    if not (tables[:, 1:-1] <= tables[:, 2:]).all():
        split = split_layers(tables, num_layers, np.maximum)
        if split is None:
            return None
        return float(tables[np.arange(len(tables)), split].max())
    # If more layers take longer, a limit on their time says how many layers each stage can hold.
    levels = np.sort(tables[:, 1:], axis=None)
    low, high = int(np.searchsorted(levels, tables[:, 1].max())), len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if (tables <= levels[middle]).sum() >= num_layers:
            high = middle
        else:
            low = middle + 1
    level = float(levels[low])
    enough = (tables <= level).sum() >= num_layers
    return level if enough and level < np.inf else None


def split_layers(tables: FloatArray, num_layers: int, combine: np.ufunc) -> tuple[int, ...] | None:
    """Return the split of least times, combined by maximum or add; None if no split fits."""
    placed = np.arange(num_layers + 1)
    best = np.full(num_layers + 2, np.inf)
    best[0] = 0.0
    choices = []
    for table in tables:
        # before[l, n]: layers already placed when n more make l; a dummy entry where n > l.
        most = int(np.flatnonzero(table < np.inf).max(initial=0))
        before = _layers_before(num_layers)[:, : most + 1]
        cost = combine(best[before], table[: most + 1])
        choice = np.argmin(cost, axis=1)
        choices.append(choice)
        best[:-1] = cost[placed, choice]
    if not np.isfinite(best[num_layers]):
        return None
    layers: list[int] = []
    left = num_layers
    for choice in reversed(choices):
        layers.append(int(choice[left]))
        left -= layers[-1]
    return tuple(reversed(layers))


@lru_cache
def _layers_before(num_layers: int) -> IntArray:
    placed = np.arange(num_layers + 1)
    before: IntArray = placed[:, None] - placed[None, :]
    before[before < 0] = num_layers + 1
    return before


def without_chunks(pipeline: PipelinePlan) -> PipelinePlan:
    """Return a pipeline with all layers of the same ranks in one stage, as estimates see it."""
    if not pipeline.has_chunks:
        return pipeline
    stages, stop = [], 0
    for group in pipeline.groups:
        own = [stage for stage in pipeline.stages if stage.ranks == group]
        start, stop = stop, stop + sum(len(stage.layers) for stage in own)
        given = {
            name: sum(getattr(stage, name) or 0 for stage in own) or None
            for name in own[0].recomputation
        }
        stages.append(StagePlan(ranks=group, layers=range(start, stop), **given))
    return replace(pipeline, stages=tuple(stages))
