"""Deal an iteration's micro-batches to pipelines so that the last one ends soonest.

K micro-batches take a pipeline `fill + slope·K` seconds. Pipelines that are alike are dealt to
together, so thousands of them take no longer than their kinds.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Pace", "deal"]


@dataclass(frozen=True, eq=False)
class Pace:
    """When a pipeline ends, by its micro-batches."""

    slope_s: float
    """Seconds of each further micro-batch."""
    fill_s: float
    """All other seconds of an iteration."""
    early_s: tuple[float, ...] = ()
    """Exact ends of 1, 2, ... micro-batches, where pipelines run few."""

    def ends_s(self, count: int) -> float:
        """Return when so many micro-batches have ended."""
        if count <= len(self.early_s):
            return self.early_s[count - 1]
        return self.fill_s + self.slope_s * count


def deal(
    rates: Sequence[Pace], sizes: Sequence[int], total: int, *, equally: bool = False
) -> list[int] | None:
    """Return micro-batches of each pipeline so that the last one ends soonest; None if none does.

    Args:
        rates: Slopes and fills of the pipelines.
        sizes: Sequences of their micro-batches.
        total: Sequences of an iteration.
        equally: Whether all get as many micro-batches, but for one more of some.
    """
    num = len(rates)
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
        # Some too few, and the rest one after another.
        early = max(1, int((time_s - rate.fill_s) / rate.slope_s) - 2)
        for index in members:
            counts[index] = early
        left -= early * size * len(members)
    while left < 0:
        more = [kind for kind, members in kinds.items() if counts[members[0]] > 1]
        if not more:
            return None
        kind = max(more, key=lambda kind: kind[0].ends_s(counts[kinds[kind][0]]))
        for index in kinds[kind]:
            counts[index] -= 1
            left += kind[1]
    queue = [(kind[0].ends_s(counts[m[0]] + 1), m[0], kind) for kind, m in kinds.items()]
    heapq.heapify(queue)
    while left and queue:
        _, first, (rate, size) = heapq.heappop(queue)
        members = kinds[rate, size][: left // size]
        for index in members:
            counts[index] += 1
        left -= size * len(members)
        if members:
            heapq.heappush(queue, (rate.ends_s(counts[first] + 1), first, (rate, size)))
    return None if left else counts


def _common_end_s(kinds: dict[tuple[Pace, int], int], total: int) -> float:
    """Return when all pipelines end if parts of micro-batches count, and each runs one at least."""
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
