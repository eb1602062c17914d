"""Laws of localisation: suspects, probe rounds, device told from host and link."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.straggler import Finding, FindingKind
from lightning_hetero.straggler.locate import (
    Probes,
    diagnose,
    find_suspects,
    probe_rounds,
    ring_of,
    rounds_of,
    slow_of_their_kind,
    suspect,
)
from lightning_hetero.straggler.paces import Observation, RankReport

DEVICE, HOST, LINK = FindingKind


def pairs_of(rounds):
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members)), "a rank stands twice in one round"
    return [pair for pairs in rounds for pair in pairs]


@given(st.lists(st.integers(0, 500), unique=True, max_size=60))
def test_rounds_cover_every_link_of_a_ring_once_and_are_few(ranks):
    size, rounds = len(ranks), rounds_of(ring_of(ranks))
    edges = {tuple(sorted((rank, ranks[i - 1]))) for i, rank in enumerate(ranks)}
    assert sorted(pairs_of(rounds)) == sorted(edges if size > 1 else ())
    assert len(rounds) == ((3 if size % 2 else 2) if size > 2 else size // 2)


@pytest.mark.parametrize(
    ("times_s", "expected_s", "suspects"),
    [
        ((1.0, 1.0, 1.0, 1.101, 1.09), None, {3: 1.101}),
        ((1.0, 2.0, 3.1, 1.01), (1.0, 2.0, 2.0, 1.0), {2: 1.55}),
        ((1.0,) * 4, None, {}),
        ((math.nan, 1.0), None, {}),
        ((1.0,), None, {}),
        *(((0.5,) * n + (0.7,) + (0.5,) * (39 - n), None, {n: 1.4}) for n in (0, 20, 39)),
        ((1.0, 3.0, 1.0, 2.0), None, {1: 3.0, 3: 2.0}),
    ],
)
def test_suspicion_begins_at_a_tenth_above_the_peers(times_s, expected_s, suspects):
    expected = None if expected_s is None else dict(enumerate(expected_s))
    found = find_suspects(dict(enumerate(times_s)), expected_s=expected)
    assert [*found.items()] == [(rank, pytest.approx(r)) for rank, r in suspects.items()]


def test_devices_and_links_are_compared_with_their_like_alone_and_the_worst_probe_counts():
    types, hosts = ["a", "a", "a", "a", "b", "c"], ("x", "x", "x", "y", "y", "y")
    copies = dict(enumerate((1.0, 2.0, 1.0, 1.0, 3.0, 9.0)))
    probes = Probes(
        device_s=dict(enumerate((1.0, 1.5, 1.4, 1.0, 5.0, 9.0))),
        link_s={(0, 1): 1.0, (1, 2): 1.4, (2, 3): 8.0, (3, 4): 1.7, (4, 5): 1.0, (0, 5): 5.0},
        hosts=hosts,
    )
    found = slow_of_their_kind(copies, probes, types, least_ratio=1.3)
    assert [(f.kind, f.ranks, f.ratio) for f in found] == [
        (DEVICE, (1,), 2.0),
        (LINK, (3, 4), 1.7),
        (LINK, (2, 3), 1.6),
        (DEVICE, (2,), 1.4),
    ]


def report(rank: int, slowness: float = 1.0, waits_s=None) -> RankReport:
    now = Observation(step=9, waits_s=waits_s or {})
    return RankReport(global_rank=rank, slowness=slowness, pace=1.0, now=now)


def probes(device_s=(), p0_3=5.0, p1_2=5.0) -> Probes:
    links = {(0, 1): 1.0, (1, 2): p1_2, (2, 3): 1.0, (0, 3): p0_3}
    return Probes(device_s=dict(enumerate(device_s)), link_s=links, hosts=("a", "a", "b", "b"))


HEALTHY = probes((1.0, 1.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("slowness", "probe_s", "kinds"),
    [(1.9, 3.8, [DEVICE]), (1.9, 2.0, [HOST]), (1.15, 2.0, []), (1.05, 3.8, [])],
)
def test_a_rank_behind_its_peers_is_blamed_its_device_only_if_the_probe_is_slow(
    slowness, probe_s, kinds
):
    suspicion = suspect([*map(report, (0, 1, 3)), report(2, slowness)], iteration_s=1.0)
    assert probe_rounds(suspicion, 4) == ()
    found = diagnose(suspicion, probes((1.0, 1.0, probe_s, 2.0)), HEALTHY)
    assert [(f.kind, f.ranks, f.ratio) for f in found] == [(k, (2,), slowness) for k in kinds]


@pytest.mark.parametrize(
    ("wait_s", "links", "blamed"),
    [
        (0.5, {"p0_3": 50.0}, [(0, 3)]),
        (0.5, {"p1_2": 50.0}, []),
        (0.5, {}, []),
        (0.04, {"p0_3": 50.0}, []),
    ],
)
def test_a_link_is_believed_only_if_its_messages_and_its_probe_are_slow(wait_s, links, blamed):
    waiting = [report(0, waits_s={3: wait_s}), report(1), report(2), report(3, waits_s={0: 0.03})]
    suspicion = suspect(waiting, iteration_s=1.0)
    assert ((0, 3) in pairs_of(probe_rounds(suspicion, 4))) == (wait_s > 0.05)
    found = diagnose(suspicion, probes(**links), HEALTHY)
    assert [f.ranks for f in found] == blamed
    assert all(f.kind is LINK for f in found)


def test_a_link_known_to_be_slow_is_probed_though_nobody_waits_for_it():
    known = [Finding(kind=LINK, ranks=(0, 2), ratio=9.0)]
    suspicion = suspect([report(rank) for rank in range(4)], iteration_s=1.0, known=known)
    assert (0, 2) in pairs_of(probe_rounds(suspicion, 4))


def test_few_ranks_stand_for_many():
    reports = [report(rank) for rank in range(300)]
    reports[7] = report(7, waits_s={250: 0.5, 9: 0.4})
    rounds = probe_rounds(suspect(reports, iteration_s=1.0), 300)
    assert {(7, 250), (7, 9)} <= set(pairs_of(rounds))
    assert len(pairs_of(rounds)) <= 20
    assert len(rounds) <= 5
