r"""Every layout of a cluster, to see what a search missed.

::

    python -m tests.benchmarks.every_layout 30 --most 200000    # clusters; a few minutes each

A layout says how many TP groups of each device type each pipeline has, with devices left idle or
not, in which order the types stand in all pipelines (slowest or fastest first) and which traffic
stays inside nodes. Layers and micro-batches follow from it as in the search. All are estimated, and
simulated are those whose estimates are so near the best that they could be better than it.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.planner import PlanningOptions, Workload
from lightning_hetero.planner.arrangement import (
    Arrangement,
    Group,
    MappingOrder,
    map_groups,
    num_units,
)
from lightning_hetero.planner.enumeration import PipelineUnits, every_grouping
from lightning_hetero.planner.estimating.arrangement_estimator import Estimate
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.workload import valid_tp_degrees
from tests.benchmarks.search_laws import Task

__all__ = ["Comparison", "compare", "every_layout", "small_tasks"]

DEVICES = ("A100-80GB", "H800-80GB", "V100-32GB", "RTX-4090", "T4", "A10-24GB")
_SLACK = 0.97
"""The least time of a layout, and its estimate, are taken to be so much less, in case they aren't
quite bounds."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a search found, and the best of every layout."""

    num_layouts: int
    """Layouts there are."""
    num_simulated: int
    """Layouts that were simulated."""
    found_s: float
    """Iteration time of the best plan that the search found."""
    best_s: float
    """The same, or the simulated iteration time of the best layout if that is less."""

    @property
    def above(self) -> float:
        """The share by which the best plan is slower than the best layout."""
        return self.found_s / self.best_s - 1

    @property
    def missed(self) -> bool:
        """Whether the best layout is better than all that the search simulated."""
        return self.above > 1e-6


def compare(task: Task, most: int) -> Comparison | None:
    """Compare the search with every layout; None if there are more than `most`, or none fits."""
    cost = task.cost()
    estimator = Estimator(cost, task.workload, equal_microbatches=False)
    degrees = valid_tp_degrees(cost, task.workload, PlanningOptions(tp_degrees=task.tp_degrees))
    groupings = _groupings(estimator, degrees, most)
    if groupings is None or task.best_s == float("inf"):
        return None
    num_layouts, near = 0, []
    for layout in every_layout(estimator, degrees, groupings):
        num_layouts += 1
        if num_layouts > most:
            return None
        if _work_s(estimator, layout) * _SLACK <= task.best_s:
            near.append(layout)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    return Comparison(
        num_layouts=num_layouts,
        found_s=task.best_s,
        best_s=_best_s(judge, _near_the_best(estimator, near, task.best_s), task.best_s),
        num_simulated=judge.num_simulated,
    )


def small_tasks() -> Iterator[Task]:
    """Yield random tasks of 8 to 64 devices, always the same."""
    shapes = (
        ((4, 2), (4, 2)), ((8, 1), (4, 1)), ((8, 1),), ((4, 1), (2, 2), (2, 1)), ((8, 2),),
        ((8, 1), (8, 1)), ((8, 2), (8, 1)), ((8, 4),), ((8, 8),), ((8, 2), (8, 2)),
        ((8, 4), (8, 4)), ((4, 4), (8, 2)),
    )  # fmt: skip
    choose = random.Random(0)
    while True:
        shape, degrees = choose.choice(shapes), choose.choice([None, (2,), (4,), (4, 8), (8,)])
        if degrees and max(degrees) > min(count for count, _ in shape):
            continue
        names = choose.sample(DEVICES, len(shape))
        yield Task(
            nodes=tuple((n, c) for n, (c, k) in zip(names, shape, strict=True) for _ in range(k)),
            model="llama-7b" if degrees else choose.choice(["bert-large", "gpt-neo-2.7b"]),
            workload=Workload(
                sequence_length=choose.choice([512, 2048]),
                global_batch_size=choose.choice([32, 64, 256]),
            ),
            bytes_per_s=choose.choice([1.25e9, 12.5e9, 50e9]),
            tp_degrees=degrees,
        )


