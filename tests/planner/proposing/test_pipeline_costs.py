import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.profile import TimeFit
from lightning_hetero.planner.proposing.pipeline_costs import (
    pipeline_cost,
    util_len,
)
from tests.assign.model_memory import LinearMemory, ModelMemory, max_len

LENGTHS = np.array([256, 512, 1024, 2048, 4096, 8192, 16384])


def memory(**changes: float) -> LinearMemory:
    fields = {
        "capacity_bytes": 80e9,
        "state_bytes": 20e9,
        "bytes_per_token": 1e6,
        "num_in_flight": 4,
    }
    return LinearMemory(**(fields | changes))


@given(
    st.sampled_from([0.0, 1e-10, 1e-8]), st.floats(1e-6, 1e-3), st.sampled_from([0.0, 1e-3, 0.1])
)
def test_a_fit_recovers_the_coefficients_that_made_the_times(a, b, c) -> None:
    times_s = a * LENGTHS**2 + b * LENGTHS + c
    cost = pipeline_cost(LENGTHS, [times_s], max_len=4096)
    assert cost.a * LENGTHS**2 + cost.b * LENGTHS + cost.c == pytest.approx(times_s, rel=1e-6)


@pytest.mark.parametrize("times", [np.sqrt(LENGTHS), np.ones(len(LENGTHS)), LENGTHS**2.0])
def test_every_token_takes_time_and_no_coefficient_is_negative(times) -> None:
    cost = pipeline_cost(LENGTHS, [times * 1e-3], max_len=4096)
    assert cost.a >= 0
    assert cost.b > 0
    assert cost.c >= 0


@pytest.mark.parametrize(
    ("lengths", "times"), [([100, 100], [1, 1]), ([1, 2], [1, 0]), ([1, 2], [1])]
)
def test_too_little_to_fit_is_refused(lengths, times) -> None:
    with pytest.raises(AssignmentError, match="two different lengths"):
        pipeline_cost(lengths, [times], max_len=4096)


@given(
    st.sampled_from([0.0, 1e-9, 1e-7, 1e-5]), st.floats(1e-6, 1e-3), st.sampled_from([1e-3, 0.1, 2])
)
def test_utillen_is_the_first_length_that_reaches_the_threshold(a, b, c) -> None:
    limit = 5000
    lengths = np.arange(1, limit + 1)
    speeds = lengths / (a * lengths**2.0 + b * lengths + c)
    first = util_len(TimeFit(a=a, b=b, c=c), threshold=0.85, limit=limit)
    expected = int(np.argmax(speeds >= 0.85 * speeds.max())) + 1
    assert abs(first - expected) <= 1


def test_without_a_constant_every_length_is_well_used() -> None:
    assert util_len(TimeFit(a=1e-9, b=1e-5, c=0.0), limit=4096) == 1


def test_maxlen_is_where_the_tightest_stage_is_full() -> None:
    assert max_len([memory()]) == 14976
    assert max_len([memory(), memory(capacity_bytes=40e9, num_in_flight=1)]) == 14976
    assert max_len([memory(), memory(capacity_bytes=40e9)]) == 4992
    assert max_len([memory(state_bytes=90e9)]) == 0


def test_memory_of_a_model_adds_up_as_appendix_b_says() -> None:
    model = ModelMemory(
        hidden_size=5120, num_layers=40, vocab_size=30592, activation_bytes=39, layer_bytes=210
    )
    stage = model.first_stage(tp_degree=2, num_stages=4, num_devices=16, capacity_bytes=80e9)
    layers = 40 * 5120**2 / 16 * 210 * 0.75 + 40 / 4 * 5120**2 / 2 * 210 * 0.25
    embedding = 5120 * 30592 / 16 * 16 * 0.75 + 5120 * 30592 / 2 * 16 * 0.25
    assert stage.state_bytes == pytest.approx(layers + embedding)
    tokens = 1000
    activations = 40 * (tokens * 5120 / 2) * 39
    assert stage.bytes_per_token * stage.num_in_flight * tokens == pytest.approx(activations)


def test_more_devices_stages_or_tensor_parallelism_leave_room_for_more_tokens() -> None:
    model = ModelMemory(
        hidden_size=5120, num_layers=40, vocab_size=30592, activation_bytes=39, layer_bytes=210
    )

    def limit(tp: int, pp: int, n: int) -> int:
        stage = model.first_stage(tp_degree=tp, num_stages=pp, num_devices=n, capacity_bytes=80e9)
        return max_len([stage])

    assert limit(4, 2, 64) > limit(4, 2, 16) > limit(4, 1, 16) > limit(2, 1, 16) > 0


def test_the_slowest_stage_sets_a_pipelines_pace() -> None:
    slow = 2e-9 * LENGTHS**2 + 1e-4 * LENGTHS + 0.02
    cost = pipeline_cost(LENGTHS, [slow / 2, slow], max_len=14976)
    assert (cost.a, cost.b, cost.c) == pytest.approx((2e-9, 1e-4, 0.02))
    assert (cost.num_stages, cost.max_len) == (2, 14976)
