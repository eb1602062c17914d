"""Tell arrangements apart that differ in more than which of equal nodes they use.

Nodes of a class have equal devices and links, so swapping them changes neither times nor memory. A
search that moves single stages meets the same pipelines again and again under other names of nodes.
"""

import itertools
from collections.abc import Hashable

from lightning_hetero.planner.arrangement import Arrangement
from lightning_hetero.planner.estimating.estimator import Estimator

__all__ = ["kind_of_arrangement"]


def kind_of_arrangement(arrangement: Arrangement, estimator: Estimator) -> Hashable:
    """Return what arrangements have in common that differ in the names of equal nodes at most.

    Not all such arrangements have it in common: which of several pipelines of a class share nodes
    with others is told by their order. Prices of nodes count as well.
    """
    pairs = sorted(zip(estimator.keys(arrangement), arrangement, strict=True))
    used = dict.fromkeys(itertools.chain.from_iterable([nodes for _, (_, nodes) in pairs]))
    names = dict(zip(used, itertools.count(), strict=False)).__getitem__
    rows = [(key, *map(names, nodes)) for key, (_, nodes) in pairs]
    entries = estimator.cost.cluster.nodes
    return tuple(rows), tuple([entries[node].price_per_hour for node in used])
