"""Laws of the search: what it may do more never makes its best plan slower.

Each random cluster is planned as it is and with less: without one of its nodes, with some of its TP
degrees, as if recomputing freed no memory, and with equal shares; and the search that chooses a
size of micro-batches is compared with searches of each size. Devices and times are from data sheets
or, with Sailor's profiles beside the repository, as measured there. `bench_search` tries them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import PlanningOptions, Workload, plan, plan_best_size
from lightning_hetero.planner.workload import valid_tp_degrees
from lightning_hetero.simulator import CostModel, RooflineCost, StateLayout
from tests.simulator.sailor import ROOT, SailorCost, cluster_of, load_profile

DEVICES = (
    "A100-80GB", "H800-80GB", "V100-32GB", "V100-16GB", "RTX-4090", "RTX-2080", "T4", "A10-24GB",
)  # fmt: skip
MEASURED = {
    "OPT-350": ("A100-40", "A100-80", "V100-16", "GH-96", "RTX-2080", "RTX-3090", "Titan-RTX"),
    "GPT-Neo-2.7": ("A100-40", "A100-80", "V100-16"),
    "OPT-30": ("A100-40", "V100-16"),
}
"""Models and devices of Sailor's profiles."""
SIZES = {8: 6, 16: 6, 32: 4, 64: 3, 512: 1}
"""Most devices of a random cluster, and how often."""
TOLERANCE = 0.005
"""A best plan may be so much slower, as a share."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cluster and what to plan for it."""

    nodes: tuple[tuple[str, int], ...]
    """Device type and count of each node."""
    model: str
    """Name of the model."""
    workload: Workload
    """What an iteration has to do."""
    bytes_per_s: float | None
    """Network between nodes; None for Sailor's network and profiles."""
    tp_degrees: tuple[int, ...] | None = None
    """TP degrees to consider; None means all."""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(count for _, count in self.nodes)

    def cost(self, nodes: Sequence[tuple[str, int]] | None = None) -> CostModel:
        """Return the cost model, of other nodes if some are given, with what it remembers."""
        return _cost(self.nodes if nodes is None else tuple(nodes), self.model, self.bytes_per_s)

    def seconds(self, cost: CostModel, **options: object) -> float:
        """Return the best plan's iteration time, infinite if nothing fits."""
        chosen = PlanningOptions(**{"tp_degrees": self.tp_degrees, **options})
        try:
            best = plan(cost.cluster, cost.model, self.workload, chosen, cost=cost).best
        except PlanningError:
            return float("inf")
        return best.simulation.iteration_time_s

    @cached_property
    def best_s(self) -> float:
        """The best plan's iteration time with all there is."""
        return self.seconds(self.cost())

    @cached_property
    def best_of_sizes_s(self) -> float:
        """The same with the best size of micro-batches."""
        options = PlanningOptions(tp_degrees=self.tp_degrees)
        try:
            best = plan_best_size(self.cost(), self.workload, options).best
        except PlanningError:
            return float("inf")
        return best.simulation.iteration_time_s


@lru_cache(maxsize=4)
def _cost(nodes: tuple[tuple[str, int], ...], model: str, bytes_per_s: float | None) -> CostModel:
    if bytes_per_s is None:
        return SailorCost(cluster_of(nodes), model, load_profile(model, {n for n, _ in nodes}))
    cluster = Cluster(
        nodes=tuple(Node(device=name, count=count) for name, count in nodes),
        inter_node_bytes_per_s=bytes_per_s,
    )
    # fp16, since some cards compute bf16 much slower.
    layout = StateLayout.of_precision("16-mixed")
    return RooflineCost(cluster, ModelSpec.load(model), layout=layout)


