"""Estimates follow the simulator; mapping keeps nodes."""

from collections import Counter

import numpy as np
import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import Workload
from lightning_hetero.planner.arrangement import Group, MappingOrder, PipelineNodes, map_groups
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.estimating.memory_fit import owned_capacity
from lightning_hetero.planner.estimating.recompute_tables import (
    MemoryUse,
    RecomputeTables,
    at_level,
)
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.simulator import RooflineCost, StateLayout

FP16 = StateLayout.of_precision("16-mixed")  # T4s compute it faster than bf16.


CLUSTER = Cluster(
    nodes=(
        Node(device="A100-80GB", count=4),
        Node(device="A100-80GB", count=4),
        Node(device="H800-80GB", count=4),
    )
)


@pytest.mark.parametrize(
    "arrangement",
    [
        (PipelineNodes((1,), (0,)), PipelineNodes((1,), (2,))),
        (PipelineNodes((1,) * 2, (0, 2)), PipelineNodes((2,) * 2, (1, 2))),
        (PipelineNodes((1,) * 4, (0, 0, 1, 2)),),
    ],
)
def test_estimates_are_within_3_percent_of_the_simulator(arrangement):
    workload = Workload(sequence_length=2048, global_batch_size=64)
    cost = RooflineCost(CLUSTER, ModelSpec.load("gpt-neo-2.7b"))
    estimator = Estimator(cost, workload, equal_microbatches=False)
    estimate = estimator.estimate(arrangement)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    candidate = Candidate(
        arrangement=arrangement, layers=estimate.layers, num_microbatches=estimate.num_microbatches
    )
    assert estimate.time_s == pytest.approx(judge.score(candidate), rel=0.03)


def test_estimates_count_links_that_set_the_pace_and_states_that_others_own():
    """T4s have no room for states: an A100 over 1 Gb/s owns them, and layers make room for it."""
    cluster = Cluster(
        nodes=(Node(device="A100-80GB", count=1), Node(device="T4", count=8)),
        inter_node_bytes_per_s=1.25e8,
    )
    workload = Workload(sequence_length=8192, global_batch_size=64, sequences_per_microbatch=4)
    cost = RooflineCost(cluster, ModelSpec.load("gpt-neo-2.7b"), layout=FP16)
    estimator = Estimator(cost, workload, equal_microbatches=False)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    arrangement = (PipelineNodes((1,) * 7, (1,) * 6 + (0,)),)
    estimate = estimator.estimate(arrangement)
    score = judge.score(Candidate.of(estimate))
    assert estimate.time_s == pytest.approx(score, rel=0.01)
    mixed = PipelineNodes((2, 2, 2, 2, 1), (1, 1, 1, 1, 0))
    estimate = estimator.estimate((mixed,))
    by_stages_alone = Candidate(
        arrangement=(mixed,), layers=(estimator.balance(mixed, 1),), num_microbatches=(16,)
    )
    assert judge.score(Candidate.of(estimate)) < 0.9 * judge.score(by_stages_alone)


def test_few_micro_batches_leave_more_layers_to_fast_stages():
    cluster = Cluster(
        nodes=(Node(device="A100-80GB", count=1), Node(device="T4", count=1)),
        inter_node_bytes_per_s=12.5e9,
    )
    workload = Workload(sequence_length=512, global_batch_size=2)
    cost = RooflineCost(cluster, ModelSpec.load("bert-large"), layout=FP16)
    estimator = Estimator(cost, workload, equal_microbatches=False)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    pipeline = PipelineNodes((1, 1), (0, 1))
    estimate = estimator.estimate((pipeline,))
    by_slowest_stage = Candidate(
        arrangement=(pipeline,), layers=(estimator.balance(pipeline, 1),), num_microbatches=(2,)
    )
    assert judge.score(Candidate.of(estimate)) < 0.95 * judge.score(by_slowest_stage)


def test_stages_without_room_for_an_equal_share_leave_it_to_those_that_have_room():
    """One share for all ranks recomputes too much on some, or finds no plan at all."""
    llama = ModelSpec.load("llama-7b")
    tight = Cluster(nodes=(Node(device="T4", count=2),) * 6)
    workload = Workload(sequence_length=2048, global_batch_size=64)
    estimator = Estimator(RooflineCost(tight, llama), workload, equal_microbatches=False)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    arrangement = (PipelineNodes((1,) * 12, (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)),)
    with_equal_shares = Candidate(
        arrangement=arrangement,
        layers=((2, 2, 3, 3, 2, 2, 3, 3, 3, 3, 3, 3),),
        num_microbatches=(64,),
    )
    found = Candidate.of(estimator.estimate(arrangement))
    assert judge.score(found) < 0.9 * judge.score(with_equal_shares)
    unlike = Cluster(
        nodes=(
            Node(device="RTX-4090", count=2),
            Node(device="V100-16GB", count=8),
            Node(device="RTX-2080", count=1),
        ),
        inter_node_bytes_per_s=1.25e8,
    )
    workload = Workload(sequence_length=8192, global_batch_size=64)
    estimator = Estimator(RooflineCost(unlike, llama), workload, equal_microbatches=False)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    estimate = estimator.estimate((PipelineNodes((1,) * 8 + (2,), (1,) * 8 + (0,)),))
    assert estimate is not None
    assert judge.score(Candidate.of(estimate)) < float("inf")


