"""A burst of losses is waited out, a fault that comes back isn't; in a time of their own."""

import itertools

from lightning_hetero.strategy.generations import VainGenerations


def ends_after(*seconds: float) -> int | None:
    """Return which of generations of so many seconds, none of which trains, is the last one."""
    moments = itertools.accumulate(seconds, initial=100.0)
    vain = VainGenerations(lambda: next(moments))
    return next((n for n, _ in enumerate(seconds, 1) if vain.note(has_trained=False)), None)


def test_a_burst_of_losses_within_a_minute_ends_no_run() -> None:
    assert ends_after(*[5.0] * 11) is None


def test_a_fault_that_comes_back_ends_it_after_a_minute() -> None:
    assert ends_after(*[0.5] * 200) == 120


def test_slow_recoveries_are_tried_three_times() -> None:
    assert ends_after(*[300.0] * 5) == 3


def test_a_step_makes_up_for_all_before() -> None:
    now_s = [0.0]
    vain = VainGenerations(lambda: now_s[0])
    for _ in range(10):
        assert not vain.note(has_trained=False)
    now_s[0] = 500.0
    assert not vain.note(has_trained=True)
    assert not any(vain.note(has_trained=False) for _ in range(10))
    now_s[0] = 561.0
    assert vain.note(has_trained=False) == ("11 generations in a row have trained no step, in 61 s")
