"""How many layers each stage of a pipeline holds (AutoHet §III-C, Eq. 4), exactly.

With n_i layers on stage i, the programme is

    minimise    max_i time_i(n_i), then Σ_i time_i(n_i)
    subject to  Σ_i n_i = num_layers, n_i ≥ 1,
                memory_i(n_i) ≤ capacity_i.

time_i is the seconds of a micro-batch's forward and backward on stage i, embedding and head
included (the paper prints the fraction l_i/g_i upside down); memory_i counts the micro-batches that
the stage holds at once. The functions are tables, so they need be neither linear nor monotone: a
dynamic programme over (stage, layers placed) finds the least maximum, a second one the least sum
among the splits that reach it.
"""

from collections.abc import Sequence

import numpy as np

from lightning_hetero.core.arrays import FloatArray

__all__ = ["balance_layers"]


def balance_layers(times_s: Sequence[FloatArray], num_layers: int) -> tuple[int, ...] | None:
    """Return layers per stage, or None if no split fits.

    Args:
        times_s: For every stage, seconds of a micro-batch with 0, 1, ..., `num_layers` layers;
            infinite where that many don't fit into the stage's memory. Entry 0 is ignored.
        num_layers: Layers to place.
    """
    if not 1 <= len(times_s) <= num_layers:
        return None
    tables = [np.asarray(times, dtype=np.float64).copy() for times in times_s]
    for table in tables:
        table[0] = np.inf
    least_max = _solve(tables, num_layers, np.maximum)
    if least_max is None:
        return None
    slowest = max(table[n] for table, n in zip(tables, least_max, strict=True))
    within = [np.where(table <= slowest, table, np.inf) for table in tables]
    return _solve(within, num_layers, np.add)


def _solve(
    tables: Sequence[FloatArray], num_layers: int, combine: np.ufunc
) -> tuple[int, ...] | None:
    """Minimise the stages' combined times; `combine` is maximum or add."""
    placed = np.arange(num_layers + 1)
    # before[l, n]: layers already placed when n more make l; a dummy entry where n > l.
    before = placed[:, None] - placed[None, :]
    before[before < 0] = num_layers + 1
    best = np.full(num_layers + 2, np.inf)
    best[0] = 0.0
    choices = []
    for table in tables:
        cost = combine(best[before], table[None, :])
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