@pytest.mark.parametrize(
    ("device", "may_recompute"), [("T4", True), ("T4", False), ("RTX-A6000", True)]
)
def test_the_most_room_in_some_seconds_is_that_of_the_best_level_of_recomputation(
    device, may_recompute
):
    cluster = Cluster(nodes=(Node(device=device, count=2),))
    cost = RooflineCost(cluster, ModelSpec.load("bert-large"))
    workload = Workload(sequence_length=8192, global_batch_size=8)
    estimator = Estimator(cost, workload, equal_microbatches=True)
    pipeline, use = PipelineNodes((2, 2), (0, 0)), MemoryUse(num_pipelines=3, num_in_flight=2)
    table = estimator.stage_tables(pipeline, 3, 0.0)[0]
    inner_s, _ = estimator.stage_times_s(0, 2, first=False, last=False)
    limit_s = float(table.unlimited_s[12]) * 1.1
    tables = RecomputeTables(cost, workload, may_recompute=may_recompute)
    found, rooms = tables.roomiest(table, use, inner_s, limit_s)
    num_fitting = 0
    for num_layers in range(1, 25):
        most = num_layers * (1 + table.is_selective) if may_recompute else 0
        best = -np.inf
        for level in range(most + 1):
            shape = at_level(
                table.shape._replace(num_layers=num_layers), level, is_selective=table.is_selective
            )
            if sum(cost.compute_s(shape, workload.microbatch)) <= limit_s:
                best = max(best, 2 * owned_capacity(cost, shape, 3, 2 * 8192, 8192))
        assert rooms[num_layers] == (pytest.approx(best, rel=1e-5) if best >= 0 else -np.inf)
        assert (found.total_s[num_layers] <= limit_s) == (best >= 0)
        num_fitting += best >= 0
    assert 0 < num_fitting < 24


def test_pipelines_of_a_depth_are_cut_alike_where_gradients_take_long():
    """Cut alike, a layer has the same holders as its neighbours: on slow links that is faster."""
    kinds = [("A10-24GB", 1)] * 6 + [("T4", 2)] * 2 + [("A100-80GB", 1)] * 4
    nodes = tuple(Node(device=device, count=count) for device, count in kinds)
    bert = ModelSpec.load("bert-large")
    workload = Workload(sequence_length=8192, global_batch_size=64, sequences_per_microbatch=4)
    slow = [PipelineNodes((1, 1, 1), (i, 2 + i, 4 + i)) for i in range(2)]
    fast = [PipelineNodes((2, 1, 1), (6 + i, 8 + i, 10 + i)) for i in range(2)]
    found = {}
    for bytes_per_s in (1.25e8, 50e9):
        cost = RooflineCost(Cluster(nodes=nodes, inter_node_bytes_per_s=bytes_per_s), bert)
        estimator = Estimator(cost, workload, equal_microbatches=False)
        judge = Judge(estimator, lambda seconds, _arrangement: seconds)
        estimate = estimator.estimate((*slow, *fast))
        found[bytes_per_s] = judge, estimate
    judge, estimate = found[1.25e8]
    balanced_alone = Candidate(
        arrangement=(*slow, *fast),
        layers=((6, 9, 9),) * 2 + ((1, 13, 10),) * 2,
        num_microbatches=(3, 3, 5, 5),
    )
    assert len(set(estimate.layers)) == 1
    assert judge.score(Candidate.of(estimate)) < 0.95 * judge.score(balanced_alone)
    assert len(set(found[50e9][1].layers)) == 2


GROUPS = [Group((1,) * 2, ("A100-80GB", "H800-80GB"))] * 4 + [Group((1,), ("A100-80GB",))] * 4


@pytest.mark.parametrize("order", list(MappingOrder))
def test_mapping_uses_each_device_once_and_keeps_types(order):
    arrangement = map_groups(GROUPS, CLUSTER, (4, 4, 4), order)
    used = Counter(node for pipeline in arrangement for node in pipeline.nodes)
    assert used == {0: 4, 1: 4, 2: 4}
    for group, pipeline in zip(GROUPS, arrangement, strict=True):
        assert tuple(CLUSTER.nodes[n].device for n in pipeline.nodes) == group.devices


def test_stages_together_puts_the_first_stages_of_all_pipelines_on_one_node():
    arrangement = map_groups(GROUPS[:4], CLUSTER, (4, 4, 4), MappingOrder.STAGES_TOGETHER)
    assert [pipeline.nodes for pipeline in arrangement] == [(0, 2)] * 4


def test_pipelines_together_keeps_the_stages_of_a_pipeline_on_one_node():
    groups = [Group((2,) * 2, ("A100-80GB", "A100-80GB"))] * 2
    arrangement = map_groups(groups, CLUSTER, (4, 4, 4), MappingOrder.PIPELINES_TOGETHER)
    assert [pipeline.nodes for pipeline in arrangement] == [(0, 0), (1, 1)]


def test_groups_that_nodes_cannot_hold_have_no_mapping():
    groups = [Group((4,), ("A100-80GB",))]
    assert map_groups(groups, CLUSTER, (3, 3, 4), MappingOrder.STAGES_TOGETHER) is None
