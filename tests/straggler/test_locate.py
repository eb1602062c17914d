"""Laws of localisation: a rank's own pace, suspects, probes; device told from host and link."""

import math
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.straggler import Finding, FindingKind
from lightning_hetero.straggler import probe as probe_module
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
from lightning_hetero.straggler.paces import Observation, RankHistory, RankReport
from lightning_hetero.straggler.probe import probe_links

DEVICE, HOST, LINK = FindingKind


def seen(step: int, pace: float, *, work: float = 1.0, **options) -> Observation:
    times = {"forward_s": pace * work / 3, "backward_s": pace * work * 2 / 3}
    return Observation(step=step, work=work, **times, **options)


def test_slowness_is_the_pace_now_over_the_pace_before_whatever_work_waits_and_place():
    history, rng, notes = RankHistory(0), random.Random(1), []
    for step in range(140):
        pace = (2.0 if step < 130 else 3.8) * rng.gauss(1, 0.02)
        waits_s = {1: 0.5} if step < 130 else {1: 0.5, 2: 0.7}
        own = seen(step, pace, work=rng.uniform(1.0, 5.0), waits_s=waits_s)
        notes.append(history.observe(own, 1.0))
    found = [(step, note) for step, note in enumerate(notes) if note.change]
    assert [(note.change, note.onset_step, step <= 134) for step, note in found] == [(1, 130, True)]
    history.settle(130)
    history.settle(135)  # The baseline of a fault stands until it ends.
    report = history.report(130)
    assert (report.slowness, report.pace) == pytest.approx((1.9, 2.0), rel=0.03)
    assert report.excess_wait_s == pytest.approx({1: 0.0, 2: 0.7})
    # Another place has three times the layers.
    history.move(1 / 3)
    for step in range(140, 150):
        history.observe(seen(step, 6.0), 1.0)
    assert history.report(140).slowness == pytest.approx(1.0, rel=0.03)
    assert history.load_s(seen(150, 6.0, num_microbatches=4)) == pytest.approx(24.0, rel=0.05)


def test_a_rank_that_computes_nothing_reports_nothing():
    history = RankHistory(0)
    for step in range(12):
        assert history.observe(Observation(step=step, work=0.0), 1.0) == (1.0, 0.0, 0, 0, 0, 0)
    history.settle(6)
    assert math.isnan(history.report(6).slowness)


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
        ((math.nan, 1.0), None, {}),
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
    return RankReport(global_rank=rank, slowness=slowness, pace=1.0, excess_wait_s=waits_s or {})


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


def test_few_ranks_stand_for_many_and_a_link_known_to_be_slow_is_probed():
    reports = [report(rank) for rank in range(300)]
    reports[7] = report(7, waits_s={250: 0.5, 9: 0.4})
    known = [Finding(kind=LINK, ranks=(0, 2), ratio=9.0)]
    rounds = probe_rounds(suspect(reports, iteration_s=1.0, known=known), 300)
    assert {(7, 250), (7, 9), (0, 2)} <= set(pairs_of(rounds))
    assert len(pairs_of(rounds)) <= 20
    assert len(rounds) <= 5


class CountedTime:
    """Stands still but for what messages are said to take: no machine is too busy for it."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


def probe_all(rank, world_size):
    dist.init_process_group("gloo")
    clock, real_send = CountedTime(), dist.send

    def send(tensor, dst, **options):
        clock.now_s += 0.05 if {rank, dst} == {1, 2} else 0.01
        return real_send(tensor, dst, **options)

    with mock.patch.object(dist, "send", send), mock.patch.object(probe_module, "time", clock):
        rounds = rounds_of(ring_of(range(world_size)))
        return probe_links(rounds, torch.device("cpu"), num_bytes=4096, repeats=2)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_rank_learns_every_links_time_and_a_delayed_one_is_named(pool, world_size):
    links, *others = pool.run(probe_all, world_size, world_size)
    assert all(other == links for other in others)
    assert links.keys() == {*ring_of(range(world_size))}
    assert links[1, 2] == pytest.approx(0.05)
    assert next(iter(find_suspects(links))) == (1, 2)