def _groupings(
    estimator: Estimator, tp_degrees: Sequence[int], most: int
) -> list[tuple[PipelineUnits, ...]] | None:
    """Return all groupings of the cluster's devices by type, or None if there are over `most`."""
    cluster, names = estimator.cost.cluster, sorted(estimator.num_devices)
    counts = [node.count for node in cluster.nodes]
    return every_grouping(
        [estimator.num_devices[name] for name in names],
        {tp: [num_units(cluster, counts, name, tp) for name in names] for tp in tp_degrees},
        most_stages=estimator.num_layers,
        most_pipelines=estimator.workload.num_microbatches,
        most=most,
    )


def every_layout(
    estimator: Estimator,
    tp_degrees: Sequence[int],
    groupings: Iterable[tuple[PipelineUnits, ...]],
) -> Iterator[Arrangement]:
    """Yield all layouts of groupings, none twice."""
    cluster = estimator.cost.cluster
    counts = [node.count for node in cluster.nodes]
    names = sorted(estimator.num_devices)
    nodes = [next(i for i, n in enumerate(cluster.nodes) if n.device == name) for name in names]
    slowness = [estimator.seconds_per_device(node, tp_degrees) for node in nodes]
    order = sorted(range(len(names)), key=lambda kind: -slowness[kind])
    for chosen in groupings:
        layouts: dict[Arrangement, None] = {}
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
        yield from layouts


def _work_s(estimator: Estimator, layout: Arrangement) -> float:
    """Return the seconds of all work on a layout's devices, without bubbles."""
    keys = map(estimator.key, layout)
    return estimator.workload.num_microbatches / sum(
        1 / estimator.pipeline_work_s(key)[1] for key in keys
    )


def _near_the_best(
    estimator: Estimator, layouts: Sequence[Arrangement], found_s: float
) -> list[Estimate]:
    """Return the estimates near the best and near what was found, the best first."""
    least_s = [estimator.least_s(layout) for layout in layouts]
    best_s, found = found_s, []
    for index in sorted(range(len(layouts)), key=least_s.__getitem__):
        if least_s[index] * _SLACK > best_s:
            break
        estimate = estimator.estimate(layouts[index])
        if estimate is not None and estimate.time_s * _SLACK <= best_s:
            found.append(estimate)
            best_s = min(best_s, estimate.time_s)
    return sorted(found, key=lambda estimate: estimate.time_s)


def _best_s(judge: Judge, estimates: Sequence[Estimate], found_s: float) -> float:
    """Return the least simulated seconds, or what was found if none are less."""
    best_s, seen = found_s, set()
    for estimate in estimates:
        if estimate.time_s * _SLACK > best_s:
            break
        # What differs in nodes alone, and takes as long, is simulated once.
        kind = (estimate.time_s, *sorted(judge.estimator.keys(estimate.arrangement)))
        if kind not in seen:
            seen.add(kind)
            best_s = min(best_s, judge.score(Candidate.of(estimate), below=best_s))
    return best_s


def main() -> None:
    """Compare the search with every layout of random clusters, and tell of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.benchmarks.every_layout"
    )
    parser.add_argument("num_clusters", type=int)
    parser.add_argument("--most", type=int, default=20_000, help="layouts of a cluster")
    parser.add_argument("--skip", type=int, default=0, help="clusters to pass over first")
    arguments = parser.parse_args()
    found: list[Comparison] = []
    for number, task in enumerate(small_tasks()):
        if len(found) == arguments.num_clusters:
            break
        start = time.process_time()
        compared = None if number < arguments.skip else compare(task, arguments.most)
        if compared is not None:
            found.append(compared)
            seconds = time.process_time() - start
            print(
                f"{number}: {task.num_devices} devices, {compared.num_layouts} layouts,"
                f" {compared.num_simulated} simulated, {compared.above:+.4f}, {seconds:.0f} s",
                flush=True,
            )
    within = sum(compared.above <= 0.01 for compared in found)
    missed = sum(compared.missed for compared in found)
    print(f"{within} of {len(found)} within 1 %; another layout is better in {missed}")


if __name__ == "__main__":
    main()
