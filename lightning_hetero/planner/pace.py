"""When pipelines end, and how to deal their micro-batches and layers so that they end soonest.

K micro-batches take a pipeline `fill + slope·K` seconds. Equal pipelines get theirs together, so
thousands of pipelines take no longer than their kinds.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray

_ROUNDS, _FEWEST_ROUNDS = 2, 12
"""Rounds that are timed one by one: this many for each stage, and at least twelve. Every further
round takes the steady seconds."""
_DIGITS = 7
"""Significant digits in which stages are compared, so that equal ones don't differ by rounding."""


@dataclass(frozen=True, eq=False)
class Pace:
    """When a pipeline ends, depending on its number of micro-batches."""

    slope_s: float
    """Seconds of each further micro-batch."""
    fill_s: float
    """All other seconds of an iteration."""
    early_s: tuple[float, ...] = ()
    """Exact ends of 1, 2, ... micro-batches, if pipelines run few."""

    def ends_s(self, count: int) -> float:
        """Return when `count` micro-batches have ended."""
        if count <= len(self.early_s):
            return self.early_s[count - 1]
        return self.fill_s + self.slope_s * count


def deal(
    rates: Sequence[Pace], sizes: Sequence[int], total: int, *, equally: bool = False
) -> list[int] | None:
    """Return the micro-batches of each pipeline such that the last one ends soonest, or None.

    Args:
        rates: Slopes and fills of the pipelines.
        sizes: Sequences of their micro-batches.
        total: Sequences of an iteration.
        equally: Whether all get the same number, except that some get one more; sizes are then
            equal, too.
    """
    num = len(rates)
    if equally and len(set(sizes)) > 1:
        return None
    if equally:
        base, rest = divmod(total // sizes[0], num)
        order = sorted(range(num), key=lambda i: rates[i].ends_s(base))
        return [base + (i in order[:rest]) for i in range(num)] if base else None
    return _dealt_freely(rates, sizes, total)


def _dealt_freely(rates: Sequence[Pace], sizes: Sequence[int], total: int) -> list[int] | None:
    kinds: dict[tuple[Pace, int], list[int]] = {}
    for index, kind in enumerate(zip(rates, sizes, strict=True)):
        kinds.setdefault(kind, []).append(index)
    time_s = _common_end_s({kind: len(members) for kind, members in kinds.items()}, total)
    counts, left = [0] * len(rates), total
    for (rate, size), members in kinds.items():
        # At first some too few, then the rest one after another.
        early = max(1, int((time_s - rate.fill_s) / rate.slope_s) - 2)
        for index in members:
            counts[index] = early
        left -= early * size * len(members)
    if left < 0:
        counts, left = [1] * len(rates), total - sum(sizes)
    queue = [(kind[0].ends_s(counts[m[0]] + 1), m[0], kind) for kind, m in kinds.items()]
    heapq.heapify(queue)
    while left > 0 and queue:
        _, first, (rate, size) = heapq.heappop(queue)
        members = kinds[rate, size][: left // size]
        for index in members:
            counts[index] += 1
        left -= size * len(members)
        if members:
            heapq.heappush(queue, (rate.ends_s(counts[first] + 1), first, (rate, size)))
    return None if left else counts


def _common_end_s(kinds: dict[tuple[Pace, int], int], total: int) -> float:
    """Return when all pipelines end if micro-batches are divisible and each runs at least one."""
    busy, rest, time_s = dict(kinds), total, 0.0
    while busy:
        per_s = sum(number * size / rate.slope_s for (rate, size), number in busy.items())
        before = sum(
            number * size * rate.fill_s / rate.slope_s for (rate, size), number in busy.items()
        )
        time_s = (rest + before) / per_s
        late = [kind for kind in busy if time_s < kind[0].ends_s(1)]
        if not late:
            break
        for kind in late:
            rest -= busy.pop(kind) * kind[1]
    return time_s


def finish_s(
    work_s: tuple[FloatArray, FloatArray],
    messages_s: tuple[FloatArray, FloatArray],
    exchange: Sequence[FloatArray] | FloatArray,
    num_microbatches: int,
) -> tuple[FloatArray, FloatArray]:
    """Return [pipelines] seconds of a further micro-batch, and when an iteration ends.

    Args:
        work_s: Forward and backward of each stage, [pipelines, stages] each.
        messages_s: Messages to the next stage, and back, [pipelines, stages - 1] each.
        exchange: Pull of one unit and of all, push of one and of all, step, and the share of pull
            and push that layers hide, [pipelines, stages] each.
        num_microbatches: Micro-batches of every pipeline.
    """
    pull, pulls, push, pushes, step, hidden = exchange
    forward_s, backward_s = work_s
    start_s = np.maximum(pull, pulls - forward_s * hidden)
    after_s = np.maximum(push, pushes - backward_s * hidden) + step
    slope_s = steady_round_s(forward_s + backward_s, *messages_s)
    end_s = finish_1f1b_s(work_s, messages_s, start_s, num_microbatches, slope_s)
    return slope_s, (end_s + after_s).max(axis=1)


def steady_round_s(work_s: FloatArray, there_s: FloatArray, back_s: FloatArray) -> FloatArray:
    """Return by how many seconds each additional one of many micro-batches delays the end.

    In 1F1B the stages u to t wait for each other in a cycle: forwards from u to t, backwards from t
    to u, and then the forward on u of the micro-batch that comes t - u + 1 later. The slowest cycle
    sets the pace; or a link, if it is busy for longer.

    Args:
        work_s: Forward and backward of each stage, [pipelines, stages].
        there_s: Messages from each stage to the next, [pipelines, stages - 1].
        back_s: Messages from each stage back to the previous one.
    """
    first, last = _cycles(work_s.shape[1])
    done_s = np.pad(np.cumsum(work_s, axis=1), ((0, 0), (1, 0)))
    passed_s = np.pad(np.cumsum(there_s + back_s, axis=1), ((0, 0), (1, 0)))
    cycle_s = done_s[:, last + 1] - done_s[:, first] + passed_s[:, last] - passed_s[:, first]
    slowest: FloatArray = (cycle_s / (last - first + 1)).max(axis=1)
    for links_s in (there_s, back_s):
        slowest = np.maximum(slowest, links_s.max(axis=1, initial=0.0))
    return slowest


def finish_1f1b_s(
    work_s: tuple[FloatArray, FloatArray],
    messages_s: tuple[FloatArray, FloatArray],
    start_s: FloatArray,
    num_microbatches: int,
    round_s: FloatArray,
) -> FloatArray:
    """Return when each stage ends in 1F1B with equal micro-batches, [pipelines, stages].

    These are the rounds of `simulator.propagate`, for many pipelines at once; rounds after the
    first few of them take `round_s` each.

    Args:
        work_s: Forward and backward of each stage, [pipelines, stages] each.
        messages_s: Messages to the next stage, and back, [pipelines, stages - 1] each.
        start_s: When each stage may begin.
        num_microbatches: Micro-batches of every pipeline.
        round_s: Seconds of a round after many rounds, [pipelines].
    """
    (forward_s, backward_s), (there_s, back_s) = work_s, messages_s
    num, last = start_s.shape[0], start_s.shape[1] - 1
    free_s, arrived_s = start_s.copy(), np.zeros_like(start_s)
    link_s = np.zeros_like(there_s), np.zeros_like(back_s)
    # A gradient passes stages and links in turn, from the last stage to the first.
    chain = np.empty((num, 2 * last + 1))
    chain[:, ::2], chain[:, 1::2] = backward_s[:, ::-1], back_s[:, ::-1]
    passed_s = np.cumsum(chain, axis=1)
    ready_s = np.empty_like(chain)
    timed = last + max(_FEWEST_ROUNDS, _ROUNDS * (last + 1))
    skipped = max(0, num_microbatches - timed)
    resume = num_microbatches - skipped
    for index in range(resume + last):
        begin, end = max(0, index - resume + 1), min(last, index) + 1
        free_s[:, begin:end] = np.maximum(free_s[:, begin:end], arrived_s[:, begin:end])
        free_s[:, begin:end] += forward_s[:, begin:end]
        end = min(end, last)
        link_s[0][:, begin:end] = np.maximum(free_s[:, begin:end], link_s[0][:, begin:end])
        link_s[0][:, begin:end] += there_s[:, begin:end]
        arrived_s[:, begin + 1 : end + 1] = link_s[0][:, begin:end]
        if index >= last:
            ready_s[:, ::2], ready_s[:, 1::2] = free_s[:, ::-1], link_s[1][:, ::-1]
            ready_s += chain - passed_s
            np.maximum.accumulate(ready_s, axis=1, out=ready_s)
            ready_s += passed_s
            free_s, link_s = ready_s[:, ::-2].copy(), (link_s[0], ready_s[:, -2::-2].copy())
        if index == resume - 1 and skipped:
            for row in (free_s, arrived_s, *link_s):
                row += (skipped * round_s)[:, None]
    return free_s


@lru_cache
def _cycles(num_stages: int) -> tuple[IntArray, IntArray]:
    """Return the first and the last stage of every cycle."""
    return np.triu_indices(num_stages)


def balance_layers(
    times_s: Sequence[FloatArray] | FloatArray, num_layers: int
) -> tuple[int, ...] | None:
    """Return layers per stage (AutoHet §III-C, Eq. 4), or None if no split fits.

    With n_i layers on stage i, it minimises max_i time_i(n_i), then Σ_i time_i(n_i), subject to
    Σ_i n_i = num_layers, n_i ≥ 1 and memory_i(n_i) ≤ capacity_i. time_i is the seconds of a
    micro-batch's forward and backward on stage i, including embedding and head (the paper prints
    the fraction l_i/g_i upside down); memory_i includes all micro-batches that the stage holds at
    once. Because more layers take longer, giving each next layer to the stage that then takes
    least minimises the maximum. Among stages that take no longer than that, giving each to the
    stage to which it adds least minimises the sum, unless a layer adds less than the one before it.

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
