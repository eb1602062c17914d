"""Identify arrangements that differ only in which of several equal nodes they use.

Nodes of a class have equal devices and links, so swapping them changes neither times nor memory. A
search that moves single stages often finds the same pipelines on other nodes of the same class.
(Where links between two nodes differ from others, a ring may go over such a link or not, depending
on the node between them; the search takes that for equal, too.)
"""

import itertools
from collections.abc import Hashable

from lightning_hetero.planner.arrangement import Arrangement
from lightning_hetero.planner.estimating.estimator import Estimator

__all__ = ["kind_of_arrangement"]


def kind_of_arrangement(arrangement: Arrangement, estimator: Estimator) -> Hashable:
    """Return a key; arrangements with equal keys differ only in which equal nodes they use.

    The reverse isn't guaranteed: the key depends on the order of pipelines of one class, if these
    share nodes with others. Nodes with different prices aren't equal.
    """
    pairs = sorted(zip(estimator.keys(arrangement), arrangement, strict=True))
    used = dict.fromkeys(itertools.chain.from_iterable([nodes for _, (_, nodes) in pairs]))
    names = dict(zip(used, itertools.count(), strict=False)).__getitem__
    rows = [(key, *map(names, nodes)) for key, (_, nodes) in pairs]
    entries = estimator.cost.cluster.nodes
    return tuple(rows), tuple([entries[node].price_per_hour for node in used])
