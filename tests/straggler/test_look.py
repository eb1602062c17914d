from lightning_hetero.straggler import Finding, FindingKind
from lightning_hetero.straggler.locate import Probes, diagnose, probe_rounds, suspect
from lightning_hetero.straggler.paces import Observation, RankReport

DEVICE, HOST, LINK = FindingKind


def report(rank: int, slowness: float = 1.0, waits_s=None, num_messages=1) -> RankReport:
    waits_s = waits_s or {}
    now = Observation(step=9, waits_s=waits_s, num_messages=dict.fromkeys(waits_s, num_messages))
    return RankReport(global_rank=rank, slowness=slowness, pace=1.0, now=now)


def pairs_of(rounds):
    return [pair for pairs in rounds for pair in pairs]


def probes(device_s=(), **links_s) -> Probes:
    pairs = {tuple(map(int, name[1:].split("_"))): s for name, s in links_s.items()}
    return Probes(device_s=dict(enumerate(device_s)), link_s=pairs, hosts=("a", "a", "b", "b"))


HEALTHY = probes((1.0, 1.0, 2.0, 2.0), p0_1=1.0, p1_2=5.0, p2_3=1.0, p0_3=5.0)


def test_a_rank_behind_its_peers_is_suspected_and_a_slow_probe_blames_its_device():
    suspicion = suspect([report(0), report(1), report(2, 1.9), report(3)], iteration_s=1.0)
    assert suspicion.ranks == {2: 1.9}
    assert probe_rounds(suspicion, 4) == ()
    slow, fine = (1.0, 1.0, 3.8, 2.0), (1.0, 1.0, 2.0, 2.0)
    (found,) = diagnose(suspicion, probes(slow), HEALTHY)
    assert (found.kind, found.ranks, found.ratio) == (DEVICE, (2,), 1.9)
    (found,) = diagnose(suspicion, probes(fine), HEALTHY)
    assert found.kind is HOST
    assert "device is as fast as ever" in str(found)
    little = suspect([report(0), report(1), report(2, 1.15), report(3)], iteration_s=1.0)
    assert diagnose(little, probes(fine), HEALTHY) == ()


def test_a_link_is_believed_only_if_its_messages_and_its_probe_are_slow():
    waiting = [report(0, waits_s={3: 0.5}), report(1), report(2), report(3, waits_s={0: 0.4})]
    suspicion = suspect(waiting, iteration_s=1.0)
    assert suspicion.pairs == ((0, 3),)
    assert (0, 3) in pairs_of(probe_rounds(suspicion, 4))
    slow = probes((), p0_1=1.0, p1_2=5.0, p2_3=1.0, p0_3=50.0)
    (found,) = diagnose(suspicion, slow, HEALTHY)
    assert (found.kind, found.ranks) == (LINK, (0, 3))
    other = probes((), p0_1=1.0, p1_2=50.0, p2_3=1.0, p0_3=5.0)
    assert diagnose(suspicion, other, HEALTHY) == ()


def test_a_probe_that_is_slow_by_chance_does_not_explain_a_long_wait():
    slow = probes((), p0_1=1.0, p1_2=5.0, p2_3=1.0, p0_3=8.0)
    for num_messages, is_believed in ((1, False), (100, True)):
        waiting = [report(0, waits_s={3: 90.0}, num_messages=num_messages), *map(report, (1, 2, 3))]
        suspicion = suspect(waiting, iteration_s=100.0)
        found = [f.ranks for f in diagnose(suspicion, slow, HEALTHY)]
        assert found == ([(0, 3)] if is_believed else [])


def test_waiting_a_little_longer_is_no_reason_to_probe():
    suspicion = suspect([report(0, waits_s={1: 0.04}), report(1)], iteration_s=1.0)
    assert suspicion.pairs == ()
    assert probe_rounds(suspicion, 2) == ()


def test_a_link_known_to_be_slow_is_probed_though_nobody_waits_for_it():
    known = [Finding(kind=LINK, ranks=(0, 2), ratio=9.0)]
    suspicion = suspect([report(rank) for rank in range(4)], iteration_s=1.0, known=known)
    assert (0, 2) in pairs_of(probe_rounds(suspicion, 4))


def test_pairs_of_a_round_are_disjoint_and_few_ranks_stand_for_many():
    reports = [report(rank) for rank in range(300)]
    reports[7] = report(7, waits_s={250: 0.5, 9: 0.4})
    suspicion = suspect(reports, iteration_s=1.0)
    rounds = probe_rounds(suspicion, 300)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert {(7, 250), (7, 9)} <= set(pairs_of(rounds))
    assert len(pairs_of(rounds)) <= 20
    assert len(rounds) <= 5
