"""Micro-batch shares equal brute force; estimates follow the simulator; mapping keeps nodes."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import Group, MappingOrder, Workload, map_groups
from lightning_hetero.planner.estimate import Estimator, deal_microbatches, share_microbatches
from lightning_hetero.planner.improve import Candidate, Judge
from lightning_hetero.planner.layout import PipelineLayout
from lightning_hetero.simulator import RooflineCost


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 3.0), st.integers(1, 2), st.integers(1, 9)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 9),
)
def test_shares_minimise_the_longest_pipeline(classes, total):
    flat = [(f, s, limit) for f, s, n, limit in classes for _ in range(n)]
    shares = share_microbatches(*zip(*classes, strict=True), total)
    best = min(
        (
            max(f + s * k for (f, s, _), k in zip(flat, counts, strict=True))
            for counts in itertools.product(*(range(1, limit + 1) for _, _, limit in flat))
            if sum(counts) == total
        ),
        default=None,
    )
    if best is None:
        assert shares is None
        return
    counts = [count for share in shares for count in share]
    assert sum(counts) == total
    assert all(1 <= k <= limit for (_, _, limit), k in zip(flat, counts, strict=True))
    longest = max(f + s * k for (f, s, _), k in zip(flat, counts, strict=True))
    assert longest == pytest.approx(best)


def test_equal_shares_differ_by_one_at_most():
    shares = deal_microbatches((2, 3), (9, 9), 12)
    assert sorted(count for share in shares for count in share) == [2, 2, 2, 3, 3]
    assert deal_microbatches((2, 3), (9, 1), 12) is None
    assert deal_microbatches((2, 3), (9, 9), 4) is None


CLUSTER = Cluster(
    nodes=(
        Node(device="A100-80GB", count=4),
        Node(device="A100-80GB", count=4),
        Node(device="H800-80GB", count=4),
    )
)


@pytest.mark.parametrize(
    "layout",
    [
        (PipelineLayout(1, (0,)), PipelineLayout(1, (2,))),
        (PipelineLayout(1, (0, 2)), PipelineLayout(2, (1, 2))),
        (PipelineLayout(1, (0, 0, 1, 2)),),
    ],
)
def test_estimates_are_within_3_percent_of_the_simulator(layout):
    workload = Workload(sequence_length=2048, global_batch_size=64)
    cost = RooflineCost(CLUSTER, ModelSpec.load("gpt-neo-2.7b"))
    estimator = Estimator(cost, workload, equal_microbatches=False)
    estimate = estimator.layout(layout)
    judge = Judge(estimator, lambda _plan, simulation: simulation.iteration_time_s)
    candidate = Candidate(
        layout=layout, layers=estimate.layers, num_microbatches=estimate.num_microbatches
    )
    assert estimate.time_s == pytest.approx(judge.score(candidate), rel=0.03)


GROUPS = [Group(1, ("A100-80GB", "H800-80GB"))] * 4 + [Group(1, ("A100-80GB",))] * 4


@pytest.mark.parametrize("order", list(MappingOrder))
def test_mapping_uses_each_device_once_and_keeps_types(order):
    layout = map_groups(GROUPS, CLUSTER, (4, 4, 4), order)
    used = Counter(node for pipeline in layout for node in pipeline.nodes)
    assert used == {0: 4, 1: 4, 2: 4}
    for group, pipeline in zip(GROUPS, layout, strict=True):
        assert tuple(CLUSTER.nodes[n].device for n in pipeline.nodes) == group.devices


def test_stages_together_puts_the_first_stages_of_all_pipelines_on_one_node():
    layout = map_groups(GROUPS[:4], CLUSTER, (4, 4, 4), MappingOrder.STAGES_TOGETHER)
    assert [pipeline.nodes for pipeline in layout] == [(0, 2)] * 4


def test_pipelines_together_keeps_the_stages_of_a_pipeline_on_one_node():
    groups = [Group(2, ("A100-80GB", "A100-80GB"))] * 2
    layout = map_groups(groups, CLUSTER, (4, 4, 4), MappingOrder.PIPELINES_TOGETHER)
    assert [pipeline.nodes for pipeline in layout] == [(0, 0), (1, 1)]


def test_groups_that_nodes_cannot_hold_have_no_mapping():
    groups = [Group(4, ("A100-80GB",))]
    assert map_groups(groups, CLUSTER, (3, 3, 4), MappingOrder.STAGES_TOGETHER) is None
