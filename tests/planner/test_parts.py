"""The search never loses to a part of itself: fewer devices or degrees, equal shares."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import PlanningOptions, Workload, plan
from lightning_hetero.planner.allowances import smaller_allowances
from lightning_hetero.planner.arrangement import PipelineNodes
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.search import PlanSearch
from lightning_hetero.planner.starting_points import propose_arrangements
from lightning_hetero.simulator import RooflineCost, StateLayout
from tests.benchmarks.search_laws import TOLERANCE, Task
from tests.simulator.sailor import ROOT, SailorCost, load_profile, sailor_cluster

BERT = ModelSpec.load("bert-large")
DEVICES = ["A100-80GB", "RTX-4090", "T4"]


def iteration_s(nodes, model, workload, bytes_per_s=12.5e9, **options) -> float:
    cluster = Cluster(
        nodes=tuple(Node(device=device, count=count) for device, count in nodes),
        inter_node_bytes_per_s=bytes_per_s,
    )
    best = plan(cluster, model, workload, PlanningOptions(**options)).best
    return best.simulation.iteration_time_s


@pytest.mark.parametrize("num_nodes", [7, 12])
def test_devices_behind_a_slow_network_are_left_idle(num_nodes):
    workload = Workload(sequence_length=512, global_batch_size=32)
    one, many = (
        iteration_s([("RTX-4090", 1)] * count, BERT, workload, 1.25e8) for count in (1, num_nodes)
    )
    assert many <= one


@pytest.mark.parametrize("num_nodes", [25, 32])
def test_one_micro_batch_is_planned_on_more_devices_than_the_model_has_layers(num_nodes):
    workload = Workload(sequence_length=512, global_batch_size=1)
    one = iteration_s([("A100-80GB", 1)], BERT, workload)
    assert iteration_s([("A100-80GB", 1)] * num_nodes, BERT, workload) <= one


def test_fewer_of_a_type_than_all_but_one_are_used_where_they_are_the_fastest():
    nodes = [("A100-80GB", 2)] * 5
    others = [("RTX-4090", 1), ("RTX-4090", 1), ("A100-80GB", 1), ("A100-80GB", 1)]
    workload = Workload(sequence_length=512, global_batch_size=32)
    alone, all_of_them = (
        iteration_s(some, BERT, workload, 1.25e9, thorough=False)
        for some in (nodes, [*others, *nodes])
    )
    assert all_of_them <= alone * (1 + TOLERANCE)


def test_parts_leave_out_types_nodes_and_devices_of_nodes():
    nodes = [Node(device=name, count=2) for name in ("A100-80GB", "T4", "T4")]
    parts = smaller_allowances(Cluster(nodes=tuple(nodes)), [1.0, 5.0, 5.0])
    assert len(parts) == len(set(parts))
    assert list(map(sum, parts)) == sorted(map(sum, parts))
    assert {(2, 0, 0), (0, 2, 2), (2, 2, 0), (1, 1, 1), (1, 0, 0), (0, 2, 0)} <= set(parts)
    assert (2, 2, 2) not in parts


def test_with_a_type_more_all_parts_and_the_cluster_before_are_parts():
    nodes = [Node(device="A100-80GB", count=8)] * 3 + [Node(device="T4", count=4)] * 5
    before = smaller_allowances(Cluster(nodes=tuple(nodes)), [1.0] * 3 + [5.0] * 5)
    for burden in (0.5, 2.0, 9.0):
        more = Cluster(nodes=(*nodes, Node(device="A10-24GB", count=1)))
        parts = smaller_allowances(more, [1.0] * 3 + [5.0] * 5 + [burden])
        assert {(*part, 0) for part in [*before, (8, 8, 8, 4, 4, 4, 4, 4)]} <= set(parts)


@given(
    nodes=st.lists(
        st.tuples(st.sampled_from(DEVICES), st.sampled_from([1, 2, 4])), min_size=1, max_size=6
    ),
    more=st.tuples(st.sampled_from(DEVICES), st.sampled_from([1, 2, 4])),
)
def test_with_any_node_more_all_parts_of_a_small_cluster_are_parts(nodes, more):
    found = []
    for some in (nodes, [*nodes, more]):
        cluster = Cluster(nodes=tuple(Node(device=name, count=count) for name, count in some))
        parts = [*smaller_allowances(cluster, [1.0] * len(some)), [count for _, count in some]]
        # Which of equal nodes are left out makes no difference.
        used = [[(*n, k) for n, k in zip(some, part, strict=True) if k] for part in parts]
        found.append({tuple(sorted(row)) for row in used if all(k == n for _, n, k in row)})
    assert found[0] <= found[1]


@pytest.mark.parametrize(
    ("types", "model", "batch", "length"),
    [
        ({"A100-80GB": 4, "V100-16GB": 5}, "gpt-neo-2.7b", 256, 2048),
        ({"H800-80GB": 5, "A10-24GB": 4}, "llama-7b", 128, 2048),
    ],
)
def test_what_equal_shares_alone_would_simulate_is_simulated_for_many_devices_too(
    types, model, batch, length
):
    nodes = [Node(device=name, count=8) for name, count in types.items() for _ in range(count)]
    fp16 = StateLayout.of_precision("16-mixed")  # Which a V100 computes faster than bf16.
    cost = RooflineCost(Cluster(nodes=tuple(nodes)), ModelSpec.load(model), layout=fp16)
    workload = Workload(sequence_length=length, global_batch_size=batch)

    def simulated(**options):
        search = PlanSearch(cost, workload, PlanningOptions(**options))
        return set(search.starts.find(float("inf")))

    equal = simulated(equal_microbatches=True)
    assert equal
    assert equal <= simulated()


def test_what_an_estimate_replaces_is_simulated_too(monkeypatch):
    nodes = [("A100-80GB", 1), ("T4", 1)]
    workload = Workload(sequence_length=512, global_batch_size=32)
    monkeypatch.setattr(
        "lightning_hetero.planner.improving.improver.improve_best",
        lambda candidates, judge, _, **__: sorted(candidates, key=judge.score),
    )
    expected = iteration_s(nodes, BERT, workload)
    honest = Estimator.estimate

    def hopeful(self, arrangement, below_s=float("inf")):
        """Return what takes longest, as if it were a little faster than what was found."""
        found = honest(self, arrangement, below_s)
        if found is None:
            return None
        counts = found.num_microbatches[1:] + found.num_microbatches[:1]
        layers = tuple(split[::-1] for split in found.layers)
        other = replace(found, layers=layers, num_microbatches=counts, time_s=0.99 * found.time_s)
        return replace(other, otherwise=found)

    monkeypatch.setattr(Estimator, "estimate", hopeful)
    assert iteration_s(nodes, BERT, workload) <= expected * (1 + TOLERANCE)


def test_a_thorough_search_leaves_local_optima():
    task = Task(
        nodes=(("A10-24GB", 4), *[("A100-80GB", 2)] * 3),
        model="llama-7b",
        workload=Workload(sequence_length=2048, global_batch_size=8),
        bytes_per_s=12.5e9,
    )
    thorough_s, usual_s = (
        task.seconds(task.cost(), thorough=thorough) for thorough in (True, False)
    )
    assert thorough_s < 0.995 * usual_s


def test_whatever_is_proposed_with_one_degree_is_proposed_with_several():
    # So many devices that groupings aren't enumerated.
    nodes = [Node(device=name, count=8) for name in DEVICES for _ in range(2)]
    workload = Workload(sequence_length=512, global_batch_size=64)
    cost = RooflineCost(Cluster(nodes=tuple(nodes)), BERT)
    estimator = Estimator(cost, workload, equal_microbatches=False)
    several = set(propose_arrangements(estimator, [8] * 6, (1, 2, 4, 8), (1, 2, 4, 8)))
    for degree in (1, 4):
        assert set(propose_arrangements(estimator, [8] * 6, (degree,), (degree,))) <= several


def sailor_plan(model_name, fast, slow, workload, **options):
    cluster = sailor_cluster({"A100-40": fast, "V100-16": slow}, devices_per_node=4)
    devices = {node.device for node in cluster.nodes}
    profile = load_profile(model_name, devices)
    cost = SailorCost(cluster, model_name, profile)
    found = plan(cluster, profile.model, workload, PlanningOptions(**options), cost=cost)
    return found.best.simulation.iteration_time_s


@pytest.mark.skipif(not ROOT.exists(), reason=f"no profiles under {ROOT}")
def test_weak_devices_with_little_memory_make_a_large_model_faster():
    workload = Workload(sequence_length=2048, global_batch_size=512)
    none, few, more = (
        sailor_plan("OPT-30", 64, slow, workload, thorough=False) for slow in (0, 4, 16)
    )
    assert more < few < none


@pytest.mark.skipif(not ROOT.exists(), reason=f"no profiles under {ROOT}")
def test_unequal_shares_are_faster_than_equal_ones_with_measured_costs():
    workload = Workload(sequence_length=2048, global_batch_size=256, sequences_per_microbatch=4)
    free, equal = (
        sailor_plan("OPT-350", 8, 24, workload, equal_microbatches=only_equal, thorough=False)
        for only_equal in (False, True)
    )
    assert free < 0.98 * equal


def test_estimates_price_messages_as_the_cost_model_does():
    class SlowMessages(RooflineCost):
        def activation_s(self, sender, receiver, num_tokens):
            return 10.0

    cluster = Cluster(nodes=(Node(device="T4", count=2),))
    workload = Workload(sequence_length=512, global_batch_size=8)
    estimator = Estimator(SlowMessages(cluster, BERT), workload, equal_microbatches=False)
    estimate = estimator.estimate((PipelineNodes((1,) * 2, (0, 0)),))
    assert estimate is not None
    assert estimate.time_s > 20.0
