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

Balanced layers aren't the best ones of pipelines that run few micro-batches: `Splits` finds those.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.plan import PipelinePlan, StagePlan
from lightning_hetero.planner.pace import finish_s
from lightning_hetero.planner.placement import Option

__all__ = ["Splits", "balance_layers", "split_layers", "without_chunks"]

_FINE = 1e7
"""Steps are compared in units of the least one divided by this, so that rounding doesn't count."""


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
    tables = np.where(tables <= slowest, tables, np.inf)
    return _split_by_steps(tables, num_layers) or split_layers(tables, num_layers, np.add)


def _split_by_steps(tables: FloatArray, num_layers: int) -> tuple[int, ...] | None:
    """Return the split of the least sum; None where a further layer may cost less than the last.

    If none does, one layer each and then the cheapest further ones are the best, wherever they are.
    """
    ends = tables[:, 1:]
    with np.errstate(invalid="ignore"):
        steps = np.where(np.isfinite(ends[:, 1:]), ends[:, 1:] - ends[:, :-1], np.inf)
    least = steps.min(initial=np.inf)
    if not 0 < least < np.inf:
        return None
    # Equal stages must not differ by rounding: their layers are dealt to the first of them.
    steps = np.rint(steps / least * _FINE)
    if not (steps[:, :-1] <= steps[:, 1:]).all():
        return None
    order = np.argsort(steps, axis=None, kind="stable")[: num_layers - len(tables)]
    more = np.bincount(order // steps.shape[1], minlength=len(tables))
    return tuple((more + 1).tolist())


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


_LEVELS, _LOOSEST = 24, 12.0
"""How many bottlenecks are tried, from the least one t to (1 + 12)·t."""
_MOVES = 3
"""Most times that layers are moved after that."""
_FEW_STAGES = 10
"""In pipelines of up to so many stages any two exchange layers; in longer ones only neighbours."""
_AT_ONCE = 4_000
"""Most splits timed in one call; more need memory and gain no time."""

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

    With a bottleneck t the fastest stages take as many layers as t allows, and the others one.
    Balanced stages have the least t, but not the least sum of stages, which fills a pipeline: so
    several t are tried. From the best split, layers move while the pipeline ends sooner. Many
    pipelines are split at once: their splits are timed together.

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
