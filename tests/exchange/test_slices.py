from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.holders import holdings_of
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import OuterRole, Ownership, ParameterSpec
from tests.core.sample_plans import random_plan, small_model

RULES = [Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER]
random = st.randoms(use_true_random=False)
shares = st.sampled_from([0.0, 0.5, 1.0, 3.0, 8e10])


def weights_of(data: st.DataObject, world_size: int) -> list[float] | None:
    some = st.lists(shares, min_size=world_size, max_size=world_size)
    return data.draw(st.none() | some.filter(any))


@given(rng=random, tied=st.booleans(), rule=st.sampled_from(RULES), data=st.data())
def test_slices_cover_each_parameter_exactly_once(rng, tied, rule, data):
    plan, world_size = random_plan(rng, has_chunks=True)
    specs = small_model(plan.num_layers, tied=tied)
    weights = weights_of(data, world_size)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule, weights=weights)
    assert list(slices) == [spec.name for spec in specs]
    for spec in specs:
        pieces = slices[spec.name]
        assert [0, *(piece.stop for piece in pieces)] == [
            *(piece.start for piece in pieces),
            spec.cut_length,
        ]
        assert all(piece.start < piece.stop for piece in pieces)
        owners = [piece.owner for piece in pieces]
        assert len(set(owners)) == len(owners), "one slice for each owner"
        assert set(owners) <= set(range(world_size))
        if rule is not Ownership.EVEN:
            assert set(owners) <= {item.global_rank for item in holdings_of(spec, plan)}
        if rule is Ownership.PARAMETER:
            assert len(pieces) == 1
        able = {item.global_rank for item in holdings_of(spec, plan)}
        if rule is Ownership.EVEN:
            able = set(range(world_size))
        if weights and any(weights[rank] for rank in able):
            assert all(weights[owner] > 0 for owner in owners)


@given(rng=random, tied=st.booleans(), rule=st.sampled_from(RULES[:2]), data=st.data())
def test_a_slice_is_as_large_as_its_owners_weight_to_within_a_row(rng, tied, rule, data):
    plan, world_size = random_plan(rng, has_chunks=True)
    weights = data.draw(
        st.lists(st.floats(0.5, 100), min_size=world_size, max_size=world_size), label="weights"
    )
    specs = small_model(plan.num_layers, tied=tied)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule, weights=weights)
    for spec in specs:
        ranks = {item.global_rank for item in holdings_of(spec, plan)}
        candidates = ranks if rule is Ownership.HOLDERS else set(range(world_size))
        total = sum(weights[rank] for rank in candidates)
        rows = dict.fromkeys(candidates, 0)
        rows |= {piece.owner: piece.stop - piece.start for piece in slices[spec.name]}
        for rank in candidates:
            assert abs(rows[rank] - spec.cut_length * weights[rank] / total) <= 1.0001


@given(rng=random, data=st.data())
def test_whole_parameters_are_spread_so_that_no_owner_can_be_relieved(rng, data):
    """Giving the last parameter that the fullest rank got to another holder wouldn't help."""
    plan, world_size = random_plan(rng, degrees=(1,))
    specs = small_model(plan.num_layers, tied=False)
    weights = data.draw(
        st.lists(st.floats(1, 8), min_size=world_size, max_size=world_size), label="weights"
    )
    slices = assign_owners(
        specs, plan, world_size=world_size, ownership=Ownership.PARAMETER, weights=weights
    )
    loads: dict[int, float] = defaultdict(float)
    for spec in sorted(specs, key=lambda item: (-item.numel, item.name)):
        owner = slices[spec.name][0].owner
        loads[owner] += spec.numel
        for item in holdings_of(spec, plan):
            if item.global_rank != owner:
                other = (loads[item.global_rank] + spec.numel) / weights[item.global_rank]
                assert loads[owner] / weights[owner] <= other


@given(rng=random, tied=st.booleans())
def test_the_shards_of_a_tensor_parallel_group_make_up_the_parameter(rng, tied):
    plan, _ = random_plan(rng, has_chunks=True)
    for spec in small_model(plan.num_layers, tied=tied):
        held: dict[tuple[int, int], list[int]] = defaultdict(list)
        pushed: dict[tuple[int, int], list[int]] = defaultdict(list)
        for item in holdings_of(spec, plan):
            place = plan.place(item.global_rank)
            assert place is not None
            assert place.pipeline_index == item.pipeline_index
            key = place.pipeline_index, place.stage_index
            held[key] += [row for start, stop in item.intervals for row in range(start, stop)]
            pushed[key] += [row for start, stop in item.pushes for row in range(start, stop)]
        for (pipeline_index, stage_index), rows in pushed.items():
            assert sorted(rows) == list(range(spec.cut_length))
            stage = plan.pipelines[pipeline_index].stages[stage_index]
            copies = 1 if spec.tp_dim is not None else stage.tp_degree
            whole = [row for row in range(spec.cut_length) for _ in range(copies)]
            assert sorted(held[pipeline_index, stage_index]) == whole
        stages = [
            {s for p, s in pushed if p == pipeline_index}
            for pipeline_index in range(plan.num_pipelines)
        ]
        for pipeline_index, found in enumerate(stages):
            pipeline = plan.pipelines[pipeline_index]
            expected = {s for s, stage in enumerate(pipeline.stages) if spec.layer in stage.layers}
            expected |= {0} if OuterRole.FIRST in spec.roles else set()
            expected |= {pipeline.num_stages - 1} if OuterRole.LAST in spec.roles else set()
            ranks = [stage.ranks[0] for stage in pipeline.stages]
            assert found == {ranks.index(ranks[stage]) for stage in expected}


def test_without_redundancy_nobody_stands_by_and_parameters_of_no_stage_are_refused():
    plan = ParallelPlan.even(world_size=2, num_layers=3)
    for rule in RULES:
        slices = assign_owners(small_model(3, tied=False), plan, world_size=2, ownership=rule)
        assert all(item.standby is None for items in slices.values() for item in items)
        for layer in (None, 3):
            lost = ParameterSpec(name="lost", shape=(4,), layer=layer)
            if rule is not Ownership.EVEN:
                with pytest.raises(ModelError, match=r"lost .*no stage .*3 layers"):
                    assign_owners([lost], plan, world_size=2, ownership=rule)
