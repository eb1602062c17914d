"""How good the search's plans are: against every layout, against parts of itself.

Four questions, each answered by the worst case of many: how far the best plan is from the best of
every layout (`every_layout`, clusters of 8 to 64 devices with at most 200,000 layouts), and whether
one more node, one more TP degree or unequal shares ever make it slower. The last three are laws of
the search; the tests hold them on a few small clusters. Devices are from data sheets; with Sailor's
profiles beside the repository, also as measured there.

Each cluster of the first question takes up to a few minutes, so only as many layouts are allowed as
`LIGHTNING_HETERO_MOST_LAYOUTS` says, 20,000 by default.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import PlanningOptions, Workload, plan
from lightning_hetero.planner.estimator import Estimator
from lightning_hetero.planner.workload import valid_tp_degrees
from lightning_hetero.simulator import CostModel, RooflineCost
from tests.benchmarks.every_layout import best_layout, every_layout
from tests.benchmarks.harness import Row
from tests.simulator.sailor import ROOT, SailorCost, load_profile, sailor_cluster

MOST_LAYOUTS = int(os.environ.get("LIGHTNING_HETERO_MOST_LAYOUTS", "20000"))
NUM_CLUSTERS = 30
NUM_LAWS = 40
DEVICES = ("A100-80GB", "H800-80GB", "V100-32GB", "RTX-4090", "T4", "A10-24GB")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cluster and what to plan for it."""

    nodes: tuple[tuple[str, int], ...]
    """Device type and count of each node."""
    model: str
    """Name of the model."""
    workload: Workload
    """What an iteration has to do."""
    bytes_per_s: float
    """Network between nodes."""
    tp_degrees: tuple[int, ...] | None = None
    """TP degrees to consider."""

    def cost(self, nodes: Sequence[tuple[str, int]] | None = None) -> CostModel:
        """Return the cost model, of other nodes if some are given."""
        cluster = Cluster(
            nodes=tuple(Node(device=name, count=count) for name, count in nodes or self.nodes),
            inter_node_bytes_per_s=self.bytes_per_s,
        )
        return RooflineCost(cluster, ModelSpec.load(self.model))

    def seconds(self, cost: CostModel, **options: object) -> float:
        """Return the best plan's iteration time, infinite if nothing fits."""
        chosen = PlanningOptions(**{"tp_degrees": self.tp_degrees, **options})
        try:
            best = plan(cost.cluster, cost.model, self.workload, chosen, cost=cost).best
        except PlanningError:
            return float("inf")
        return best.simulation.iteration_time_s


def run() -> list[Row]:
    """Return the rows of all questions."""
    rows = _against_every_layout()
    tasks = [_draw(random.Random(seed)) for seed in range(NUM_LAWS)]
    rows.append(_law("one more node", tasks, _one_more_node))
    rows.append(_law("one more TP degree", tasks, _one_more_degree))
    rows.append(_law("unequal shares", tasks, _unequal_shares))
    if ROOT.exists():
        rows += [*_sailor_shares(), _sailor_nodes()]
    return rows


def _against_every_layout() -> list[Row]:
    ratios, missed = [], 0
    for task in _small_tasks():
        cost = task.cost()
        estimator = Estimator(cost, task.workload, equal_microbatches=False)
        options = PlanningOptions(tp_degrees=task.tp_degrees)
        degrees = valid_tp_degrees(cost, task.workload, options)
        layouts = every_layout(estimator, degrees, MOST_LAYOUTS)
        if layouts is None:
            continue
        found_s = task.seconds(cost)
        if found_s == float("inf"):
            continue
        ratios.append(found_s / best_layout(estimator, layouts).time_s)
        missed += ratios[-1] > 1 + 1e-6
        if len(ratios) == NUM_CLUSTERS:
            break
    note = f"{len(ratios)} clusters of 8 to 64 devices with at most {MOST_LAYOUTS} layouts"
    return [
        Row.of_share("best plan above the best of every layout", max(ratios) - 1, 0.01, note),
        Row.of_share("clusters where another layout is better", missed / len(ratios), 0.2, note),
    ]


def _small_tasks() -> Iterator[Task]:
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


def _draw(choose: random.Random) -> Task:
    names = choose.sample(DEVICES, choose.randint(1, 4))
    size = choose.choice([1, 4, 8])
    most = max(2, choose.choice([16, 64, 512]) // size // len(names))
    nodes = [(name, size) for name in names for _ in range(choose.randint(1, most))]
    return Task(
        nodes=tuple(nodes),
        model=choose.choice(["bert-large", "gpt-neo-2.7b", "llama-7b"]),
        workload=Workload(
            sequence_length=choose.choice([512, 2048]),
            global_batch_size=choose.choice([8, 64, 512]),
        ),
        bytes_per_s=choose.choice([1.25e8, 1.25e9, 12.5e9, 50e9]),
    )


def _one_more_node(task: Task) -> tuple[float, float]:
    choose = random.Random(repr(task))
    more = [*task.nodes, (choose.choice(DEVICES), choose.choice([1, 4]))]
    return task.seconds(task.cost()), task.seconds(task.cost(more))


def _one_more_degree(task: Task) -> tuple[float, float]:
    return task.seconds(task.cost(), tp_degrees=(1,)), task.seconds(task.cost())


def _unequal_shares(task: Task) -> tuple[float, float]:
    cost = task.cost()
    return task.seconds(cost, equal_microbatches=True), task.seconds(cost)


def _law(what: str, tasks: Sequence[Task], measure: Callable[[Task], tuple[float, float]]) -> Row:
    """Return by how much the best plan gets slower at worst."""
    slower = [after / before - 1 for before, after in map(measure, tasks) if before < float("inf")]
    note = f"worst of {len(slower)} random clusters of up to 512 devices"
    return Row.of_share(f"slower by {what}", max(slower), 0.005, note)


def _sailor_shares() -> Iterator[Row]:
    for fast, slow in ((32, 96), (80, 240), (128, 384)):
        slower = []
        for size in range(1, 9):
            if 1024 % size:
                continue
            workload = Workload(
                sequence_length=2048, global_batch_size=1024, sequences_per_microbatch=size
            )
            equal, free = (
                _sailor_s("OPT-350", fast, slow, workload, equal_microbatches=only_equal)
                for only_equal in (True, False)
            )
            slower.append(free / equal - 1)
        yield Row.of_share(
            f"slower by unequal shares, {fast} A100 + {slow} V100",
            max(slower),
            0.0,
            "OPT-350, batch 1,024, micro-batches of 1, 2, 4, 8, Sailor's profiles and costs",
        )


def _sailor_nodes() -> Row:
    workload = Workload(sequence_length=2048, global_batch_size=512)
    times = [_sailor_s("OPT-30", 64, slow, workload) for slow in (0, 4, 16, 64)]
    slower = max(after / before - 1 for before, after in itertools.pairwise(times))
    note = "64 A100 + 0, 4, 16, 64 V100: " + ", ".join(f"{seconds:.1f} s" for seconds in times)
    return Row.of_share("slower by more nodes, OPT-30, batch 512", slower, 0.0, note)


def _sailor_s(model_name: str, fast: int, slow: int, workload: Workload, **options: bool) -> float:
    cluster = sailor_cluster({"A100-40": fast, "V100-16": slow}, devices_per_node=4)
    profile = load_profile(model_name, {node.device for node in cluster.nodes})
    cost = SailorCost(cluster, model_name, profile)
    found = plan(cluster, profile.model, workload, PlanningOptions(**options), cost=cost)
    return found.best.simulation.iteration_time_s
