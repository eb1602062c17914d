"""Propagate any graph of operations, observed or predicted, for several sets of durations at once.

`propagate` runs one pipeline from its schedule; here the order is already known, as it is where
operations were recorded. An operation starts once all that it waits for has ended, and a gap later;
the members of a group (both ends of a transfer, the ranks of a collective) end together: the last
start plus each one's own time. Operations whose inputs are ready together run as one NumPy call.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class OperationGraph:
    """Operations sorted so that each comes after all that it waits for."""

    order: IntArray
    """The caller's index of each operation, in the order of propagation."""
    waits_for: IntArray
    """Positions, in that order, of the operations awaited, [operations, most]; -1 is none."""
    level_starts: IntArray
    """Where each level begins, and the number of operations at the end."""
    group_starts: IntArray
    """Where each group begins: its members are next to each other."""
    group_of: IntArray
    """The group of each operation, in that order."""

    @classmethod
    def build(cls, waits_for: IntArray, group: IntArray) -> "OperationGraph":
        """Sort operations by what they wait for.

        Args:
            waits_for: Indices of the operations that each one waits for, -1 for none.
            group: A number for each operation; those with the same number end together.

        Raises:
            ValueError: Operations wait for each other in a cycle.
        """
        _, group = np.unique(group, return_inverse=True)
        levels = _levels(waits_for, group)
        order = np.lexsort((group, levels[group]))
        position = np.empty(len(order) + 1, np.int64)
        position[order] = np.arange(len(order))
        position[-1] = -1  # Index -1 stays -1.
        sorted_groups = group[order]
        begins = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
        sizes = np.diff(np.r_[begins, len(order)])
        level = levels[sorted_groups]
        bounds = np.r_[np.searchsorted(level, np.arange(level[-1] + 1)), len(order)]
        return cls(
            order=order,
            waits_for=position[waits_for[order]],
            level_starts=bounds,
            group_starts=begins,
            group_of=np.repeat(np.arange(len(begins)), sizes),
        )


def propagate_operations(graph: OperationGraph, own_s: FloatArray, gap_s: FloatArray) -> FloatArray:
    """Return when each operation ends, indexed as the caller's.

    Args:
        graph: What waits for what.
        own_s: Seconds of each operation without waiting for peers.
        gap_s: Seconds between the end of what it waits for and its start.
    """
    own, gap = own_s[graph.order], gap_s[graph.order]
    # One more entry, which is never written: -1 means "from the beginning", at second 0.
    end = np.zeros(len(own) + 1)
    group_bounds = np.searchsorted(graph.group_starts, graph.level_starts)
    for level in range(len(graph.level_starts) - 1):
        low, high = graph.level_starts[level : level + 2]
        start = end[graph.waits_for[low:high]].max(axis=1) + gap[low:high]
        first, last = group_bounds[level : level + 2]
        if last - first < high - low:
            together = np.maximum.reduceat(start, graph.group_starts[first:last] - low)
            start = together[graph.group_of[low:high] - first]
        end[low:high] = start + own[low:high]
    ends: FloatArray = np.empty(len(own))
    ends[graph.order] = end[:-1]
    return ends


def _levels(waits_for: IntArray, group: IntArray) -> IntArray:
    """Return the length of the longest chain before each group."""
    num_groups = int(group.max()) + 1
    target, column = np.nonzero(waits_for >= 0)
    source, target = group[waits_for[target, column]], group[target]
    by_source = np.argsort(source, kind="stable")
    target = target[by_source]
    first = np.searchsorted(source[by_source], np.arange(num_groups + 1))
    missing = np.bincount(target, minlength=num_groups)
    levels = np.full(num_groups, -1, np.int64)
    ready, level = np.flatnonzero(missing == 0), 0
    while len(ready):
        levels[ready] = level
        counts = first[ready + 1] - first[ready]
        skipped = np.repeat(first[ready] - np.r_[0, np.cumsum(counts)[:-1]], counts)
        reached, times = np.unique(target[skipped + np.arange(len(skipped))], return_counts=True)
        missing[reached] -= times
        ready, level = reached[missing[reached] == 0], level + 1
    if (levels < 0).any():
        raise ValueError("operations wait for each other in a cycle")
    return levels
