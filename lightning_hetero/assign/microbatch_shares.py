"""How many micro-batches each pipeline runs: the same for all, or so that all end together.

Pipelines of one class are alike. K micro-batches take a pipeline `fill + slope·K` seconds, so the
numbers that minimise the longest one are found by filling all to a common level.
"""

from collections.abc import Sequence

__all__ = ["deal_microbatches", "share_microbatches"]

_PRECISION = 1e-12
"""Share of the level at which its bisection ends."""


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
    *,
    least: int = 1,
) -> list[list[int]] | None:
    """Return the micro-batches of every pipeline of every class.

    Minimises the longest `fill + slope·K`, exactly: the least level at which all micro-batches are
    done is found by bisection. None if the pipelines' limits leave too few or too many.

    Args:
        fills_s: Seconds of each class that don't grow with K.
        slopes_s: Seconds of a micro-batch of each class.
        repeats: Pipelines of each class.
        limits: Most micro-batches of a pipeline of each class.
        total: Micro-batches to share.
        least: Fewest micro-batches of a pipeline.
    """
    most = [min(limit, total) for limit in limits]
    kinds = list(zip(fills_s, slopes_s, most, repeats, strict=True))
    if not sum(repeats) * least <= total <= sum(n * k for _, _, k, n in kinds):
        return None

    def done(level: float) -> list[int]:
        return [
            min(max(int((level - fill) / slope + 1e-12), least), limit)
            for fill, slope, limit, _ in kinds
        ]

    low, high = 0.0, max(fill + slope * (limit + 1) for fill, slope, limit, _ in kinds)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if sum(n * k for n, k in zip(repeats, done(middle), strict=True)) >= total:
            high = middle
        else:
            low = middle
    counts = done(high)
    surplus = sum(n * k for n, k in zip(repeats, counts, strict=True)) - total
    shares = [[k] * n for k, n in zip(counts, repeats, strict=True)]
    # At the level where the last micro-batches finish together, some too many are handed out: take
    # one from as many of those that finish last.
    finish = [fill + slope * k for (fill, slope, *_), k in zip(kinds, counts, strict=True)]
    for index in sorted(range(len(kinds)), key=lambda kind: -finish[kind]):
        if not surplus:
            break
        share = shares[index]
        for position in range(len(share)):
            if surplus and share[position] > least:
                share[position] -= 1
                surplus -= 1
    assert not surplus, "more micro-batches finish together than pipelines can give back"
    return shares
