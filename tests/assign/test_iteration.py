import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.assign import assign_iteration, pack
from lightning_hetero.assign.pipeline_cost import microbatch_times_s
from lightning_hetero.core.errors import AssignmentError
from tests.assign.cases import cost, dispatch_cases


@settings(max_examples=60)
@given(dispatch_cases())
def test_every_sample_stands_in_one_microbatch_within_the_limit(case) -> None:
    lengths, pipelines = case
    candidates = [pipelines, [cost(max_len=1)], [cost(max_len=3000, c=2.0)]]
    found = assign_iteration(lengths, candidates)
    plan = candidates[found.plan_index]
    assert len(found.microbatches) == len(plan)
    samples = [i for batches in found.microbatches for batch in batches for i in batch]
    assert sorted(samples) == list(range(len(lengths)))
    for pipeline, batches in zip(plan, found.microbatches, strict=True):
        assert all(sum(lengths[i] for i in batch) <= pipeline.max_len for batch in batches)
    assert assign_iteration(lengths, candidates) == found


@settings(max_examples=150)
@given(dispatch_cases(max_sequences=12), st.lists(dispatch_cases(max_sequences=1), max_size=5))
def test_the_best_candidate_is_at_least_as_good_as_each_alone(case, others) -> None:
    lengths, pipelines = case
    candidates = [pipelines, *(other for _, other in others), [cost(max_len=3000)]]
    best = assign_iteration(lengths, candidates)
    for candidate in candidates:
        if max(p.max_len for p in candidate) >= max(lengths):
            alone = assign_iteration(lengths, [candidate])
            assert best.latency_s <= alone.latency_s * (1 + 1e-9)


def test_iterations_with_and_without_long_sequences_choose_different_plans() -> None:
    short = [cost(b=3e-4, max_len=4096, num_stages=1) for _ in range(8)]
    long = [cost(b=6.7e-5, max_len=32768, num_stages=1)]
    generator = np.random.default_rng(0)
    lengths = generator.integers(200, 2000, 40)
    assert assign_iteration(lengths, [short, long]).plan_index == 0
    lengths[0] = 30_000
    assert assign_iteration(lengths, [short, long]).plan_index == 1


def test_samples_too_long_for_every_candidate_are_refused_with_the_limits() -> None:
    with pytest.raises(AssignmentError, match=r"9000 tokens .* take \[500, 400\]"):
        assign_iteration([9000], [[cost(max_len=500)], [cost(max_len=400)]])
    with pytest.raises(AssignmentError, match="0 candidate plans"):
        assign_iteration([10], [])


def test_assignments_know_what_is_recomputed() -> None:
    generator = np.random.default_rng(0)
    pricey = cost(kept_len=900, recompute_share=0.4, max_len=4000)
    for _ in range(3):
        pipelines = [pricey, cost(b=6e-5, max_len=4000), pricey]
        lengths = generator.integers(100, 4000, size=5)
        every_s = [
            max(
                packing_s(lengths[np.array(choice) == index], pipeline)
                for index, pipeline in enumerate(pipelines)
            )
            for choice in itertools.product(range(3), repeat=5)
        ]
        found = assign_iteration(lengths, [pipelines])
        assert found.latency_s <= min(every_s) * 1.1


def packing_s(lengths, pipeline) -> float:
    """Return when a pipeline ends with its best packing."""
    packing = pack(lengths, pipeline)
    return pipeline.schedule_s(microbatch_times_s(lengths, packing.microbatches, pipeline))
