import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_hetero.assign import dispatch
from lightning_hetero.assign.dispatch import latency_bound_s
from lightning_hetero.assign.pipeline_cost import CostTable, as_lengths
from lightning_hetero.core.errors import AssignmentError
from tests.assign.cases import cost, dispatch_cases


def latencies_s(lengths, pipelines, choices) -> np.ndarray:
    """Return the largest Eq. 2 of each choice [M, B] of pipelines, infinite if one doesn't fit.

    `work + T(longest)·(PP-1) + c·(PP-1+V)` with the fewest micro-batches V that hold the tokens; an
    idle pipeline costs nothing.
    """
    sizes, table = as_lengths(lengths), CostTable.of(pipelines)
    members = np.asarray(choices)[:, :, None] == np.arange(len(pipelines))
    columns = sizes[:, None] * members
    longest, tokens = columns.max(axis=1), columns.sum(axis=1)
    work_s = (table.times_s(sizes) * members).sum(axis=1)
    counts = np.maximum(np.ceil(tokens / table.max_len), 1.0)
    bubble_s = (table.a * longest + table.b) * longest * table.num_bubbles
    ends_s = work_s + bubble_s + table.c * (table.num_bubbles + counts)
    fits = (~members | (sizes[:, None] <= table.max_len)).all(axis=(1, 2))
    return np.where(fits, np.where(tokens > 0, ends_s, 0.0).max(axis=1), np.inf)


def optimum_s(lengths, pipelines) -> float:
    """Return the least latency of all dispatches."""
    choices = np.array(list(itertools.product(range(len(pipelines)), repeat=len(lengths))))
    return float(latencies_s(lengths, pipelines, choices).min())


@given(dispatch_cases())
def test_every_sequence_goes_to_one_pipeline_that_holds_it_in_the_time_reported(case) -> None:
    lengths, pipelines = case
    result = dispatch(lengths, pipelines)
    assert len(result.pipeline_of) == len(lengths)
    again_s = latencies_s(lengths, pipelines, [result.pipeline_of])[0]
    assert result.latency_s == pytest.approx(again_s)


@settings(max_examples=200)
@given(dispatch_cases(max_sequences=6, max_pipelines=4))
def test_dispatch_is_within_2_per_cent_of_the_optimum_and_the_bound_never_above_it(case) -> None:
    lengths, pipelines = case
    best_s = optimum_s(lengths, pipelines)
    assert dispatch(lengths, pipelines).latency_s <= best_s * 1.02
    bound_s = latency_bound_s(as_lengths(lengths), CostTable.of(pipelines))
    assert bound_s <= best_s * (1 + 1e-9)


@settings(max_examples=30)
@given(dispatch_cases(max_sequences=12, max_pipelines=4))
def test_no_gift_or_exchange_lets_a_dispatch_end_earlier(case) -> None:
    lengths, pipelines = case
    found = dispatch(lengths, pipelines)
    tried = []
    for index, own in enumerate(found.pipeline_of):
        for other, taken in enumerate([*found.pipeline_of, *range(len(pipelines))]):
            choice = [*found.pipeline_of]
            choice[index] = taken
            if other < len(lengths):
                choice[other] = own
            tried.append(choice)
    assert latencies_s(lengths, pipelines, tried).min() >= found.latency_s * (1 - 1e-5)


def test_a_sequence_that_fits_nowhere_is_named() -> None:
    with pytest.raises(AssignmentError, match=r"Sequence 1 has 900 tokens .* takes 500"):
        dispatch([10, 900], [cost(max_len=500), cost(max_len=400)])
