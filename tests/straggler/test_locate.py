"""Laws of localisation: suspects, probe rounds, device told from link."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import (
    FindingKind,
    RankTimes,
    diagnose,
    find_suspects,
    ring_rounds,
    suspect_ranks,
    tree_rounds,
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


@given(RANKS)
def test_tree_rounds_cover_every_edge_once(ranks):
    edges = [(ranks[i], ranks[(i - 1) // 2]) for i in range(1, len(ranks))]
    rounds = tree_rounds(ranks)
    check_rounds(rounds, edges)
    assert len(rounds) == 4 if len(ranks) >= 7 else len(rounds) <= 4


def test_a_rank_named_twice_is_refused():
    with pytest.raises(ConfigurationError):
        ring_rounds([0, 1, 1])


def test_suspicion_begins_at_a_tenth_above_the_peers():
    times = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.101, 4: 1.09}
    assert [suspect.key for suspect in find_suspects(times)] == [3]


def test_unequal_devices_are_compared_with_what_they_should_take():
    times = [
        RankTimes(global_rank=r, computing_s=c, expected_s=e)
        for r, (c, e) in enumerate([(1.0, 1.0), (2.0, 2.0), (3.1, 2.0), (1.01, 1.0)])
    ]
    suspects = suspect_ranks(times)
    assert [suspect.key for suspect in suspects] == [2]
    assert suspects[0].ratio == pytest.approx(3.1 / 2.0 / 1.0, rel=0.02)


def test_a_rank_that_waits_is_no_suspect():
    times = [RankTimes(global_rank=r, computing_s=1.0, waiting_s=w) for r, w in enumerate([0, 9])]
    assert suspect_ranks(times) == ()


def ring_of(size, slow=()):
    pairs = [pair for pairs in ring_rounds(range(size)) for pair in pairs]
    return {pair: 3.0 if pair in slow else 1.0 for pair in pairs}


def test_a_slow_device_is_told_from_a_slow_link():
    devices = dict.fromkeys(range(6), 1.0)
    (finding,) = diagnose(devices | {4: 1.9}, ring_of(6))
    assert (finding.kind, finding.ranks) == (FindingKind.DEVICE, (4,))
    assert str(finding) == "rank 4 computes 1.9× slower than its peers"
    (finding,) = diagnose(devices, ring_of(6, slow=((2, 3),)))
    assert (finding.kind, finding.ranks) == (FindingKind.LINK, (2, 3))
    assert finding.ratio == pytest.approx(3.0)


def test_a_rank_whose_links_are_all_slow_has_a_slow_port():
    (finding,) = diagnose(dict.fromkeys(range(8), 1.0), ring_of(8, slow=((2, 3), (3, 4))))
    assert (finding.kind, finding.ranks) == (FindingKind.PORT, (3,))


@given(st.integers(3, 40), st.data())
def test_every_single_fault_is_named(size, data):
    pairs = list(ring_of(size))
    slow = data.draw(st.sampled_from(pairs))
    devices = dict.fromkeys(range(size), 0.5)
    rank = data.draw(st.integers(0, size - 1))
    findings = diagnose(devices | {rank: 0.7}, ring_of(size, slow=(slow,)))
    named = {(finding.kind, finding.ranks) for finding in findings}
    assert named == {(FindingKind.DEVICE, (rank,)), (FindingKind.LINK, slow)}


def test_nothing_slow_gives_no_finding():
    assert diagnose(dict.fromkeys(range(4), 1.0), ring_of(4)) == ()
    assert diagnose({0: 1.0}, {}) == ()
    assert find_suspects({0: math.nan, 1: 1.0}) == ()
    assert list(itertools.chain(ring_rounds([5]), tree_rounds([]))) == []
