"""The exchange's closed forms against walking every layer and every pair of ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange.transfers import ExchangeKind
from lightning_hetero.simulator import RooflineCost, StateLayout
from lightning_hetero.simulator.exchange import ExchangeTable, exchange_of
from lightning_hetero.simulator.unit_times import Holders

NUM_LAYERS = 6
MODEL = ModelSpec(
    name="tiny",
    num_layers=NUM_LAYERS,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=128,
    vocab_size=200,
    gated_mlp=True,
    tied_embeddings=False,
)


def table_of(plan: ParallelPlan, cost: RooflineCost) -> ExchangeTable:
    """Return the table of a plan's pipelines, each by itself."""
    return ExchangeTable([Holders.of([pipeline]) for pipeline in plan.pipelines], cost)


@st.composite
def plans(draw) -> ParallelPlan:
    pipelines, rank = [], 0
    for _ in range(draw(st.integers(1, 4))):
        inner = draw(st.sets(st.integers(1, NUM_LAYERS - 1), max_size=3))
        edges = [0, *sorted(inner), NUM_LAYERS]
        tp_degree = draw(st.sampled_from([1, 2]))
        stages = []
        for start, stop in itertools.pairwise(edges):
            ranks = tuple(range(rank, rank + tp_degree))
            stages.append(StagePlan(ranks=ranks, layers=range(start, stop)))
            rank += tp_degree
        pipelines.append(PipelinePlan(stages=tuple(stages)))
    return ParallelPlan(pipelines=tuple(pipelines))


@st.composite
def costs(draw, *, overlap: bool = True) -> RooflineCost:
    counts = draw(st.lists(st.integers(1, 4), min_size=3, max_size=16))
    counts.append(max(0, 32 - sum(counts)) + 1)
    last = len(counts) - 1
    pairs = draw(
        st.sets(st.tuples(st.integers(0, last), st.integers(0, last)).map(sorted).map(tuple))
    )
    links = tuple(
        Link(nodes=pair, bytes_per_s=1e6 * (2 + index), latency_s=1e-3 * index)
        for index, pair in enumerate(sorted(pairs))
    )
    cluster = Cluster(
        nodes=tuple(Node(device="A100-40GB", count=count) for count in counts),
        links=links,
        inter_node_bytes_per_s=1e7,
        inter_node_latency_s=2e-4,
    )
    return RooflineCost(cluster, MODEL, layout=StateLayout(overlap=overlap))


@given(plans(), costs())
@settings(max_examples=60)
def test_a_unit_is_sent_to_every_other_holder_over_its_own_link(plan, cost):
    cost.layout = StateLayout(exchange=ExchangeKind.MESSAGES)
    table = table_of(plan, cost)
    for segment, push, pull in zip(table.segments, table.push_s, table.pull_s, strict=True):
        stages = [p.stages[s] for p, s in zip(plan.pipelines, segment.stages, strict=True)]
        for index, stage in enumerate(stages):
            share = segment.params_per_unit / stage.tp_degree / len(stages) * 2
            peers = [
                cost.link(stage.ranks[0], other.ranks[0]) for other in stages if other is not stage
            ]
            expected = sum(share / rate for rate, _ in peers)
            expected += max((latency for _, latency in peers), default=0.0)
            assert push[index] == pytest.approx(expected)
            assert pull[index] == pytest.approx(expected)


@given(plans(), costs())
@settings(max_examples=40)
def test_holders_that_own_equal_parts_are_a_special_case_of_owner_shares(plan, cost):
    cost.layout = StateLayout(exchange=ExchangeKind.MESSAGES)
    # One rank of each stage, so that a stage's ranks are on one node.
    plan = ParallelPlan(
        pipelines=tuple(
            PipelinePlan(stages=tuple(replace(s, ranks=s.ranks[:1]) for s in p.stages))
            for p in plan.pipelines
        )
    )
    shares = [0.0] * cost.cluster.num_ranks
    for _, _, stage in plan.iter_stages():
        shape = cost.shape_of(stage)
        shares[stage.ranks[0]] = cost.num_owned_params(shape, plan.num_pipelines)
    kinds = [[index] for index in range(plan.num_pipelines)]
    table, shared = (
        exchange_of(item, kinds, cost) for item in (plan, replace(plan, owner_shares=tuple(shares)))
    )
    for name in ("pull_s", "push_s"):
        for one, other in zip(getattr(table, name), getattr(shared, name), strict=True):
            assert one == pytest.approx(other)


