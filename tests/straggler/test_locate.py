"""Laws of localisation: suspects, probe rounds, device told from link."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.straggler import FindingKind
from lightning_hetero.straggler.locate import (
    Probes,
    find_suspects,
    ring_rounds,
    slow_of_their_kind,
)

RANKS = st.lists(st.integers(0, 500), unique=True, max_size=60)


def check_rounds(rounds, edges):
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members)), "a rank stands twice in one round"
    covered = [pair for pairs in rounds for pair in pairs]
    assert sorted(covered) == sorted({tuple(sorted(edge)) for edge in edges})


@given(RANKS)
def test_ring_rounds_cover_every_edge_once(ranks):
    size = len(ranks)
    edges = [(ranks[i], ranks[(i + 1) % size]) for i in range(size)] if size > 1 else []
    rounds = ring_rounds(ranks)
    check_rounds(rounds, edges)
    if size > 2:
        assert len(rounds) == (3 if size % 2 else 2)


def test_suspicion_begins_at_a_tenth_above_the_peers():
    times = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.101, 4: 1.09}
    assert list(find_suspects(times)) == [3]


def test_unequal_devices_are_compared_with_what_they_should_take():
    times, expected = {0: 1.0, 1: 2.0, 2: 3.1, 3: 1.01}, {0: 1.0, 1: 2.0, 2: 2.0, 3: 1.0}
    suspects = find_suspects(times, expected_s=expected)
    assert suspects == {2: pytest.approx(3.1 / 2.0 / 1.0, rel=0.02)}


@given(st.integers(3, 40), st.data())
def test_every_single_slow_rank_is_named(size, data):
    rank = data.draw(st.integers(0, size - 1))
    assert find_suspects(dict.fromkeys(range(size), 0.5) | {rank: 0.7}) == {rank: 0.7 / 0.5}


def test_nothing_slow_gives_no_finding():
    assert find_suspects(dict.fromkeys(range(4), 1.0)) == {}
    assert find_suspects({0: 1.0}) == {}
    assert find_suspects({0: math.nan, 1: 1.0}) == {}
    assert ring_rounds([5]) == ring_rounds([]) == ()


def test_devices_and_links_are_compared_with_their_like_alone_and_the_worst_probe_counts():
    types, hosts = ["a", "a", "a", "b", "b", "c"], ("x", "x", "x", "y", "y", "y")
    copies = dict(enumerate((1.0, 2.0, 1.0, 3.0, 3.0, 9.0)))
    probes = Probes(
        device_s=dict(enumerate((1.0, 1.0, 1.4, 5.0, 5.1, 9.0))),
        link_s={(0, 1): 1.0, (1, 2): 1.4, (2, 3): 8.0, (3, 4): 1.7, (4, 5): 1.0, (0, 5): 5.0},
        hosts=hosts,
    )
    found = slow_of_their_kind(copies, probes, types, least_ratio=1.3)
    assert [(f.kind, f.ranks, f.ratio) for f in found] == [
        (FindingKind.DEVICE, (1,), 2.0),
        (FindingKind.LINK, (3, 4), 1.7),
        (FindingKind.LINK, (2, 3), 1.6),
        (FindingKind.DEVICE, (2,), 1.4),
    ]
