"""Enumerate compositions of device groups, and deal units evenly over groups.

GPUs (or tensor-parallel units) of one type are interchangeable, so a group is described by how many
units of each type it holds: its composition. There are far fewer compositions than assignments of
GPUs to groups.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import PlanningError

__all__ = ["deal_evenly", "enumerate_compositions"]

_MAX_COMPOSITIONS = 3_000_000


def enumerate_compositions(counts: Sequence[int], max_units: int) -> IntArray:
    """Return every composition of 1 to `max_units` units, as [compositions, types].

    Raises:
        PlanningError: There are more than 3 million.
    """
    rows: IntArray = np.zeros((1, 0), dtype=np.int64)
    room: IntArray = np.full(1, max_units, dtype=np.int64)
    for count in counts:
        repeats = np.minimum(room, count) + 1
        total = int(repeats.sum())
        if total > _MAX_COMPOSITIONS:
            raise PlanningError(
                f"Groups of up to {max_units} units of {len(counts)} types have more than "
                f"{_MAX_COMPOSITIONS} compositions. Use fewer device types or a smaller max_stages."
            )
        parents = np.repeat(np.arange(len(rows)), repeats)
        starts = np.repeat(np.cumsum(repeats) - repeats, repeats)
        taken = np.arange(total) - starts
        rows = np.column_stack((rows[parents], taken))
        room = room[parents] - taken
    kept: IntArray = rows[rows.sum(axis=1) > 0]
    return kept


def deal_evenly(counts: Sequence[int], num_groups: int) -> list[tuple[tuple[int, ...], int]]:
    """Deal units round robin; return the compositions that arise and how often each does.

    Each type starts at the group after the last one of the type before, so that remainders spread.
    """
    cuts = {0}
    spans = []
    start = 0
    for count in counts:
        extra = count % num_groups
        end = (start + extra) % num_groups
        spans.append((start, extra, end))
        cuts |= {start, end}
        start = end
    edges = [*sorted(cuts), num_groups]
    dealt = []
    for first, stop in itertools.pairwise(edges):
        row = []
        for count, (begin, extra, _) in zip(counts, spans, strict=True):
            inside = (first - begin) % num_groups < extra
            row.append(count // num_groups + int(inside))
        if stop > first:
            dealt.append((tuple(row), stop - first))
    return dealt
