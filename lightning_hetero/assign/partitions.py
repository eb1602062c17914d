"""Every way to cut a few items into groups, evaluated at once.

Eight items have 4,140 partitions: 8·8·4,140 = 265,000 multiply-adds, under a millisecond, where
an integer programme takes several. So small packings are solved exactly by looking at all of them.
"""

from functools import lru_cache

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray

__all__ = ["MAX_ENUMERATED", "partition_sums", "partitions"]

MAX_ENUMERATED = 8
"""Most items whose partitions are enumerated."""


@lru_cache(maxsize=MAX_ENUMERATED + 1)
def partitions(num_items: int) -> tuple[IntArray, IntArray]:
    """Return all partitions as group indices [P, U] and their numbers of groups [P].

    Groups are numbered in the order of their first item (restricted growth strings), so no
    partition comes twice.
    """
    groups = np.zeros((1, 0), dtype=np.int64)
    counts = np.zeros(1, dtype=np.int64)
    for _ in range(num_items):
        repeats = counts + 1
        parents = np.repeat(np.arange(len(groups)), repeats)
        starts = np.cumsum(repeats) - repeats
        added = np.arange(len(parents)) - starts[parents]
        groups = np.concatenate([groups[parents], added[:, None]], axis=1)
        counts = np.maximum(counts[parents], added + 1)
    groups.setflags(write=False)
    counts.setflags(write=False)
    return groups, counts


@lru_cache(maxsize=MAX_ENUMERATED + 1)
def _membership(num_items: int) -> FloatArray:
    """Return [groups, U, P]: 1 where an item is in the group."""
    groups, _ = partitions(num_items)
    members = groups.T[None, :, :] == np.arange(num_items)[:, None, None]
    return np.ascontiguousarray(members, dtype=np.float64)


def partition_sums(values: FloatArray) -> FloatArray:
    """Return the largest group sum of values [G, U] in every partition, [G, P]."""
    first, *others = _membership(values.shape[1])
    largest: FloatArray = values @ first
    for members in others:
        np.maximum(largest, values @ members, out=largest)
    return largest
