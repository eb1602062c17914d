"""Who stands by for whom, who serves what is left, and what travels for it."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.exchange.holders import holdings_of
from lightning_hetero.exchange.owners import assign_owners, find_standbys, serve_without
from lightning_hetero.exchange.slices import Ownership
from lightning_hetero.exchange.transfers import TransferTable
from tests.core.sample_plans import random_plan, small_model
from tests.exchange.message_lists import pulls_of, pushes_of

RULES = st.sampled_from([Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER, Ownership.MEMORY])
random = st.randoms(use_true_random=False)


@given(
    nodes=st.lists(st.sampled_from("abcd"), min_size=2, max_size=12),
    kinds=st.lists(st.sampled_from("xyz"), min_size=12, max_size=12),
)
def test_standbys_are_on_other_nodes_and_nobody_stands_by_for_more_than_needed(nodes, kinds):
    most = max(Counter(nodes).values())
    by_kind = find_standbys(nodes, kinds[: len(nodes)])
    standbys = find_standbys(nodes)
    for rank in range(len(nodes)):
        for standby in (standbys[rank], by_kind[rank]):
            assert rank != standby
            assert nodes[rank] != nodes[standby] or most == len(nodes)
    others = len(nodes) - most
    needed = -(-most // others) if 0 < others < most else 1
    assert max(Counter(standbys).values()) == needed
    if needed == 1 and len(nodes) % 2 == 0:
        assert all(standbys[standbys[rank]] == rank for rank in range(len(nodes)))
    assert find_standbys(nodes[:1]) == ()


@pytest.mark.parametrize(
    ("nodes", "kinds", "expected"),
    [
        ("aabbcc", "xxyyxx", (4, 5, 0, 1, 0, 1)),
        ("aabb", "xxyy", (2, 3, 0, 1)),
        ("aaaa", "xxyy", (2, 3, 0, 1)),
    ],
)
def test_devices_of_one_kind_stand_by_for_each_other(nodes, kinds, expected):
    assert find_standbys(nodes, kinds) == expected


def redundant(rng, rule, *, tied):
    plan, world_size = random_plan(rng, has_chunks=True)
    specs = small_model(plan.num_layers, tied=tied)
    nodes = [rng.choice("abc") for _ in range(world_size)]
    standbys = find_standbys(nodes)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule, standbys=standbys)
    return plan, specs, slices, standbys, world_size


@given(rng=random, rule=RULES)
def test_without_any_lost_ranks_rows_are_served_by_who_is_left_or_missing(rng, rule):
    _, specs, slices, standbys, world_size = redundant(rng, rule, tied=False)
    lost = {rank for rank in range(world_size) if rng.random() < 0.4}
    served = serve_without(slices, lost)
    for spec in specs:
        rows = [0] * spec.cut_length
        for item in served.slices[spec.name]:
            assert not lost & set(item.ranks)
            for row in range(item.start, item.stop):
                rows[row] += 1
        gone = {r for start, stop in served.missing.get(spec.name, ()) for r in range(start, stop)}
        assert rows == [int(row not in gone) for row in range(spec.cut_length)]
        for item in slices[spec.name]:
            is_gone = set(item.ranks) <= lost
            assert is_gone == (item.start in gone)
    if not any({rank, standby} <= lost for rank, standby in enumerate(standbys)):
        assert not served.missing or world_size == 1


@given(rng=random, rule=RULES, tied=st.booleans())
def test_a_push_brings_each_gradient_to_both_and_a_pull_takes_own_rows_first(rng, rule, tied):
    plan, specs, slices, _, world_size = redundant(rng, rule, tied=tied)
    table = TransferTable(specs, slices, plan)
    pushed = Counter(
        row for rank in range(world_size) for row in arriving(pushes_of(table, rank), rank)
    )
    pulled = Counter(
        row for rank in range(world_size) for row in arriving(pulls_of(table, rank), rank)
    )
    wanted_pulls, wanted_pushes = Counter(), Counter()
    for spec in specs:
        for item, holding in product(slices[spec.name], holdings_of(spec, plan)):
            holder = holding.global_rank
            # The next of its ranks, going around the ranks.
            source = min(item.ranks, key=lambda keeper: (keeper - holder) % world_size)
            for row in rows_within(item, holding.intervals):
                wanted_pulls[spec.name, row, source, holder] += 1
            for row in rows_within(item, holding.pushes if spec.requires_grad else ()):
                wanted_pushes.update((spec.name, row, holder, keeper) for keeper in item.ranks)
    assert pulled == wanted_pulls
    assert pushed == wanted_pushes


def arriving(messages, rank):
    """Yield (parameter, row, source, destination) of what comes to a rank."""
    for message in messages:
        for piece in message.pieces if message.destination == rank else ():
            for row in range(piece.start, piece.stop):
                yield piece.parameter, row, message.source, rank


def rows_within(item, intervals):
    for start, stop in intervals:
        yield from range(max(start, item.start), min(stop, item.stop))