def walk_pushes(
    plan: ParallelPlan,
    table: ExchangeTable,
    ends: Sequence[Sequence[float]],
    spans: Sequence[Sequence[float]],
    has_work: Sequence[bool],
) -> list[list[float]]:
    """Push every unit one after another."""
    sent = [[0.0] * p.num_stages for p in plan.pipelines]
    received = [[0.0] * p.num_stages for p in plan.pipelines]
    layer = NUM_LAYERS
    for number, (segment, push) in enumerate(zip(table.segments, table.push_s, strict=True)):
        for _ in range(segment.num_units):
            layer -= segment.is_layers
            for pipeline, s in zip(plan.pipelines, segment.stages, strict=True):
                assert max(0, min(layer, NUM_LAYERS - 1)) in pipeline.stages[s].layers
            ready = {}
            for p, pipeline in enumerate(plan.pipelines):
                s = segment.stages[p]
                layers = pipeline.stages[s].layers
                ahead = (layer - layers.start) / len(layers) if segment.is_layers else 0.0
                ahead = 1.0 if number == 0 else ahead
                if has_work[p]:
                    ready[p] = ends[p][s] - spans[p][s] * ahead
                    sent[p][s] = max(sent[p][s], ready[p]) + push[p]
            for p, s in enumerate(segment.stages):
                start = max(received[p][s], *ready.values())
                received[p][s] = start + push[p]
        for p, s in enumerate(segment.stages):
            last = max(sent[q][segment.stages[q]] for q in ready)
            received[p][s] = max(received[p][s], last)
    assert layer == 0, "every layer is pushed once"
    return [
        [max(a, b, c) for a, b, c in zip(*rows, strict=True)]
        for rows in zip(sent, received, ends, strict=True)
    ]


@given(plans(), costs(), st.data())
@settings(max_examples=80)
def test_queues_end_when_walking_every_layer_says(plan, cost, data):
    table = table_of(plan, cost)
    seconds = st.floats(0.0, 0.2)
    spans = [[data.draw(seconds) for _ in p.stages] for p in plan.pipelines]
    ends = [[span + data.draw(seconds) for span in row] for row in spans]
    idle = data.draw(st.integers(0, plan.num_pipelines - 1))
    has_work = [plan.num_pipelines == 1 or p != idle for p in range(plan.num_pipelines)]
    walked = walk_pushes(plan, table, ends, spans, has_work)
    for row, expected in zip(table.push_end_s(ends, spans, has_work), walked, strict=True):
        assert row == pytest.approx(expected)


@given(plans(), costs())
@settings(max_examples=40)
def test_no_stage_starts_before_its_first_layer_was_pulled_nor_later_than_all(plan, cost):
    table = table_of(plan, cost)
    for index, row in enumerate(
        table.pull_start_s([[0.01] * p.num_stages for p in plan.pipelines])
    ):
        for stage, start in enumerate(row):
            pulls = [
                (segment.num_units, pull[index])
                for segment, pull in zip(table.segments, table.pull_s, strict=True)
                if segment.stages[index] == stage
            ]
            total = sum(units * seconds for units, seconds in pulls)
            assert pulls[-1][1] - 1e-12 <= start <= total + 1e-12
            assert start + 0.01 >= total


def test_with_standbys_memory_and_pushes_count_both_copies_and_pulls_one():
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=2),))
    stages = [StagePlan(ranks=(rank,), layers=range(NUM_LAYERS)) for rank in range(2)]
    plan = ParallelPlan(pipelines=tuple(PipelinePlan(stages=(stage,)) for stage in stages))
    alone, both = (
        RooflineCost(cluster, MODEL, layout=StateLayout.of_precision("bf16-mixed", redundancy=n))
        for n in (0, 1)
    )
    first, second = (
        cost.stage_memory(cost.shape_of(stages[0]), 2, [], 1) for cost in (alone, both)
    )
    assert second.owned == 2 * first.owned
    assert (second.weights, second.gradients) == (first.weights, first.gradients)
    latency = cluster.intra_node_latency_s
    tables = [table_of(plan, cost) for cost in (alone, both)]
    for one, two in zip(*(table.push_s for table in tables), strict=True):
        assert [2 * (value - latency) for value in one] == pytest.approx([v - latency for v in two])
    assert tables[0].pull_s == tables[1].pull_s
    shape = alone.shape_of(stages[0])
    assert both.update_s(shape, 1e6) == 2 * alone.update_s(shape, 1e6)
