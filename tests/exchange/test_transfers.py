from collections import Counter, defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange.holders import holdings_of
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import OuterRole, Ownership, ParameterSpec
from lightning_hetero.exchange.transfers import TransferTable
from tests.core.sample_plans import random_plan, small_model
from tests.exchange.message_lists import (
    Message,
    pulls_of,
    pushes_of,
)

RULES = st.sampled_from([Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER, Ownership.MEMORY])
random = st.randoms(use_true_random=False)


def rows_of(message: Message) -> Counter[tuple[str, int]]:
    return Counter((p.parameter, row) for p in message.pieces for row in range(p.start, p.stop))


@given(rng=random, tied=st.booleans(), rule=RULES, trainable_only=st.booleans())
def test_pull_brings_every_holder_all_it_holds_exactly_once(rng, tied, rule, trainable_only):
    plan, world_size = random_plan(rng, has_chunks=True)
    specs = small_model(plan.num_layers, tied=tied)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule)
    table = TransferTable(specs, slices, plan)
    expected: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for spec in specs:
        if trainable_only and not spec.requires_grad:
            continue
        for holding in holdings_of(spec, plan):
            for start, stop in holding.intervals:
                expected[holding.global_rank].update((spec.name, i) for i in range(start, stop))
    owner = {
        (name, row): item.owner
        for name, items in slices.items()
        for item in items
        for row in range(item.start, item.stop)
    }
    for rank in range(world_size):
        arrived: Counter[tuple[str, int]] = Counter()
        for message in pulls_of(table, rank, trainable_only=trainable_only):
            rows = rows_of(message)
            assert {owner[row] for row in rows} == {message.source}
            if message.destination == rank:
                arrived += rows
        assert arrived == expected[rank]


@given(rng=random, tied=st.booleans(), rule=RULES)
def test_push_brings_every_owner_each_stages_gradient_exactly_once(rng, tied, rule):
    plan, world_size = random_plan(rng, has_chunks=True)
    specs = small_model(plan.num_layers, tied=tied)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule)
    table = TransferTable(specs, slices, plan)
    # A tied weight has a gradient from both ends of a pipeline, so count by stage.
    users = {
        (spec.name, place.pipeline_index, place.stage_index)
        for spec in specs
        for holding in holdings_of(spec, plan)
        if spec.requires_grad and (place := plan.place(holding.global_rank))
    }
    for rank in range(world_size):
        arrived: Counter[tuple[str, int, int, int]] = Counter()
        for message in pushes_of(table, rank):
            if message.destination == rank:
                place = plan.place(message.source)
                assert place is not None
                for (name, row), count in rows_of(message).items():
                    arrived[name, row, place.pipeline_index, place.stage_index] += count
        expected = {
            (name, row, pipeline_index, stage_index)
            for name, pipeline_index, stage_index in users
            for item in slices[name]
            if item.owner == rank
            for row in range(item.start, item.stop)
        }
        assert arrived == dict.fromkeys(expected, 1)


@pytest.mark.parametrize(("num_stages", "tp_degree"), [(1, 1), (8, 1), (1, 8), (2, 4)])
@pytest.mark.parametrize("push", [False, True])
def test_ranks_with_the_same_part_of_a_stage_exchange_among_themselves(num_stages, tp_degree, push):
    plan = ParallelPlan.even(
        world_size=1024, num_layers=8, num_stages=num_stages, tp_degree=tp_degree
    )
    specs = [
        ParameterSpec(name="up", shape=(8192, 2), layer=0, tp_dim=0),
        ParameterSpec(name="norm", shape=(8192,), layer=0),
    ]
    slices = assign_owners(specs, plan, world_size=1024, ownership=Ownership.HOLDERS)
    (unit,) = TransferTable(specs, slices, plan).units
    shard_groups = unit.kind.shard_groups(push=push)
    assert shard_groups is not None
    by_part = [{p.stages[0].ranks[tp_rank] for p in plan.pipelines} for tp_rank in range(tp_degree)]
    assert sorted(map(sorted, by_part)) == sorted(list(item.members) for item in shard_groups)
    assert unit.kind.groups == {item.members for item in shard_groups}


