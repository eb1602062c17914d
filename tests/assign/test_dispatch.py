import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_hetero.assign import dispatch, dispatch_moves
from lightning_hetero.assign.dispatch_greedy import place_greedily
from lightning_hetero.assign.dispatch_moves import improve_dispatch
from lightning_hetero.assign.pipeline_cost import CostTable, KindTimes, as_lengths
from lightning_hetero.core.errors import AssignmentError
from tests.assign import exact
from tests.assign.cases import cost, dispatch_cases


def latencies_s(lengths, pipelines, choices) -> np.ndarray:
    """Return the largest Eq. 2 of each choice [M, B] of pipelines, infinite if one doesn't fit."""
    sizes, table = as_lengths(lengths), CostTable.of(pipelines)
    members = np.asarray(choices)[:, :, None] == np.arange(len(pipelines))
    columns = sizes[:, None] * members
    ends_s = exact.latencies_s(
        table,
        (table.times_s(sizes) * members).sum(axis=1),
        columns.max(axis=1),
        columns.sum(axis=1),
    ).max(axis=1)
    fits = (~members | (sizes[:, None] <= table.max_len)).all(axis=(1, 2))
    return np.where(fits, ends_s, np.inf)


def times_of(sizes, table) -> KindTimes:
    """Return the times on pipelines that all differ."""
    kinds = np.arange(len(table.c))
    return KindTimes(by_kind=table.fitting_times_s(sizes), kind_of=kinds)


def optimum_s(lengths, pipelines) -> float:
    """Return the least latency of all dispatches."""
    choices = np.array(list(itertools.product(range(len(pipelines)), repeat=len(lengths))))
    return float(latencies_s(lengths, pipelines, choices).min())


@settings(deadline=None)
@given(dispatch_cases())
def test_every_sequence_goes_to_one_pipeline_that_holds_it_in_the_time_reported(case) -> None:
    lengths, pipelines = case
    result = dispatch(lengths, pipelines)
    assert len(result.pipeline_of) == len(lengths)
    again_s = latencies_s(lengths, pipelines, [result.pipeline_of])[0]
    assert result.latency_s == pytest.approx(again_s)
    assert result.lower_bound_s <= result.latency_s


@settings(deadline=None, max_examples=60)
@given(dispatch_cases(max_sequences=6, max_pipelines=4))
def test_dispatch_is_within_2_per_cent_of_the_optimum_and_bounds_never_above_it(case) -> None:
    lengths, pipelines = case
    best_s = optimum_s(lengths, pipelines)
    result = dispatch(lengths, pipelines)
    assert result.latency_s <= best_s * 1.02
    assert result.lower_bound_s <= best_s * (1 + 1e-9)
    bound_s = exact.fine_bound_s(lengths, pipelines, result.latency_s)
    assert bound_s <= best_s * (1 + 1e-6)


@settings(deadline=None, max_examples=15)
@given(dispatch_cases(max_sequences=5, max_pipelines=3))
def test_highs_finds_the_optimum(case) -> None:
    lengths, pipelines = case
    best_s = optimum_s(lengths, pipelines)
    result = exact.dispatch_exact(lengths, pipelines)
    assert result.latency_s == pytest.approx(best_s, rel=1e-5)
    assert result.lower_bound_s <= best_s * (1 + 1e-5)


@settings(deadline=None, max_examples=50)
@given(dispatch_cases())
def test_dispatch_is_never_worse_than_longest_first_even_with_one_trial(case) -> None:
    lengths, pipelines = case
    sizes, table = as_lengths(lengths), CostTable.of(pipelines)
    order = np.argsort(-sizes, kind="stable")[None]
    longest_first = place_greedily(sizes, table.fitting_times_s(sizes), table, order, np.zeros(1))
    for num_trials in (1, 100):
        result = dispatch(lengths, pipelines, num_trials)
        assert result.latency_s <= longest_first.latencies_s[0] * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(dispatch_cases())
def test_improving_never_makes_a_dispatch_worse(case) -> None:
    lengths, pipelines = case
    sizes, table = as_lengths(lengths), CostTable.of(pipelines)
    start = np.full(len(lengths), int(table.max_len.argmax()))
    before_s = latencies_s(lengths, pipelines, start[None])[0]
    pipeline_of, after_s = improve_dispatch(sizes, times_of(sizes, table), table, start)
    assert after_s <= before_s * (1 + 1e-9)
    assert after_s == pytest.approx(latencies_s(lengths, pipelines, pipeline_of[None])[0])


