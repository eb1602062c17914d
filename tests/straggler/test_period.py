"""Laws of period inference: the period of any repeating stream is found, and its times."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import CommunicationOp, infer_period


def stream(pattern, durations_s, *, prefix=(), extra_every=0):
    """Repeat a pattern of (name, bytes) once per duration, spread evenly over it."""
    now_s, ops = 100.0, []
    for name, size in prefix:
        ops.append(CommunicationOp(name=name, num_bytes=size, start_s=now_s))
        now_s += 0.01
    for i, duration_s in enumerate(durations_s):
        for j, (name, size) in enumerate(pattern):
            start_s = now_s + duration_s * 0.8 * j / len(pattern)
            ops.append(CommunicationOp(name=name, num_bytes=size, start_s=start_s))
        if extra_every and i % extra_every == extra_every - 1:
            start_s = now_s + 0.9 * duration_s
            ops.append(CommunicationOp(name="barrier", num_bytes=0, start_s=start_s))
        now_s += duration_s
    return ops


FSDP = [("all_gather", 4096)] * 6 + [("reduce_scatter", 4096)] * 6 + [("all_reduce", 8)]


def test_the_period_of_a_sharded_step_is_its_number_of_operations():
    times_s = [1.0 + 0.01 * (i % 3) for i in range(50)]
    period = infer_period(stream(FSDP, times_s))
    assert period.num_ops == 13
    assert period.correlation >= 0.95
    assert period.iteration_times_s == pytest.approx(times_s[:-1], abs=0.02)


def test_long_runs_of_like_operations_do_not_look_like_period_one():
    pattern = [("all_gather", 64)] * 99 + [("all_reduce", 8)]
    assert infer_period(stream(pattern, [1.0] * 20)).num_ops == 100


def test_start_up_operations_do_not_matter():
    prefix = [("broadcast", 1000 + i) for i in range(20)]
    assert infer_period(stream(FSDP, [1.0] * 60, prefix=prefix)).num_ops == 13


def test_a_slow_iteration_shows_in_the_times_in_spite_of_extra_operations():
    times_s = [1.0] * 100
    times_s[70] = 3.0
    period = infer_period(stream(FSDP, times_s, extra_every=50))
    assert period.num_ops == 13
    assert len(period.iteration_times_s) == 99
    assert max(range(99), key=period.iteration_times_s.__getitem__) in (69, 70)
    assert max(period.iteration_times_s) > 2.0


@pytest.mark.parametrize("num_buckets", [2, 3, 7])
def test_like_operations_are_told_apart_by_the_gaps_between_them(num_buckets):
    rng = random.Random(0)
    ops, now_s = [], 0.0
    for _ in range(40):
        now_s += rng.uniform(0.95, 1.05)
        for _ in range(num_buckets):
            ops.append(CommunicationOp(name="all_reduce", num_bytes=64, start_s=now_s))
            now_s += rng.uniform(0.009, 0.011)
    period = infer_period(ops)
    assert period.num_ops == num_buckets
    assert period.iteration_times_s == pytest.approx([1.0 + 0.01 * num_buckets] * 39, rel=0.07)


def test_one_operation_per_iteration_has_period_one():
    period = infer_period(stream([("all_reduce", 64)], [0.5] * 30))
    assert period.num_ops == 1
    assert period.iteration_times_s == pytest.approx([0.5] * 29)


def test_a_stream_that_does_not_repeat_has_no_period():
    rng = random.Random(1)
    ops = [
        CommunicationOp(name=rng.choice("abcdefgh"), num_bytes=rng.randrange(9), start_s=float(i))
        for i in range(500)
    ]
    assert infer_period(ops) is None
    assert infer_period(ops[:3]) is None


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda p: len(set(p)) > 1),
    st.integers(8, 30),
)
def test_the_shortest_repetition_is_found(pattern, num_iterations):
    size = len(pattern)
    shortest = next(
        k for k in range(1, size + 1) if size % k == 0 and pattern == pattern[:k] * (size // k)
    )
    ops = stream([("op", kind) for kind in pattern], [1.0] * num_iterations)
    assert infer_period(ops).num_ops == shortest


def test_operations_out_of_order_are_refused():
    ops = stream(FSDP, [1.0] * 3)
    with pytest.raises(ConfigurationError, match="sorted"):
        infer_period(ops[::-1])