@pytest.mark.parametrize("degrees", [{}, {"num_stages": 8}, {"num_stages": 8, "tp_degree": 8}])
def test_layers_of_1024_ranks_are_of_few_kinds(degrees):
    plan = ParallelPlan.even(world_size=1024, num_layers=80, **degrees)
    specs = [
        ParameterSpec(name=f"{layer}.{i}", shape=(1024, i), layer=layer, tp_dim=0)
        for layer in range(80)
        for i in range(1, 8)
    ]
    slices = assign_owners(specs, plan, world_size=1024, ownership=Ownership.HOLDERS)
    table = TransferTable(specs, slices, plan)
    num_stages = degrees.get("num_stages", 1)
    assert len({unit.kind for unit in table.units}) == num_stages
    assert len(set(map(id, slices.values()))) == num_stages
    assert {len(unit.kind.members) for unit in table.units} == {1024 // num_stages}
    for rank in (0, 511, 1023):
        calls = sum(rank in unit.kind.members for unit in table.units)
        assert calls == 80 // num_stages, "one a layer of the rank's stage"


def test_small_neighbours_travel_as_one_unit_where_the_same_ranks_take_part():
    specs = [
        ParameterSpec(name="embedding", shape=(4, 5), roles=frozenset({OuterRole.FIRST})),
        *(ParameterSpec(name=f"{i}", shape=(8, 2), layer=i) for i in range(6)),
        ParameterSpec(name="head", shape=(50,), roles=frozenset({OuterRole.LAST})),
    ]
    plan = ParallelPlan.even(world_size=4, num_layers=6, num_stages=2)
    slices = assign_owners(specs, plan, world_size=4, ownership=Ownership.HOLDERS)
    apart = TransferTable(specs, slices, plan)
    table = TransferTable(specs, slices, plan, merged_numel=48)
    assert [unit.indices for unit in table.units] == [(-1, 0), (1, 2), (3, 4, 5), (6,)]
    for rank in range(4):
        pieces, merged = (
            Counter(
                (message.source, message.destination, piece)
                for message in pushes_of(each, rank)
                for piece in message.pieces
            )
            for each in (apart, table)
        )
        assert pieces == merged
        assert len(pushes_of(table, rank)) < len(pushes_of(apart, rank))


def uneven_plan(rng: Random, num_pipelines: int, num_stages: int, num_layers: int) -> ParallelPlan:
    """Return TP-1 pipelines of `num_stages` stages, each with a layer split of its own."""
    pipelines = []
    for index in range(num_pipelines):
        cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
        stages = [
            StagePlan(ranks=(index * num_stages + s,), layers=range(cuts[s], cuts[s + 1]))
            for s in range(num_stages)
        ]
        pipelines.append(PipelinePlan(stages=tuple(stages)))
    return ParallelPlan(pipelines=tuple(pipelines))


@pytest.mark.parametrize(
    ("num_pipelines", "num_stages", "num_layers"),
    [(1, 4, 8), (2, 3, 7), (16, 4, 12), (5, 13, 40)],
)
def test_messages_and_bytes_equal_the_formula(num_pipelines, num_stages, num_layers):
    """Traffic of a rank with D pipelines, TP 1 and owners among the holders.

    A rank whose stage holds U units (its layers; one more at either end of the pipeline) of S
    bytes sends and receives U·(D-1) messages and S·(D-1)/D bytes in a pull, and the same in a
    push, however the pipelines split the layers, if D divides every parameter's cut dim.
    """
    num_peers = num_pipelines - 1
    plan = uneven_plan(Random(7), num_pipelines, num_stages, num_layers)
    specs = [
        ParameterSpec(name=f"{layer}.weight", shape=(num_pipelines, 6), layer=layer, tp_dim=0)
        for layer in range(num_layers)
    ]
    for role in OuterRole:
        shape = (3 * num_pipelines, 2)
        specs.append(ParameterSpec(name=role.value, shape=shape, roles=frozenset({role})))
    world_size = num_pipelines * num_stages
    slices = assign_owners(specs, plan, world_size=world_size, ownership=Ownership.HOLDERS)
    table = TransferTable(specs, slices, plan)
    for rank in range(world_size):
        place = plan.place(rank)
        assert place is not None
        units = len(plan.pipelines[place.pipeline_index].stages[place.stage_index].layers)
        units += (place.stage_index == 0) + (place.stage_index == num_stages - 1)
        stage_numel = 6 * num_pipelines * units
        for messages in (pulls_of(table, rank), pushes_of(table, rank)):
            sent = [m for m in messages if m.source == rank != m.destination]
            received = [m for m in messages if m.destination == rank != m.source]
            for side in (sent, received):
                assert len(side) == units * num_peers
                numel = sum(message.numel for message in side)
                assert numel * num_pipelines == stage_numel * num_peers
