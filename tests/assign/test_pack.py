from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hetero.assign import Packing, PipelineCost, pack_all
from lightning_hetero.assign.bins import balance, improve_balance
from lightning_hetero.assign.pack import (
    microbatch_range,
    packing_lower_bound_s,
    partition_sums,
    partitions,
)
from lightning_hetero.assign.pipeline_cost import as_lengths, sequence_times_s
from lightning_hetero.core.errors import AssignmentError
from tests.assign.cases import cost, pack_cases
from tests.assign.exact import pack_into


def pack(lengths, pipeline) -> Packing:
    """Return the packing of one pipeline."""
    return pack_all([lengths], [pipeline])[0]


def time_s(lengths, pipeline) -> float:
    """Return the seconds of a stage for one micro-batch of these lengths, without c."""
    alone_s = sum(pipeline.a * length**2 + pipeline.b * length for length in lengths)
    return alone_s * float(pipeline.stretch(np.array([float(sum(lengths))]))[0])


def optimum_s(lengths, pipeline) -> float:
    """Return the least Eq. 1 over the range of numbers of micro-batches, one group at a time."""
    counts = microbatch_range(as_lengths(lengths), pipeline)
    best = [np.inf]

    def place(index: int, groups: list[list[int]]) -> None:
        if index == len(lengths):
            if len(groups) in counts:
                longest = max(time_s(group, pipeline) for group in groups)
                best[0] = min(best[0], pipeline.latency_s(longest, len(groups)))
            return
        for group in [*groups, None]:
            chosen = [] if group is None else group
            if sum(chosen) + lengths[index] <= pipeline.max_len:
                if group is None:
                    groups.append(chosen)
                chosen.append(lengths[index])
                place(index + 1, groups)
                chosen.pop()
                if group is None:
                    groups.pop()

    place(0, [])
    return best[0]


@settings(deadline=None)
@given(pack_cases())
def test_no_sample_is_lost_or_doubled_and_no_microbatch_above_its_limit(case) -> None:
    lengths, pipeline = case
    packing = pack(lengths, pipeline)
    assert sorted(i for batch in packing.microbatches for i in batch) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in batch) for batch in packing.microbatches]
    assert min(sums) > 0
    assert max(sums) <= pipeline.max_len
    longest_s = max(time_s([lengths[i] for i in b], pipeline) for b in packing.microbatches)
    assert packing.latency_s == pytest.approx(pipeline.latency_s(longest_s, len(sums)))
    assert packing.lower_bound_s <= packing.latency_s


@settings(deadline=None, max_examples=60)
@given(pack_cases(max_sequences=7))
def test_up_to_eight_sequences_are_packed_exactly(case) -> None:
    lengths, pipeline = case
    best_s = optimum_s(lengths, pipeline)
    packing = pack(lengths, pipeline)
    assert packing.latency_s == pytest.approx(best_s)
    assert packing.lower_bound_s <= best_s * (1 + 1e-9)


# Seconds so short that HiGHS's tolerance, were they not scaled, is a large part of them.
SHORT = PipelineCost(a=1e-8, b=3e-5, c=0.01, max_len=50, util_len=1, num_stages=1)


@settings(deadline=None, max_examples=12)
@example(([1, 1, 2, 4, 9, 9, 10, 10, 11], SHORT))
@given(pack_cases(max_sequences=9).filter(lambda case: len(case[0]) == 9))
def test_highs_packs_more_exactly_and_bounds_are_never_above_the_optimum(case) -> None:
    lengths, pipeline = case
    pipeline = replace(pipeline, recompute_share=0.0)  # It isn't linear.
    best_s = optimum_s(lengths, pipeline)
    sizes = np.sort(as_lengths(lengths))[::-1]
    times_s = sequence_times_s(sizes, pipeline)
    solved_s = []
    for count in microbatch_range(sizes, pipeline):
        found = pack_into(sizes, pipeline, count)
        if found.bin_of is not None:
            longest_s = np.bincount(found.bin_of, weights=times_s).max()
            solved_s.append(pipeline.latency_s(longest_s, count))
            assert found.lower_bound_s <= longest_s * (1 + 1e-6)
    assert min(solved_s) <= best_s * (1 + 1e-5)
    packing = pack(lengths, pipeline)
    assert packing.latency_s <= best_s * 1.1
    assert best_s * (1 - 1e-9) <= packing.latency_s
    assert packing.lower_bound_s <= best_s * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
