"""Estimates follow the simulator; mapping keeps nodes."""

from collections import Counter

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import Workload
from lightning_hetero.planner.arrangement import Group, MappingOrder, PipelineNodes, map_groups
from lightning_hetero.planner.estimator import Estimator
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.simulator import RooflineCost

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
    cost = RooflineCost(cluster, ModelSpec.load("gpt-neo-2.7b"))
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
    cost = RooflineCost(cluster, ModelSpec.load("bert-large"))
    estimator = Estimator(cost, workload, equal_microbatches=False)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    pipeline = PipelineNodes((1, 1), (0, 1))
    estimate = estimator.estimate((pipeline,))
    by_slowest_stage = Candidate(
        arrangement=(pipeline,), layers=(estimator.balance(pipeline, 1),), num_microbatches=(2,)
    )
    assert judge.score(Candidate.of(estimate)) < 0.95 * judge.score(by_slowest_stage)


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
