"""An exchange by collectives, against the messages that it consists of, and their bytes."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import KNOWN_DEVICES, DeviceSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange import transfers
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec
from lightning_hetero.exchange.transfers import ExchangeKind, TransferTable
from lightning_hetero.simulator import (
    RooflineCost,
    StateLayout,
    simulate,
)
from lightning_hetero.simulator.exchange import ExchangeTable
from lightning_hetero.simulator.exchange import exchange_of as exchange_table_of
from lightning_hetero.simulator.unit_times import Holders, UnitTimes
from tests.simulator.test_exchange import MODEL, costs, plans, table_of

KINDS = st.sampled_from([ExchangeKind.AUTO, ExchangeKind.COLLECTIVES, ExchangeKind.REDUCE_SCATTER])
CPU = replace(KNOWN_DEVICES["A100-40GB"], name="cpu", is_cpu=True)


def exchange_of(plan: ParallelPlan, cost: RooflineCost, kind: ExchangeKind) -> ExchangeTable:
    cost.layout = StateLayout(exchange=kind)
    return table_of(plan, cost)


@given(plans(), costs(), KINDS)
@settings(max_examples=80)
def test_a_ring_takes_a_message_of_each_peer_over_its_slowest_link(plan, cost, kind):
    pairwise, table = (exchange_of(plan, cost, k) for k in (ExchangeKind.MESSAGES, kind))
    for index, segment in enumerate(table.segments):
        stages = [p.stages[s] for p, s in zip(plan.pipelines, segment.stages, strict=True)]
        ranks, degree = sorted(s.ranks[0] for s in stages), stages[0].tp_degree
        if {s.tp_degree for s in stages} != {degree}:
            assert table.pull_s[index] == pairwise.pull_s[index]
            assert table.push_s[index] == pairwise.push_s[index]
            continue
        ring = list(itertools.pairwise([*ranks, ranks[0]]))
        message = segment.params_per_unit / degree / len(ranks) * 2
        expected = (len(ranks) - 1) * max(cost.transfer_s(a, b, message) for a, b in ring)
        expected = expected if len(ranks) > 1 else 0.0
        gathers = [0.0] * len(ranks)
        is_embedding = index + 1 == len(table.segments)
        if len(ranks) > 1 and not is_embedding:
            # Of a stage's norms each of its ranks has pulled a part.
            num_norms = 2 if segment.is_layers else 1
            part = num_norms * MODEL.hidden_size / degree * 2
            gathers = [(degree - 1) * cost.transfer_s(s.ranks[0], s.ranks[0], part) for s in stages]
        assert table.pull_s[index] == pytest.approx([expected + gather for gather in gathers])
        is_ring = kind is ExchangeKind.REDUCE_SCATTER
        assert table.push_s[index] == (table if is_ring else pairwise).push_s[index]
        if is_ring:
            assert table.push_s[index] == pytest.approx([expected] * len(ranks))


def have_shard_groups(plan: ParallelPlan, cost: RooflineCost) -> list[bool]:
    table = table_of(plan, cost)
    holders = [Holders.of([pipeline]) for pipeline in plan.pipelines]
    return UnitTimes(holders, table.segments, cost).have_shard_groups.tolist()


@given(plans(), costs())
@settings(max_examples=40)
def test_segments_have_shard_groups_where_the_runtimes_tables_have_them(plan, cost):
    specs = [
        ParameterSpec(name=f"layers.{layer}.weight", shape=(64, 8), layer=layer, tp_dim=0)
        for layer in range(plan.num_layers)
    ]
    slices = assign_owners(specs, plan, world_size=32, ownership=Ownership.HOLDERS)
    found = [
        u.kind.shard_groups(push=False) is not None
        for u in TransferTable(specs, slices, plan).units
    ]
    table = table_of(plan, cost)
    expected = [
        has_shard_groups
        for segment, has_shard_groups in zip(
            table.segments, have_shard_groups(plan, cost), strict=True
        )
        for _ in range(segment.is_layers * segment.num_units)
    ]
    assert found == expected[::-1]


def nodes_of_one(device: DeviceSpec, num_ranks: int) -> RooflineCost:
    nodes = (Node(device=device.name, count=1),) * num_ranks
    return RooflineCost(Cluster(nodes=nodes, devices=(device,)), MODEL)


@pytest.mark.parametrize("num_ranks", [2, 8, 9])
@pytest.mark.parametrize("device", [KNOWN_DEVICES["A100-40GB"], CPU], ids=["gpu", "cpu"])
def test_auto_takes_as_long_as_what_the_runtime_uses_on_that_backend(device, num_ranks):
    cost = nodes_of_one(device, num_ranks)
    plan = ParallelPlan.even(world_size=num_ranks, num_layers=MODEL.num_layers)
    auto, messages, collectives = (
        exchange_of(plan, cost, kind)
        for kind in (ExchangeKind.AUTO, ExchangeKind.MESSAGES, ExchangeKind.COLLECTIVES)
    )
    is_collective = not device.is_cpu or num_ranks > transfers.MOST_BY_MESSAGES
    assert cost.cluster.backend == ("gloo" if device.is_cpu else "nccl")
    assert auto.pull_s == (collectives if is_collective else messages).pull_s
    assert auto.push_s == messages.push_s == collectives.push_s
    # An all-gather of two ranks is a message each.
    assert (collectives.pull_s == messages.pull_s) == (num_ranks == 2)
    iterations = [
        simulate(plan, cost.with_layout(StateLayout(exchange=kind)), [[(64,)]] * num_ranks)
        for kind in (
            ExchangeKind.AUTO,
            ExchangeKind.COLLECTIVES if is_collective else ExchangeKind.MESSAGES,
        )
    ]
    assert iterations[0] == iterations[1]


@pytest.mark.parametrize(
    ("precision", "is_gathered"),
    [("bf16-mixed", True), ("bf16-true", False), ("32-true", False)],
)
def test_with_standbys_nothing_is_gathered_into_weights_of_which_slices_are_views(
    precision, is_gathered
):
    cost = nodes_of_one(KNOWN_DEVICES["A100-40GB"], 4)
    plan = ParallelPlan.even(world_size=4, num_layers=MODEL.num_layers)
    for redundancy in (0, 1):
        layout = StateLayout.of_precision(precision, redundancy=redundancy)
        auto, messages = (
            table_of(plan, cost.with_layout(replace(layout, exchange=kind)))
            for kind in (ExchangeKind.AUTO, ExchangeKind.MESSAGES)
        )
        assert (auto.pull_s != messages.pull_s) == (is_gathered or not redundancy)


def test_equal_owner_shares_change_no_pull():
    cost = nodes_of_one(KNOWN_DEVICES["A100-40GB"], 4)
    plan = ParallelPlan.even(world_size=4, num_layers=MODEL.num_layers)
    shared = replace(plan, owner_shares=(1.0, 1.05, 1.0, 1.0))
    uneven = replace(plan, owner_shares=(1.0, 3.0, 1.0, 1.0))
    straight, even, other = (
        exchange_table_of(item, [[rank] for rank in range(4)], cost)
        for item in (plan, shared, uneven)
    )
    assert even.pull_s == straight.pull_s
    # Pieces of unequal sizes are sent one by one: a latency, not three.
    latency = cost.cluster.inter_node_latency_s
    assert min(map(min, other.pull_s)) < 3 * latency < min(map(min, even.pull_s))


def test_gradients_are_summed_by_node_where_all_stages_of_a_segment_have_one_degree():
    stages = [
        [((0,), range(2)), ((2, 3), range(2, 6))],
        [((1,), range(2)), ((4, 5), range(2, 4)), ((6,), range(4, 6))],
    ]
    plan = ParallelPlan(
        pipelines=tuple(
            PipelinePlan(stages=tuple(StagePlan(ranks=r, layers=layers) for r, layers in row))
            for row in stages
        )
    )
    cost = RooflineCost(Cluster(nodes=(Node(device="A100-40GB", count=4),) * 2), MODEL)
    by_node, straight = (
        exchange_of(plan, cost, kind) for kind in (ExchangeKind.BY_NODE, ExchangeKind.MESSAGES)
    )
    # Layers 4 and 5 and the head have stages of two ranks and of one.
    assert have_shard_groups(plan, cost) == [False, False, True, True, True]
    assert by_node.push_s[:2] == straight.push_s[:2]
    # Nobody shares a node, or all do, so nothing is summed on it first.
    for one, other in zip(by_node.push_s[2:], straight.push_s[2:], strict=True):
        assert one == pytest.approx(other)


@pytest.mark.parametrize("kind", [ExchangeKind.MESSAGES, ExchangeKind.REDUCE_SCATTER])
def test_the_simulated_seconds_are_those_of_the_bytes_that_the_runtimes_table_counts(kind):
    num_ranks, rows = 8, 1024
    plan = ParallelPlan.even(world_size=num_ranks, num_layers=MODEL.num_layers)
    cluster = Cluster(
        nodes=(Node(device="A100-40GB", count=1),) * num_ranks,
        inter_node_bytes_per_s=1e9,
        inter_node_latency_s=0.0,
    )
    table = exchange_of(plan, RooflineCost(cluster, MODEL), kind)
    (per_layer,) = {s.params_per_unit for s in table.segments if s.is_layers}
    specs = [ParameterSpec(name="layer", shape=(rows, 4), layer=0)]
    slices = assign_owners(specs, plan, world_size=num_ranks, ownership=Ownership.HOLDERS)
    moved = TransferTable(specs, slices, plan).traffic(3, push=True)
    sent = sum(numel for (source, target), numel in moved.items() if source == 3 != target)
    num_bytes = sent / specs[0].numel * per_layer * 2
    index = next(i for i, segment in enumerate(table.segments) if segment.is_layers)
    assert table.push_s[index][3] == pytest.approx(num_bytes / 1e9)