@given(st.lists(pack_cases(max_sequences=14), min_size=1, max_size=4))
def test_packing_pipelines_together_equals_packing_each_alone(cases) -> None:
    lengths, pipelines = zip(*cases, strict=True)
    together = pack_all(lengths, pipelines)
    alone = [pack(item, pipe) for item, pipe in zip(lengths, pipelines)]  # noqa: B905
    assert [p.latency_s for p in together] == pytest.approx([p.latency_s for p in alone])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_the_lower_bound_of_a_number_of_microbatches_holds(times, count) -> None:
    times_s = np.sort(times)[::-1]
    _, counts = partitions(len(times))
    best_s = partition_sums(times_s[None])[0][counts <= count].min()
    assert packing_lower_bound_s(times_s, count) <= best_s * (1 + 1e-9)


def test_there_are_as_many_partitions_as_the_bell_numbers_say() -> None:
    assert [len(partitions(n)[0]) for n in range(9)] == [1, 1, 2, 5, 15, 52, 203, 877, 4140]


@settings(deadline=None, max_examples=50)
@given(pack_cases(max_sequences=20), st.integers(2, 6))
def test_swaps_never_fill_the_fullest_bin_further(case, count) -> None:
    lengths, pipeline = case
    sizes = np.sort(as_lengths(lengths))[::-1]
    times_s = sequence_times_s(sizes, pipeline)[None]
    rows = balance(
        times_s, sizes[None].astype(float), np.array([count]), np.array([float(pipeline.max_len)])
    )
    after = improve_balance(rows, stop_at_s=np.zeros(1))
    assert after.fullest_s()[0] <= rows.fullest_s()[0]
    if after.is_valid[0]:
        sums = np.bincount(after.bin_of[0], weights=sizes)
        assert sums.max() <= pipeline.max_len


def test_an_integer_programme_says_when_too_few_microbatches_hold_no_packing() -> None:
    sizes = np.array([60, 60, 60], dtype=np.int64)
    result = pack_into(sizes, cost(max_len=100), 2)
    assert result.bin_of is None
    assert result.lower_bound_s == np.inf


def test_many_sequences_are_all_packed() -> None:
    lengths = np.random.default_rng(0).integers(100, 2000, 40)
    packing = pack(lengths, cost(max_len=8000, num_stages=6))
    assert sum(map(len, packing.microbatches)) == 40


def test_microbatches_range_from_maxlen_to_utillen() -> None:
    lengths = np.full(20, 1000)
    assert microbatch_range(lengths, cost(max_len=8000, util_len=2500)) == range(3, 9)
    assert microbatch_range(lengths, cost(max_len=8000, util_len=10)) == range(3, 21)
    assert microbatch_range(lengths, cost(max_len=8000, util_len=8000)) == range(3, 6)


def test_deep_pipelines_get_more_microbatches() -> None:
    lengths = np.full(32, 500)
    shallow = pack(lengths, cost(num_stages=1))
    deep = pack(lengths, cost(num_stages=8))
    assert len(shallow.microbatches) == 1
    assert len(deep.microbatches) > 4


def test_a_sequence_above_maxlen_is_named() -> None:
    with pytest.raises(AssignmentError, match=r"Sequence 1 has 900 tokens .* takes 500"):
        pack([10, 900], cost(max_len=500))


def test_a_pipeline_without_sequences_has_no_microbatches() -> None:
    packing = pack([], cost())
    assert (packing.microbatches, packing.latency_s) == ((), 0.0)


def test_micro_batches_stay_below_what_is_recomputed_where_that_is_cheaper() -> None:
    lengths = [300] * 20
    keeping = cost(c=0.0001, util_len=1, max_len=2000, num_stages=1)
    packing = pack(lengths, replace(keeping, kept_len=700, recompute_share=0.4))
    assert max(sum(lengths[i] for i in batch) for batch in packing.microbatches) <= 700
    assert len(pack(lengths, keeping).microbatches) < len(packing.microbatches)
