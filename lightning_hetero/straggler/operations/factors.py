"""Take each operation's time apart: what its stage, its lengths, its rank and chance made of it.

The time of a forward or backward is its kind's typical time × a factor of its stage × one of its
micro-batch's length × one of its rank × a rest. Lower medians over those that share a factor keep a
single slow rank out of the others. Times of transfers are taken apart by link, in the same way.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.straggler.operations.replay import BACKWARD, FORWARD, TRANSFERS, Replay
from lightning_hetero.straggler.operations.trace import OperationTrace, grouped

__all__ = ["Factors", "low_median"]

_SLOW = 1.1
"""A rank is slow if it takes longer than its like by more than this, and by more than chance."""
_SLOW_LINK = 1.3
_STANDARD_ERRORS = 4.0
_VARIED = 0.1
"""Micro-batches differ in length if their costs do by more than this, at the median."""
_PAUSE, _MOST_PAUSED = 1.5, 0.05
"""A rest above this factor is a pause, if few operations of a kind have one."""
_PAUSE_SHARE = 0.25
"""A pause lasts for at least this share of a typical forward or backward."""


@dataclass(frozen=True)
class Factors:
    """The factors of every operation; `base_s` times all of them is its own time."""

    base_s: FloatArray
    stage: FloatArray
    lengths: FloatArray
    rank: FloatArray
    link: FloatArray
    rest: FloatArray
    paused: BoolArray
    """Which rests are pauses, as booleans."""
    pause_s: FloatArray
    """Pauses that are operations of their own."""
    link_of: IntArray
    """Which link an operation used, -1 for none."""
    links: tuple[str, ...]

    @classmethod
    def find(cls, replay: Replay) -> "Factors":
        """Return the factors of a trace's operations, and of the barriers behind them."""
        trace, own = replay.trace, replay.own_s
        ones, count = np.ones(len(own)), len(trace)
        base, stage, lengths, rank, link = (ones.copy() for _ in range(5))
        ops = np.flatnonzero(trace.are(*FORWARD, *BACKWARD) & (own[:count] > 0))
        if len(ops):
            base[ops], stage[ops], lengths[ops], rank[ops] = _compute(trace, ops, own[ops])
        link_of, links = _link_names(trace)
        link_of[replay.only_waits] = -1
        others = np.setdiff1d(np.arange(len(own)), ops, assume_unique=True)
        base[others] = _typical_rest(replay, others)
        _compare_links(link_of, base, own, link)
        pauses = np.flatnonzero(trace.are("gc"))
        pause_s = np.zeros(len(own))
        pause_s[pauses], base[pauses] = own[pauses], 0.0
        expected = base * stage * lengths * rank * link
        rest = np.divide(own, expected, out=ones, where=expected > 0)
        paused = np.zeros(len(own), bool)
        least_s = _PAUSE_SHARE * np.median(own[ops]) if len(ops) else np.inf
        seldom = (rest[ops] > _PAUSE) & (own[ops] - expected[ops] > least_s)
        if seldom.mean() < _MOST_PAUSED if len(ops) else False:
            paused[ops] = seldom
        return cls(base, stage, lengths, rank, link, rest, paused, pause_s, link_of, links)


