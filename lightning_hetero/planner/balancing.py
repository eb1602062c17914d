"""Choose how many layers each stage of a pipeline holds (AutoHet §III-C, Eq. 4).

With n_i layers on stage i, the programme is

    minimise    max_i time_i(n_i), then Σ_i time_i(n_i)
    subject to  Σ_i n_i = num_layers, n_i ≥ 1,
                memory_i(n_i) ≤ capacity_i.

time_i is the seconds of a micro-batch's forward and backward on stage i, including embedding and
head (the paper prints the fraction l_i/g_i upside down); memory_i includes all micro-batches that
the stage holds at once. Because more layers take longer, giving each next layer to the stage that
then takes least minimises the maximum. Among stages that take no longer than that, giving each to
the stage to which it adds least minimises the sum, unless a layer adds less than the one before it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.plan import PipelinePlan, StagePlan

__all__ = ["balance_layers", "without_chunks"]

_DIGITS = 7
"""Significant digits in which stages are compared, so that equal ones don't differ by rounding."""


def balance_layers(
    times_s: Sequence[FloatArray] | FloatArray, num_layers: int
) -> tuple[int, ...] | None:
    """Return layers per stage, or None if no split fits.

    Args:
        times_s: For every stage, seconds of a micro-batch with 0, 1, ..., `num_layers` layers;
            infinite where that many don't fit into the stage's memory. Entry 0 is ignored.
        num_layers: Layers to place.
    """
    more = num_layers - len(times_s)
    if more < 0:
        return None
    # A profile's noise must not give a layer negative seconds.
    tables = np.maximum.accumulate(np.array(times_s, dtype=np.float64)[:, 1:], axis=1)
    taken = _least(tables[:, 1:], more)
    slowest = tables[np.arange(len(tables)), taken].max()
    if slowest == np.inf:
        return None
    with np.errstate(invalid="ignore"):
        steps = np.diff(np.where(tables <= slowest, tables, np.inf), axis=1)
    steps = np.where(np.isfinite(steps), np.round(steps / slowest, _DIGITS), np.inf)
    return tuple((_least(steps, more) + 1).tolist())


def _least(costs: FloatArray, number: int) -> IntArray:
    """Return [stages] how many of the least costs, [stages, further layers], are a stage's."""
    order = np.argsort(costs, axis=None, kind="stable")[:number]
    return np.bincount(order // max(1, costs.shape[1]), minlength=len(costs))


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