def test_very_many_sequences_are_placed_in_few_steps_and_no_later_than_one_by_one(monkeypatch):
    num_steps = []
    ends_s = CostTable.ends_s
    monkeypatch.setattr(
        CostTable, "ends_s", lambda *arguments: num_steps.append(1) or ends_s(*arguments)
    )
    lengths = np.exp(np.random.default_rng(0).normal(6.5, 1.1, 6000)).astype(int).clip(1, 32_000)
    kinds = [
        cost(max_len=32_000, num_stages=2),
        cost(b=2e-5, max_len=16_000, num_stages=4),
        cost(b=4e-5, max_len=8_000, num_stages=1),
    ]
    pipelines = [kinds[index % 3] for index in range(48)]
    result = dispatch(lengths, pipelines)
    assert len(num_steps) < len(lengths)
    assert result.latency_s == pytest.approx(
        latencies_s(lengths, pipelines, [result.pipeline_of])[0]
    )
    table, order = CostTable.of(pipelines), np.argsort(-lengths, kind="stable")[None]
    times_s = table.fitting_times_s(lengths)
    longest_first = place_greedily(lengths, times_s, table, order, np.zeros(1))
    assert result.lower_bound_s <= result.latency_s <= longest_first.latencies_s[0]


def test_the_same_seed_gives_the_same_dispatch() -> None:
    lengths = np.random.default_rng(0).integers(100, 6000, 60)
    pipelines = [cost(), cost(), cost(b=2e-5, num_stages=4), cost(b=3e-5, max_len=7000)]
    first = dispatch(lengths, pipelines, seed=3)
    assert dispatch(lengths, pipelines, seed=3) == first


def test_a_slower_device_gets_less_work() -> None:
    fast, slow = cost(num_stages=1), cost(num_stages=1, a=1.6e-9, b=1e-4, c=0.08)
    lengths = np.random.default_rng(0).integers(200, 2000, 200)
    owners = np.array(dispatch(lengths, [fast, slow]).pipeline_of)
    share = lengths[owners == 0].sum() / lengths.sum()
    assert 0.63 < share < 0.70


def test_a_sequence_that_fits_nowhere_is_named() -> None:
    with pytest.raises(AssignmentError, match=r"Sequence 1 has 900 tokens .* takes 500"):
        dispatch([10, 900], [cost(max_len=500), cost(max_len=400)])
    with pytest.raises(AssignmentError, match="Sequence 1"):
        exact.dispatch_exact([10, 900], [cost(max_len=500)])


def test_nothing_to_dispatch_takes_no_time() -> None:
    assert dispatch([], [cost()]).latency_s == 0


def test_bounds_are_near_on_pipelines_with_different_limits() -> None:
    lengths = np.exp(np.random.default_rng(0).normal(6.5, 1.1, 60)).astype(int) + 20
    pipelines = [cost(max_len=32_000)] + [cost(max_len=2_500)] * 6
    loose, tight = (
        dispatch(lengths, pipelines, tight_bound=is_tight) for is_tight in (False, True)
    )
    assert loose.latency_s == tight.latency_s
    loose_gap, tight_gap = (found.latency_s / found.lower_bound_s - 1 for found in (loose, tight))
    assert tight_gap < loose_gap / 2


def test_improving_thousands_of_sequences_has_a_budget(monkeypatch) -> None:
    tried: dict[int, int] = {}
    step = dispatch_moves._best_step

    def counted(state, *arguments):
        touched = step(state, *arguments)
        tried[id(state)] = state.num_tried
        return touched

    monkeypatch.setattr(dispatch_moves, "_best_step", counted)
    lengths = np.random.default_rng(0).integers(100, 6000, 3000)
    pipelines = [cost(num_stages=1 + index % 4) for index in range(32)]
    sizes, table = as_lengths(lengths), CostTable.of(pipelines)
    start = np.arange(3000) % 32
    improve_dispatch(sizes, times_of(sizes, table), table, start, budget=1_000_000)
    # The step that exceeds the budget is the last.
    assert 1_000_000 < sum(tried.values()) < 1_700_000
