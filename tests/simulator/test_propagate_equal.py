"""Equal micro-batches end when walking through all of them says, in few rounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.simulator import propagate_equal as module
from lightning_hetero.simulator.propagate import PipelineTimes, propagate
from lightning_hetero.simulator.propagate_equal import EqualTimes, propagate_equal, steady_round_s

seconds = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(1e-3, 10.0))


def row_of(draw, count: int) -> tuple[float, ...]:
    return tuple(draw(seconds) for _ in range(count))


@settings(max_examples=150)
@given(st.data(), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_ends_are_those_of_the_action_lists(data, num_stages, num_microbatches, blocking):
    forward, backward, start = (row_of(data.draw, num_stages) for _ in range(3))
    there, back = (row_of(data.draw, num_stages - 1) for _ in range(2))
    equal = propagate_equal(
        EqualTimes(forward, backward, there, back, num_microbatches), start, blocking=blocking
    )
    walked = propagate(
        PipelineTimes(
            forward_s=[[value] * num_microbatches for value in forward],
            backward_s=[[value] * num_microbatches for value in backward],
            forward_message_s=[[value] * num_microbatches for value in there],
            backward_message_s=[[value] * num_microbatches for value in back],
        ),
        start,
        blocking=blocking,
    )
    assert equal.end_s == pytest.approx(walked.end_s, rel=1e-7)
    assert equal.busy_s == pytest.approx(walked.busy_s, rel=1e-7)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_many_micro_batches_end_a_steady_round_apart(data, num_stages, blocking):
    forward, backward = (row_of(data.draw, num_stages) for _ in range(2))
    there, back = (row_of(data.draw, num_stages - 1) for _ in range(2))
    few, many = (
        max(
            propagate_equal(
                EqualTimes(forward, backward, there, back, count),
                [0.0] * num_stages,
                blocking=blocking,
            ).end_s
        )
        for count in (2_000, 4_000)
    )
    times = EqualTimes(forward, backward, there, back, 1)
    assert (many - few) / 2_000 == pytest.approx(steady_round_s(times, blocking=blocking), rel=0.02)


@pytest.mark.parametrize("num_microbatches", [100, 10_000])
def test_rounds_do_not_grow_with_micro_batches(monkeypatch, num_microbatches):
    ran = []
    run = module._Rounds.run
    monkeypatch.setattr(
        module._Rounds, "run", lambda self, index: (ran.append(index), run(self, index))
    )
    hops = (0.1,) * 7
    times = EqualTimes((1.0,) * 8, (2.0,) * 7 + (2.5,), hops, hops, num_microbatches)
    propagate_equal(times, [0.0] * 8)
    assert len(ran) < 40
