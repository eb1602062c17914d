from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_hetero.assign import pack
from lightning_hetero.assign.iteration import microbatch_range
from lightning_hetero.assign.pipeline_cost import as_lengths
from lightning_hetero.core.errors import AssignmentError
from tests.assign.cases import cost, pack_cases


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


@settings(max_examples=200)
@given(pack_cases(max_sequences=7))
def test_packings_of_few_sequences_are_the_best(case) -> None:
    lengths, pipeline = case
    assert pack(lengths, pipeline).latency_s == pytest.approx(optimum_s(lengths, pipeline))


def test_a_sequence_above_maxlen_is_named_and_nothing_takes_no_time() -> None:
    with pytest.raises(AssignmentError, match=r"Sequence 1 has 900 tokens .* takes 500"):
        pack([10, 900], cost(max_len=500))
    packing = pack([], cost())
    assert (packing.microbatches, packing.latency_s) == ((), 0.0)


def test_micro_batches_stay_below_what_is_recomputed_where_that_is_cheaper() -> None:
    lengths = [300] * 20
    keeping = cost(c=0.0001, util_len=1, max_len=2000, num_stages=1)
    packing = pack(lengths, replace(keeping, kept_len=700, recompute_share=0.4))
    assert max(sum(lengths[i] for i in batch) for batch in packing.microbatches) <= 700
    assert len(pack(lengths, keeping).microbatches) < len(packing.microbatches)
