"""Decide how many micro-batches each pipeline runs: equally many, or so that all end together.

Pipelines of one class are alike. K micro-batches take a pipeline `fill + slope·K` seconds, so the
longest time is minimised by giving each pipeline as many as end by a common level.
"""

import heapq
from collections.abc import Sequence

__all__ = ["deal_microbatches", "share_microbatches"]


def deal_microbatches(repeats: Sequence[int], total: int) -> list[list[int]] | None:
    """Return equal numbers of micro-batches, one apart at most, for every pipeline of every class.

    Returns None if there are fewer micro-batches than pipelines.
    """
    num_pipelines = sum(repeats)
    if total < num_pipelines:
        return None
    base, extra = divmod(total, num_pipelines)
    dealt = iter([base + 1] * extra + [base] * (num_pipelines - extra))
    return [[next(dealt) for _ in range(count)] for count in repeats]


def share_microbatches(
    fills_s: Sequence[float], slopes_s: Sequence[float], repeats: Sequence[int], total: int
) -> list[list[int]] | None:
    """Return the micro-batches of every pipeline of every class, one at least.

    Minimises the longest `fill + slope·K`, exactly: each goes where it ends first. Returns None if
    there are fewer micro-batches than pipelines.

    Args:
        fills_s: Seconds of each class that don't grow with K.
        slopes_s: Seconds of a micro-batch of each class.
        repeats: Pipelines of each class.
        total: Micro-batches to share.
    """
    kinds = list(zip(fills_s, slopes_s, strict=True))
    counts, left = [1] * len(kinds), total - sum(repeats)
    if left < 0:
        return None
    # Bisect the level until at most one per pipeline is left; deal these one after another.
    low, high = 0.0, max(fill + slope * (total + 1) for fill, slope in kinds)
    while left > sum(repeats):
        middle = (low + high) / 2
        tried = [max(int((middle - fill) / slope + 1e-12), 1) for fill, slope in kinds]
        missing = total - sum(n * k for n, k in zip(repeats, tried, strict=True))
        if missing <= 0:
            high = middle
        else:
            low, counts, left = middle, tried, missing
    queue = [
        (fill + slope * (k + 1), index)
        for index, ((fill, slope), k) in enumerate(zip(kinds, counts, strict=True))
    ]
    heapq.heapify(queue)
    last = 0
    while left > 0:
        end_s, last = heapq.heappop(queue)
        counts[last] += 1
        left -= repeats[last]
        heapq.heappush(queue, (end_s + slopes_s[last], last))
    shares = [[k] * n for k, n in zip(counts, repeats, strict=True)]
    # The last round may have dealt too many: some pipelines of its class get one less.
    for position in range(-left):
        shares[last][position] -= 1
    return shares
