"""What a search may do more never makes its best plan slower, on random small clusters."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import PlanningOptions, Workload, plan
from lightning_hetero.planner.workload import valid_tp_degrees
from lightning_hetero.simulator import RooflineCost, StateLayout

DEVICES = (
    "A100-80GB", "H800-80GB", "V100-32GB", "V100-16GB", "RTX-4090", "RTX-2080", "T4", "A10-24GB",
)  # fmt: skip
MOST_DEVICES = 4
LAWS = ("a node", "TP degrees", "recomputation", "unequal shares")


@st.composite
def tasks(draw: st.DrawFn) -> tuple[RooflineCost, Workload]:
    """Draw a task of up to four devices of two to four types, weak ones among them."""
    nodes: list[Node] = []
    for name in draw(st.lists(st.sampled_from(DEVICES), min_size=2, max_size=4, unique=True)):
        left = MOST_DEVICES - sum(node.count for node in nodes)
        count = draw(st.sampled_from([count for count in (1, 2, 4) if count <= left] or [0]))
        number = draw(st.integers(1, left // count)) if count else 0
        nodes += [Node(device=name, count=count or 1)] * number
    workload = Workload(
        sequence_length=draw(st.sampled_from([2048, 512, 8192])),
        global_batch_size=draw(st.sampled_from([8, 1, 64, 512])),
    )
    model = draw(st.sampled_from(["bert-large", "gpt-neo-2.7b", "llama-7b"]))
    bytes_per_s = draw(st.sampled_from([1.25e9, 1.25e8, 12.5e9]))
    return cost_of(nodes, ModelSpec.load(model), bytes_per_s), workload


def cost_of(nodes: list[Node], model: ModelSpec, bytes_per_s: float) -> RooflineCost:
    cluster = Cluster(nodes=tuple(nodes), inter_node_bytes_per_s=bytes_per_s)
    # fp16, since some cards compute bf16 much slower.
    return RooflineCost(cluster, model, layout=StateLayout.of_precision("16-mixed"))


def best_s(cost: RooflineCost, workload: Workload, **options: object) -> float:
    """Return the best plan's iteration time, infinite if nothing fits."""
    try:
        found = plan(cost.cluster, cost.model, workload, PlanningOptions(**options), cost=cost)
    except PlanningError:
        return float("inf")
    return found.best.simulation.iteration_time_s


def best_without_s(law: str, cost: RooflineCost, workload: Workload) -> float:
    """Return the best plan's time where the search may do less, infinite if there is no less."""
    nodes, choose = list(cost.cluster.nodes), random.Random(0)
    if law == "unequal shares":
        return best_s(cost, workload, equal_microbatches=True)
    if law == "TP degrees":
        one, *larger = valid_tp_degrees(cost, workload, PlanningOptions())
        some = choose.sample(larger, choose.randrange(len(larger) or 1))
        return best_s(cost, workload, tp_degrees=(one, *some)) if larger else float("inf")
    if law == "a node":
        nodes.pop(choose.randrange(len(nodes)))
    if not nodes:
        return float("inf")
    less = cost_of(nodes, cost.model, cost.cluster.inter_node_bytes_per_s)
    if law == "recomputation":  # It frees nothing.
        layer_bytes = less.layer_bytes
        less.layer_bytes = lambda shape: (layer_bytes(shape)[0],) * 2
    return best_s(less, workload)


@given(task=tasks(), law=st.sampled_from(LAWS))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
def test_more_freedom_never_makes_the_best_plan_slower(task, law):
    assert best_s(*task) <= best_without_s(law, *task) * 1.005
