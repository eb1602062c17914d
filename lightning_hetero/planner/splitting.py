"""Choose layers for pipelines of few micro-batches: those with which they end soonest.

Balanced stages have the least bottleneck t, but not the least sum of stages, which fills a
pipeline. With a higher t the fastest stages take as many layers as t allows, and the others one: so
several t are tried. From the best split, layers move while the pipeline ends sooner. Many pipelines
are split at once: their splits are timed together. Stages are also put in other orders, halved and
joined, as prices know little of messages between them.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.planner.columns import Column, ColumnTimes
from lightning_hetero.planner.placement import Option

_LEVELS, _LOOSEST = 24, 12.0
"""How many bottlenecks are tried, from the least one t to (1 + 12)·t."""
_MOVES = 3
"""Most times that layers are moved after that."""
_FEW_STAGES = 10
"""In pipelines of up to this many stages any two exchange layers; in longer ones only neighbours
do."""
_FEW_BLOCKS = 3
"""Number of blocks of equal stages up to which all orders of a pipeline's blocks are tried."""
_AT_ONCE = 16
"""Pipelines whose splits are timed in one call; more need memory and gain no time."""


def best_layers(
    times: ColumnTimes, wanted: Iterable[tuple[Column, int]]
) -> list[tuple[int, ...] | None]:
    """Return layers for columns and their micro-batches; None for one that doesn't fit.

    Args:
        times: Times of the columns' stages and messages.
        wanted: Columns without layers, and their micro-batches.
    """
    every, known = list(wanted), times.splits
    alike: dict[tuple[int, int], list[tuple[Column, int]]] = {}
    for item in every:
        column, count = item
        if item not in known:
            known[item] = times.balance(column.options)
            if known[item] is not None and len(column.options) > 1:
                alike.setdefault((len(column.options), count), []).append(item)
    for (_, count), group in alike.items():
        for start in range(0, len(group), _AT_ONCE):
            part = group[start : start + _AT_ONCE]
            balanced = [np.array(known[item]) for item in part]
            found = _improved(times, [column for column, _ in part], balanced, count)
            known.update(zip(part, found, strict=True))
    return [known[item] for item in every]


def _improved(
    times: ColumnTimes, columns: list[Column], balanced: list[IntArray], count: int
) -> list[tuple[int, ...]]:
    """Return layers for columns that have the same number of stages."""
    best, best_s = list(balanced), [np.inf] * len(columns)
    tried = [_for_bottlenecks(times, *pair) for pair in zip(columns, balanced, strict=True)]
    active = list(range(len(columns)))
    for _ in range(_MOVES):
        own = [columns[i] for i in active], [tried[i] for i in active]
        still = []
        for i, ends_s in zip(active, times.ends_s(*own, count), strict=True):
            at = int(np.argmin(ends_s))
            if ends_s[at] < best_s[i] * (1 - 1e-6):
                best[i], best_s[i] = tried[i][at], float(ends_s[at])
                moved = best[i] + _moves(len(best[i]))
                tried[i] = moved[(moved > 0).all(axis=1)]
                still += [i] if len(tried[i]) else []
        active = still
        if not active:
            break
    return [tuple(row.tolist()) for row in best]


def _for_bottlenecks(times: ColumnTimes, column: Column, balanced: IntArray) -> IntArray:
    """Return [splits, stages] the balanced layers, and those for higher bottlenecks."""
    seconds = times.stage_s(column.options)
    num_stages, num_layers = len(balanced), seconds.shape[1] - 1
    least_s = float(seconds[np.arange(num_stages), balanced].max())
    levels = least_s * (1 + _LOOSEST * np.linspace(0, 1, _LEVELS) ** 3)
    rising = np.maximum.accumulate(seconds[:, 1:], axis=1)
    most = np.stack([np.searchsorted(row, levels, side="right") for row in rising], axis=1)
    splits = np.ones_like(most)
    left = np.full(len(levels), num_layers - num_stages)
    per_layer = [float(row[n - 1] / n) for row, n in zip(rising, most[-1], strict=True)]
    for stage in np.argsort(per_layer, kind="stable").tolist():
        more = np.minimum(np.maximum(most[:, stage] - 1, 0), left)
        splits[:, stage] += more
        left -= more
    found: IntArray = np.unique(np.vstack([splits[left == 0], balanced]), axis=0)
    return found


@lru_cache
def _moves(num_stages: int) -> IntArray:
    """Return [moves, stages] layers that stages take from others: 1, 2 or 4 of them."""
    rows = []
    for giver, taker in itertools.permutations(range(num_stages), 2):
        for number in (1, 2, 4) if num_stages <= _FEW_STAGES or abs(giver - taker) == 1 else ():
            row = [0] * num_stages
            row[giver], row[taker] = -number, number
            rows.append(row)
    return np.array(rows)


def turned_stages(options: tuple[Option, ...]) -> list[tuple[Option, ...]]:
    """Return stages with the blocks of equal ones in other orders; many are turned round."""
    blocks = [tuple(block) for _, block in itertools.groupby(options)]
    orders: Iterable[Sequence[tuple[Option, ...]]] = (
        itertools.permutations(blocks) if len(blocks) <= _FEW_BLOCKS else [blocks, blocks[::-1]]
    )
    every = dict.fromkeys(tuple(itertools.chain.from_iterable(order)) for order in orders)
    return list(every)


def cut_stages(options: tuple[Option, ...]) -> Iterator[tuple[Option, ...]]:
    """Yield stages with one halved, or joined to the next, on the same devices.

    Of equal stages in a row it is the first, the middle or the last one.
    """
    start = 0
    for (kind, degree), block in itertools.groupby(options):
        last = start + len(tuple(block)) - 1
        for place in sorted({start, (start + last) // 2, last}):
            before, after = options[:place], options[place + 1 :]
            yield (*before, *[Option(kind, degree // 2)] * 2, *after)
            if after and after[0].node_class == kind:
                yield (*before, Option(kind, degree + after[0].tp_degree), *after[1:])
        start = last + 1