def draw(seed: int, most: int = 512) -> Task:
    """Return a random task of up to `most` devices, of about as many if no size is so large."""
    choose = random.Random(seed)
    sizes = {size: often for size, often in SIZES.items() if size <= most}
    if most > max(sizes, default=0):
        sizes[most] = max(SIZES.values())
    (size,) = choose.choices(list(sizes), list(sizes.values()))
    if ROOT.exists() and choose.random() < 0.3:
        return _draw_measured(choose, size)
    names = choose.sample(DEVICES, choose.randint(1, 4))
    return Task(
        nodes=_draw_nodes(choose, names, size, [1, 2, 4, 8]),
        model=choose.choice(["bert-large", "gpt-neo-2.7b", "llama-7b"]),
        workload=Workload(
            sequence_length=choose.choice([512, 2048, 8192]),
            global_batch_size=choose.choice([8, 64, 512]),
            sequences_per_microbatch=choose.choice([1, 1, 4]),
        ),
        bytes_per_s=choose.choice([1.25e8, 1.25e9, 12.5e9, 50e9]),
    )


def _draw_measured(choose: random.Random, size: int) -> Task:
    model = choose.choice([name for name in MEASURED if name != "OPT-30" or size >= 64])
    devices = MEASURED[model]
    return Task(
        nodes=_draw_nodes(
            choose, choose.sample(devices, choose.randint(1, min(3, len(devices)))), size, [4]
        ),
        model=model,
        workload=Workload(
            sequence_length=2048,
            global_batch_size=choose.choice([64, 512, 1024]),
            sequences_per_microbatch=1 if model == "OPT-30" else choose.choice([1, 2, 4]),
        ),
        bytes_per_s=None,
    )


def _draw_nodes(
    choose: random.Random, names: Sequence[str], size: int, counts: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    nodes = []
    for name in names:
        count = choose.choice(counts)
        most = max(1, size // count // len(names))
        nodes += [(name, count)] * choose.randint(max(1, most // 2), most)
    return tuple(nodes)


def _without_a_node(task: Task) -> float | None:
    if len(task.nodes) == 1:
        return None
    left = list(task.nodes)
    left.pop(random.Random(repr(task)).randrange(len(left)))
    return task.seconds(task.cost(left))


def _with_some_degrees(task: Task) -> float | None:
    cost = task.cost()
    degrees = valid_tp_degrees(cost, task.workload, PlanningOptions(tp_degrees=task.tp_degrees))
    if len(degrees) == 1:
        return None
    choose, larger = random.Random(repr(task)), degrees[1:]
    some = choose.sample(larger, choose.randrange(len(larger)))
    return task.seconds(cost, tp_degrees=(degrees[0], *some))


def _without_recomputation(task: Task) -> float:
    cost = _cost.__wrapped__(task.nodes, task.model, task.bytes_per_s)
    layer_bytes = cost.layer_bytes

    def kept_anyway(shape):
        return (layer_bytes(shape)[0],) * 2

    cost.layer_bytes = kept_anyway
    return task.seconds(cost)


def _with_equal_shares(task: Task) -> float:
    return task.seconds(task.cost(), equal_microbatches=True)


def _with_one_size(task: Task) -> float | None:
    if task.bytes_per_s is None:
        return None  # Profiles know few sizes.
    batch, own = task.workload.global_batch_size, task.workload.sequences_per_microbatch
    return min(
        task.best_s
        if size == own
        else replace(task, workload=replace(task.workload, sequences_per_microbatch=size)).best_s
        for size in (1, 2, 4, 8, 16)
        if batch % size == 0
    )


LAWS: dict[str, Callable[[Task], float | None]] = {
    "a node": _without_a_node,
    "TP degrees": _with_some_degrees,
    "recomputation": _without_recomputation,
    "unequal shares": _with_equal_shares,
    "sizes": _with_one_size,
}
"""What a search may do more, and the best seconds without it; None where there is none."""


def slower_by(task: Task, law: str) -> float | None:
    """Return by what share more freedom makes the best plan slower; None if it says nothing."""
    restricted_s = LAWS[law](task)
    if restricted_s is None or restricted_s == float("inf"):
        return None
    return (task.best_of_sizes_s if law == "sizes" else task.best_s) / restricted_s - 1
