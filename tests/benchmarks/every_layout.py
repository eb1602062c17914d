"""Every layout of a cluster, to see what a search missed.

A layout says how many TP groups of each device type each pipeline has, with devices left idle or
not, in which order the types stand in all pipelines (slowest or fastest first) and which traffic
stays inside nodes. Layers and micro-batches follow from it as in the search.
"""

from collections.abc import Sequence

from lightning_hetero.planner.arrangement import Arrangement, Group, MappingOrder, map_groups
from lightning_hetero.planner.enumeration import every_grouping
from lightning_hetero.planner.estimator import Estimate, Estimator

__all__ = ["best_layout", "every_layout"]

_SLACK = 0.97
"""The least time of a layout is taken to be so much less, in case it isn't quite a bound."""


def every_layout(
    estimator: Estimator, tp_degrees: Sequence[int], most: int
) -> list[Arrangement] | None:
    """Return all layouts, or None if there are more than `most`."""
    cluster = estimator.cost.cluster
    counts = [node.count for node in cluster.nodes]
    names = sorted({node.device for node in cluster.nodes})
    nodes = [next(i for i, n in enumerate(cluster.nodes) if n.device == name) for name in names]
    slowness = [estimator.seconds_per_device(node, tp_degrees) for node in nodes]
    order = sorted(range(len(names)), key=lambda kind: -slowness[kind])
    totals = [sum(n.count for n in cluster.nodes if n.device == name) for name in names]
    groupings = every_grouping(
        totals,
        tp_degrees,
        most_stages=estimator.num_layers,
        most_pipelines=estimator.workload.num_microbatches,
        most=most,
    )
    if groupings is None:
        return None
    layouts: dict[Arrangement, None] = {}
    for chosen in groupings:
        for direction in (order, order[::-1]):
            groups = [
                Group(
                    (tp,) * sum(row),
                    tuple(names[kind] for kind in direction for _ in range(row[kind])),
                )
                for tp, row in chosen
            ]
            for mapping in MappingOrder:
                arrangement = map_groups(groups, cluster, counts, mapping)
                if arrangement is not None:
                    layouts[arrangement] = None
        if len(layouts) > most:
            return None
    return list(layouts)


def best_layout(estimator: Estimator, layouts: Sequence[Arrangement]) -> Estimate:
    """Return the layout with the least estimate; those that can't have it are left out."""
    least_s = [estimator.least_s(layout) for layout in layouts]
    best: Estimate | None = None
    for index in sorted(range(len(layouts)), key=least_s.__getitem__):
        if best is not None and least_s[index] * _SLACK > best.time_s:
            break
        found = estimator.estimate(layouts[index])
        if found is not None and (best is None or found.time_s < best.time_s):
            best = found
    assert best is not None, "no layout fits"
    return best
