"""Moves lead to other plans of the same devices, and no further than options allow."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.planner import Workload
from lightning_hetero.planner.arrangement import PipelineNodes
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.improving.moves import MOVES, RESIZES
from lightning_hetero.planner.judge import Candidate
from lightning_hetero.simulator import RooflineCost
from tests.planner.every_plan import tiny_model

CLUSTER = Cluster(nodes=(Node(device="A100-80GB", count=4),) * 2 + (Node(device="T4", count=4),))
WORKLOAD = Workload(sequence_length=512, global_batch_size=32)


def new_estimator(tp_degrees=(1, 2, 4)) -> Estimator:
    cost = RooflineCost(CLUSTER, tiny_model(8))
    return Estimator(cost, WORKLOAD, equal_microbatches=False, tp_degrees=tp_degrees)


def arrangements(rows, families, estimator):
    """All that moves of (node, devices) make, layers and micro-batches aside."""
    pipelines = tuple(map(PipelineNodes.of_stages, rows))
    estimate = estimator.estimate(pipelines)
    for family in families:
        for moved in family(Candidate.of(estimate), estimator):
            yield moved.arrangement if isinstance(moved, Candidate) else moved


@pytest.mark.parametrize(
    ("rows", "others"),
    [
        ([[(0, 2), (1, 2)]] * 2, [[(0, 1), (1, 1)]] * 4),
        ([[(0, 2), (1, 2)]] * 2, [[(0, 4), (1, 4)]]),
        ([[(0, 4), (2, 2)]] * 1, [[(0, 2), (0, 2), (2, 2)]]),
        ([[(0, 2), (2, 4)], [(1, 2)]], [[(0, 2), (2, 2), (2, 2)], [(1, 2)]]),
    ],
)
def test_devices_are_cut_otherwise_and_back(rows, others):
    estimator = new_estimator()
    for here, there in ((rows, others), (others, rows)):
        wanted = tuple(map(PipelineNodes.of_stages, there))
        assert wanted in set(arrangements(here, RESIZES, estimator))


def test_pipelines_that_cross_nodes_are_dealt_so_that_their_stages_meet_there():
    scattered = [[(0, 1), (1, 1)], [(1, 1), (0, 1)]] * 2
    together = (PipelineNodes((1, 1), (0, 1)),) * 4
    assert together in set(arrangements(scattered, MOVES, new_estimator()))


@settings(deadline=None, max_examples=20)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2])), min_size=1, max_size=3),
        min_size=1,
        max_size=2,
    ),
    tp_degrees=st.sampled_from([(1, 2), (1, 2, 4)]),
)
def test_moves_use_each_device_once_and_degrees_that_are_allowed(rows, tp_degrees):
    used = [0] * 3
    for node, degree in (stage for row in rows for stage in row):
        used[node] += degree
    if max(used) > 4:
        rows = rows[:1] if sum(degree for _, degree in rows[0]) <= 4 else [[(0, 1)]]
    for arrangement in arrangements(rows, (*MOVES, *RESIZES), new_estimator(tp_degrees)):
        left = [node.count for node in CLUSTER.nodes]
        for node, degree in (stage for pipeline in arrangement for stage in pipeline.stages):
            assert degree in tp_degrees
            left[node] -= degree
        assert min(left) >= 0