def low_median(values: FloatArray, group: IntArray) -> FloatArray:
    """Return the lower median of each group."""
    order = np.lexsort((values, group))
    sizes = np.bincount(group)
    first = np.cumsum(sizes) - sizes
    medians: FloatArray = values[order[first + (sizes - 1) // 2]]
    return medians


def _compute(
    trace: OperationTrace, ops: IntArray, own: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return base, stage, lengths and rank of forwards and backwards."""
    kind, place = trace.kind[ops], grouped(trace.stage[ops], trace.chunk[ops])
    pipeline, number = trace.pipeline[ops], trace.microbatch[ops]
    like = grouped(kind, place)
    by_rank = grouped(like, trace.rank[ops])
    like_of_rank = np.empty(int(by_rank.max()) + 1, np.int64)
    like_of_rank[by_rank] = like
    microbatch = grouped(trace.step[ops], pipeline, number)
    several_stages = len(np.unique(trace.stage[ops])) > 1
    length = np.ones(len(ops))
    for _ in range(3 if several_stages else 1):
        by_ranks = low_median(own / length, by_rank)
        typical = low_median(by_ranks, like_of_rank)
        if several_stages:
            length = low_median(own / typical[like], microbatch)[microbatch]
    slow = low_median(own / (typical[like] * length), by_rank)[by_rank]
    if several_stages:
        first_of = np.unique(microbatch, return_index=True)[1]
        pipelines = grouped(pipeline)
        each, of = length[first_of], pipelines[first_of]
        whole = _significant(each, of, np.zeros_like(first_of))
        if np.median(np.abs(each / low_median(each, of)[of] - 1.0)) > _VARIED:
            whole[:] = 1.0  # Longer micro-batches explain it better than many slow devices.
        whole_of = np.ones(int(pipelines.max()) + 1)
        whole_of[pipelines[first_of]] = whole
        length, slow = length / whole_of[pipelines], slow * whole_of[pipelines]
    else:
        slow = _significant(own / typical[like], by_rank, like)
    slow = _of_the_rank(slow, own, grouped(trace.rank[ops]))
    if not several_stages:
        length = low_median(own / (typical[like] * slow), microbatch)[microbatch]
    mean = float(length.mean())
    per_kind = np.zeros(int(kind.max()) + 1)
    for value in np.unique(kind):
        per_kind[value] = typical[np.unique(like[kind == value])].mean()
    return per_kind[kind] * mean, typical[like] / per_kind[kind], length / mean, slow


def _significant(values: FloatArray, group: IntArray, like: IntArray) -> FloatArray:
    """Return by what factor a group is above its like, 1 where chance may have made it so."""
    medians = low_median(values, group)
    like_of = np.empty(len(medians), np.int64)
    like_of[group] = grouped(like)
    ratio = medians / low_median(medians, like_of)[like_of]
    spread = low_median(np.abs(values / medians[group] - 1.0), group) * 1.4826
    error = 1.2533 * spread / np.sqrt(np.bincount(group))
    ratio[(ratio < _SLOW) | (ratio - 1.0 < _STANDARD_ERRORS * error * np.sqrt(2.0))] = 1.0
    return ratio[group]


def _of_the_rank(slow: FloatArray, own: FloatArray, rank: IntArray) -> FloatArray:
    """Return the factors of ranks that are slow in all they do; 1 for the others."""
    together = np.bincount(rank, own) / np.bincount(rank, own / slow)
    return np.where(together[rank] >= _SLOW, slow, 1.0)


def _link_names(trace: OperationTrace) -> tuple[IntArray, tuple[str, ...]]:
    """Return the link of every transfer and collective, and the links' names."""
    num_stages = int(trace.stage.max()) + 1
    lower = np.full(len(trace), -1)
    for names, hop in (
        (("forward-send", "backward-recv"), 0),
        (("forward-recv", "backward-send"), -1),
    ):
        used = trace.are(*names)
        # Of two stages, the way from the last to the first is the same link.
        lower[used] = (trace.stage[used] + hop) % num_stages if num_stages > 2 else 0
    number = np.where(lower >= 0, trace.pipeline * num_stages + lower, -1)
    first = int(trace.pipeline.max() + 1) * num_stages
    collective = ~trace.are(*FORWARD, *BACKWARD, *TRANSFERS, "gc", "optimizer")
    number = np.where(collective, first + trace.kind * num_stages + trace.stage, number)
    used_numbers = np.unique(number[number >= 0])
    labels = []
    for value in used_numbers.tolist():
        if value < first:
            pipeline, stage = divmod(value, num_stages)
            labels.append(f"stages {stage} and {(stage + 1) % num_stages} of pipeline {pipeline}")
        else:
            kind, stage = divmod(value - first, num_stages)
            labels.append(f"{trace.kinds[kind]} of stage {stage}")
    return np.where(number >= 0, np.searchsorted(used_numbers, number), -1), tuple(labels)


def _typical_rest(replay: Replay, ops: IntArray) -> FloatArray:
    """Return the median own time of transfers and collectives of a kind, and of barriers."""
    trace = replay.trace
    kind = np.r_[trace.kind, len(trace.kinds) + trace.kind[replay.barriers]]
    stage = np.r_[trace.stage, trace.stage[replay.barriers]]
    kind, stage = kind[ops], stage[ops]
    pipeline = np.r_[trace.pipeline, trace.pipeline[replay.barriers]][ops]
    transfer = np.isin(kind, np.flatnonzero(np.isin(trace.kinds, TRANSFERS)))
    # Of transfers, links are alike; of the others, the stages.
    place = grouped(kind, stage, np.where(transfer, pipeline, 0))
    kind_of = np.empty(int(place.max(initial=0)) + 1, np.int64)
    kind_of[place] = grouped(kind)
    typical = low_median(low_median(replay.own_s[ops], place), kind_of)
    return typical[kind_of[place]]


def _compare_links(link_of: IntArray, base: FloatArray, own: FloatArray, link: FloatArray) -> None:
    """Set the factors of links that are slower than their like."""
    ops = np.flatnonzero((link_of >= 0) & (base[: len(link_of)] > 0))
    if not len(ops):
        return
    ratio = low_median(own[ops] / base[ops], link_of[ops])
    ratio[ratio < _SLOW_LINK] = 1.0
    link[ops] = ratio[link_of[ops]]
