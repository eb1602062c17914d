from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.exchange.holders import holdings_of
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import OuterRole, Ownership
from tests.core.sample_plans import random_plan, small_model

RULES = [Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER, Ownership.MEMORY]
random = st.randoms(use_true_random=False)


@given(rng=random, tied=st.booleans(), rule=st.sampled_from(RULES))
def test_slices_cover_each_parameter_once_by_as_much_as_the_rule_gives_each_rank(rng, tied, rule):
    plan, world_size = random_plan(rng, has_chunks=True)
    specs = small_model(plan.num_layers, tied=tied)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule)
    assert list(slices) == [spec.name for spec in specs]
    owned, slack = [0.0] * world_size, 0.0
    for spec in specs:
        pieces, held = slices[spec.name], [*holdings_of(spec, plan)]
        assert [0, *(piece.stop for piece in pieces)] == [
            *(piece.start for piece in pieces),
            spec.cut_length,
        ]
        rows = {piece.owner: piece.stop - piece.start for piece in pieces}
        assert len(rows) == len(pieces), "one slice for each owner"
        assert all(count > 0 for count in rows.values())
        for owner, count in rows.items():
            owned[owner] += count * spec.row_numel
        slack += spec.row_numel
        shares = dict.fromkeys(range(world_size), 1 / world_size)
        if rule is not Ownership.EVEN:
            members = Counter(item.pipeline_index for item in held)
            shares = {i.global_rank: 1 / members[i.pipeline_index] / len(members) for i in held}
        if rule is not Ownership.MEMORY:
            assert rows.keys() <= shares.keys()
        if rule in (Ownership.HOLDERS, Ownership.EVEN):
            for rank, share in shares.items():
                assert abs(rows.get(rank, 0) - spec.cut_length * share) <= 1.0001
        if rule is Ownership.PARAMETER:
            assert len(pieces) == 1
    if rule is Ownership.MEMORY:
        for rank, share in enumerate(plan.owner_shares):
            assert abs(owned[rank] - sum(owned) * share / sum(plan.owner_shares)) <= slack


@given(rng=random)
def test_whole_parameters_are_spread_so_that_no_owner_can_be_relieved(rng):
    """Giving the last parameter that the fullest rank got to another holder wouldn't help."""
    plan, world_size = random_plan(rng, degrees=(1,))
    specs = small_model(plan.num_layers, tied=False)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=Ownership.PARAMETER)
    loads: Counter[int] = Counter()
    for spec in sorted(specs, key=lambda item: (-item.numel, item.name)):
        owner = slices[spec.name][0].owner
        loads[owner] += spec.numel
        ranks = {item.global_rank for item in holdings_of(spec, plan)} - {owner}
        assert all(loads[owner] <= loads[rank] + spec.numel for rank in ranks)


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
