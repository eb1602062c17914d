"""How many micro-batches each pipeline runs: the same for all, or so that all end together.

Pipelines of one class are alike. K micro-batches take a pipeline `fill + slope·K` seconds, so the
numbers that minimise the longest one are found by filling all to a common level.
"""

import heapq
from collections.abc import Sequence

__all__ = ["deal_microbatches", "share_microbatches"]


def deal_microbatches(
    repeats: Sequence[int], limits: Sequence[int], total: int
) -> list[list[int]] | None:
    """Return equal numbers of micro-batches, one apart at most, for every pipeline of every class.

    None if a pipeline would get none or more than its limit.
    """
    num_pipelines = sum(repeats)
    if total < num_pipelines:
        return None
    base, extra = divmod(total, num_pipelines)
    dealt = iter([base + 1] * extra + [base] * (num_pipelines - extra))
    shares = [[next(dealt) for _ in range(count)] for count in repeats]
    fits = all(max(share) <= limit for share, limit in zip(shares, limits, strict=True))
    return shares if fits else None


def share_microbatches(
    fills_s: Sequence[float],
    slopes_s: Sequence[float],
    repeats: Sequence[int],
    limits: Sequence[int],
    total: int,
) -> list[list[int]] | None:
    """Return the micro-batches of every pipeline of every class, one at least.

    Minimises the longest `fill + slope·K`, exactly: each goes where it ends first. None if the
    pipelines' limits leave too few or too many.

    Args:
        fills_s: Seconds of each class that don't grow with K.
        slopes_s: Seconds of a micro-batch of each class.
        repeats: Pipelines of each class.
        limits: Most micro-batches of a pipeline of each class.
        total: Micro-batches to share.
    """
    most = [min(limit, total) for limit in limits]
    kinds = list(zip(fills_s, slopes_s, most, repeats, strict=True))
    if not sum(repeats) <= total <= sum(n * k for _, _, k, n in kinds):
        return None

    def done(level: float) -> list[int]:
        return [
            min(max(int((level - fill) / slope + 1e-12), 1), limit)
            for fill, slope, limit, _ in kinds
        ]

    # Up to a level at which fewer than one for each pipeline are left, then one after another.
    low, high = 0.0, max(fill + slope * (limit + 1) for fill, slope, limit, _ in kinds)
    counts, left = [1] * len(kinds), total - sum(repeats)
    while left > sum(repeats):
        middle = (low + high) / 2
        tried = done(middle)
        missing = total - sum(n * k for n, k in zip(repeats, tried, strict=True))
        if missing <= 0:
            high = middle
        else:
            low, counts, left = middle, tried, missing
    queue = [
        (fill + slope * (k + 1), index)
        for index, ((fill, slope, limit, _), k) in enumerate(zip(kinds, counts, strict=True))
        if k < limit
    ]
    heapq.heapify(queue)
    last = 0
    while left > 0:
        end_s, last = heapq.heappop(queue)
        _, slope, limit, num_pipelines = kinds[last]
        counts[last] += 1
        left -= num_pipelines
        if counts[last] < limit:
            heapq.heappush(queue, (end_s + slope, last))
    shares = [[k] * n for k, n in zip(counts, repeats, strict=True)]
    # Some pipelines of the class that came last get none of its last round.
    for position in range(-left):
        shares[last][position] -= 1
    return shares
