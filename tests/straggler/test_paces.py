"""Laws of a rank's own history: slower than before, whatever the work, place and waits."""

import math
import random

import pytest

from lightning_hetero.straggler.paces import Observation, RankHistory


def seen(step: int, pace: float, *, work: float = 1.0, **options) -> Observation:
    times = {"forward_s": pace * work / 3, "backward_s": pace * work * 2 / 3}
    return Observation(step=step, work=work, **times, **options)


def watched(paces, *, first_step=0, **options):
    history = RankHistory(2)
    steps = [seen(first_step + i, pace, **options) for i, pace in enumerate(paces)]
    notes = [(own.step, history.observe(own, 1.0)) for own in steps]
    return history, [(step, note) for step, note in notes if note.change]


def test_slowness_is_the_pace_now_over_the_pace_before_whatever_the_work():
    history, rng = RankHistory(0), random.Random(1)
    for step in range(40):
        pace = (2.0 if step < 30 else 3.0) * rng.gauss(1, 0.02)
        history.observe(seen(step, pace, work=rng.uniform(1.0, 5.0)), 1.0)
    history.settle(30)
    report = history.report(30)
    assert (report.slowness, report.pace) == pytest.approx((1.5, 2.0), rel=0.03)
    assert report.before.forward_s == pytest.approx(report.before.backward_s / 2)


def test_a_change_of_pace_is_found_and_dated_in_steps_of_the_run():
    rng = random.Random(0)
    paces = [level * rng.gauss(1.0, 0.02) for level in [1.0] * 20 + [1.9] * 6]
    _, ((step, note),) = watched(paces, first_step=100)
    assert step <= 124
    assert note[2:4] == (1.0, 120)


def test_the_baseline_of_a_fault_stands_until_it_recovers():
    history, _ = watched([1.0] * 10 + [2.0] * 10)
    history.settle(10)
    history.settle(15)
    assert history.report(10).slowness == pytest.approx(2.0)
    history.forget()
    for step in range(20, 30):
        history.observe(seen(step, 1.0), 1.0)
    history.settle(25)
    assert history.report(25).slowness == pytest.approx(1.0)


def test_a_rank_that_moves_is_compared_with_what_is_usual_in_its_new_place():
    history, _ = watched([1.0] * 10)
    history.settle(10)
    # The new place has three times the layers.
    history.move(1 / 3)
    for step in range(10, 14):
        history.observe(seen(step, 3.0), 1.0)
    assert history.report(10).slowness == pytest.approx(1.0)
    assert history.load_s(seen(14, 3.0, num_microbatches=4)) == pytest.approx(12.0)


def test_waits_count_by_what_they_have_grown():
    history = RankHistory(0)
    for step in range(20):
        waits_s = {1: 0.5, 2: 0.1} if step < 12 else {1: 0.5, 2: 0.7, 3: 0.2}
        history.observe(seen(step, 1.0, waits_s=waits_s), 1.0)
    history.settle(12)
    assert history.report(12).excess_wait_s == pytest.approx({1: 0.0, 2: 0.6, 3: 0.2})


def test_what_an_iteration_should_take_follows_its_work():
    history, _ = watched([2.0] * 5)
    assert history.load_s(seen(5, 9.0, work=3.0, num_microbatches=4)) == pytest.approx(24.0)
    assert history.load_s(Observation(step=5, work=0.0)) == 0.0
    assert math.isnan(RankHistory(0).load_s(seen(0, 1.0)))


def test_a_rank_that_computes_nothing_reports_nothing():
    history = RankHistory(0)
    for step in range(12):
        assert history.observe(Observation(step=step, work=0.0), 1.0) == (1.0, 0.0, 0, 0, 0, 0)
    history.settle(6)
    assert math.isnan(history.report(6).slowness)
    assert math.isnan(history.report(6).pace)
