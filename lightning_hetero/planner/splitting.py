"""Split layers over the stages of pipelines that run few micro-batches, or have slow links.

With a bottleneck t the fastest stages take as many layers as t allows, and the others one. Balanced
stages have the least t, but not the least sum of stages, which fills a pipeline: so several t are
tried. From the best split, layers move while the pipeline ends sooner. Many pipelines are split at
once: their splits are timed together.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.pace import finish_s
from lightning_hetero.planner.stages import Option

__all__ = ["Splits"]

_LEVELS, _LOOSEST = 24, 12.0
"""Bottlenecks for which layers are split, and the highest in units of the least one, less 1."""
_MOVES = 3
"""Moves of layers after that, at most."""
_FEW_STAGES = 10
"""Stages up to which any one gives layers to any other; of more, only neighbours do."""
_AT_ONCE = 4_000
"""Splits that are timed at once; more need memory and gain no time."""

_Wanted = tuple[tuple[Option, ...], tuple[bool, ...] | None, int]
"""Stages, whether neighbours share a node (None before placement), and micro-batches."""
_Layers = tuple[int, ...] | None


class _Times(Protocol):
    def balance(self, options: tuple[Option, ...]) -> _Layers: ...
    def split_rows(self, options: tuple[Option, ...]) -> FloatArray: ...
    def hops_s(
        self, options: tuple[Option, ...], placed: tuple[bool, ...] | None
    ) -> list[tuple[float, float]]: ...


@dataclass(eq=False)
class _Search:
    """The splits of one pipeline."""

    rows: FloatArray
    """[8, stages, layers] seconds, as `finish_s` takes them."""
    hops_s: FloatArray
    """[2, stages - 1] seconds of messages, to the next stage and back."""
    tried: IntArray
    """[splits, stages] layers that are timed next."""
    best: IntArray
    best_s: float = float("inf")

    def step(self, ends_s: FloatArray) -> bool:
        """Take when the tried splits end; return whether moves from the best one are left."""
        index = int(np.argmin(ends_s))
        if not ends_s[index] < self.best_s * (1 - 1e-6):
            return False
        self.best, self.best_s = self.tried[index], float(ends_s[index])
        moved = self.best + _moves(len(self.best))
        self.tried = moved[(moved > 0).all(axis=1)]
        return len(self.tried) > 0


class Splits:
    """Finds, for pipelines of few micro-batches, the layers with which they end soonest.

    Args:
        times: Times of the pipelines' stages and messages.
    """

    def __init__(self, times: _Times) -> None:
        self.times = times
        self._known: dict[_Wanted, _Layers] = {}

    def of(self, every: Iterable[_Wanted]) -> list[_Layers]:
        """Return the layers of pipelines; None for one that fits with no layers."""
        wanted = list(every)
        searches: dict[_Wanted, _Search] = {}
        for item in dict.fromkeys(wanted):
            if item not in self._known:
                options, placed, _ = item
                balanced = self.times.balance(options)
                self._known[item] = balanced
                if balanced is not None and len(options) > 1:
                    searches[item] = self._begin(options, placed, np.array(balanced))
        alike: dict[tuple[int, int], list[_Search]] = {}
        for (options, _, count), search in searches.items():
            alike.setdefault((len(options), count), []).append(search)
        for (_, count), group in alike.items():
            active = group
            for _ in range(_MOVES):
                ends = [row for part in _parts(active) for row in _ends_s(part, count)]
                active = [s for s, row in zip(active, ends, strict=True) if s.step(row)]
                if not active:
                    break
        for item, search in searches.items():
            self._known[item] = tuple(search.best.tolist())
        return [self._known[item] for item in wanted]

    def _begin(
        self, options: tuple[Option, ...], placed: tuple[bool, ...] | None, balanced: IntArray
    ) -> _Search:
        rows = self.times.split_rows(options)
        hops_s = np.array(self.times.hops_s(options, placed)).T
        seconds = rows[0] + rows[1]
        return _Search(rows, hops_s, _for_bottlenecks(seconds, balanced), balanced)


def _for_bottlenecks(seconds: FloatArray, balanced: IntArray) -> IntArray:
    """Return [splits, stages] the balanced layers, and those for higher bottlenecks.

    Args:
        seconds: [stages, layers] of a micro-batch, infinite where layers don't fit.
        balanced: Layers of each stage with the lowest bottleneck.
    """
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


def _parts(searches: list[_Search]) -> Iterator[list[_Search]]:
    """Yield searches whose splits are timed at once."""
    part: list[_Search] = []
    for search in searches:
        if part and sum(len(s.tried) for s in part) + len(search.tried) > _AT_ONCE:
            yield part
            part = []
        part.append(search)
    if part:
        yield part


def _ends_s(searches: list[_Search], count: int) -> list[FloatArray]:
    """Return when the splits that each search tries end, all with equally many stages."""
    places = np.arange(len(searches[0].best))
    rows = np.concatenate([s.rows[:, places, s.tried] for s in searches], axis=1)
    sizes = [len(s.tried) for s in searches]
    there_s, back_s = np.repeat(np.stack([s.hops_s for s in searches], axis=1), sizes, axis=1)
    forward_s, backward_s, *exchange = rows
    fits = np.isfinite(backward_s)
    work_s = forward_s, np.where(fits, backward_s, 0.0)
    _, ends_s = finish_s(work_s, (there_s, back_s), exchange, count)
    ends_s[~fits.all(axis=1)] = np.inf
    return np.split(ends_s, np.cumsum(sizes)[:-1])


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
