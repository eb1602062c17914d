import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import HalfPrecision
from torch.utils.data import DataLoader

from lightning_hetero.core.errors import BatchError
from lightning_hetero.models.packing import PackedBatch, pack_samples

samples_lists = st.lists(
    st.lists(st.integers(0, 500), min_size=1, max_size=20), min_size=1, max_size=12
)


def unpack(batch):
    """Return (tokens, labels, positions) of each sample."""
    bounds = batch.cu_seqlens.tolist()
    return [
        tuple(t[a:b].tolist() for t in (batch.input_ids, batch.labels, batch.position_ids))
        for a, b in itertools.pairwise(bounds)
    ]


@given(samples_lists)
def test_nothing_is_lost_and_labels_never_cross_borders(samples):
    batch = pack_samples(samples)
    assert unpack(batch) == [(s, [*s[1:], -100], list(range(len(s)))) for s in samples]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == max(map(len, samples))
    assert batch.num_samples == len(samples)
    assert batch.num_tokens == sum(map(len, samples))
    assert batch.num_target_tokens == batch.num_tokens - batch.num_samples
    assert batch.lengths == [len(s) for s in samples]


@given(samples_lists, st.integers(1, 15))
def test_split_covers_each_sample_once_in_order(samples, num_microbatches):
    batch = pack_samples(samples)
    parts = batch.split(num_microbatches)
    assert len(parts) == min(num_microbatches, len(samples))
    assert sorted(row for part in parts for row in unpack(part)) == sorted(unpack(batch))
    assert sum(part.num_target_tokens for part in parts) == batch.num_target_tokens
    order = [unpack(batch).index(row) for row in unpack(parts[0])]
    assert order[0] == 0
    for part in parts:
        assert part.max_seqlen == max(part.lengths)
        assert part.cu_seqlens[-1] == part.num_tokens


def test_split_keeps_the_order_inside_a_microbatch():
    batch = pack_samples([[i] * length for i, length in enumerate([9, 1, 8, 2, 7, 3, 6, 4])])
    for part in batch.split(3):
        firsts = part.input_ids[part.cu_seqlens[:-1].long()].tolist()
        assert firsts == sorted(firsts)


@given(samples_lists, st.integers(1, 5))
def test_split_is_deterministic_and_its_load_is_within_the_list_scheduling_bound(samples, count):
    batch = pack_samples(samples)
    parts, again = (
        batch.split(count, quadratic_weight=0.01),
        batch.split(count, quadratic_weight=0.01),
    )
    assert [p.input_ids.tolist() for p in parts] == [p.input_ids.tolist() for p in again]
    costs = [length + 0.01 * length**2 for length in batch.lengths]
    loads = [sum(length + 0.01 * length**2 for length in part.lengths) for part in parts]
    assert max(loads) <= sum(costs) / len(parts) + max(costs) + 1e-9


def test_split_weighs_attention_as_told():
    batch = pack_samples([[1] * 1000, *([[1] * 100] * 10)])
    assert [p.num_tokens for p in batch.split(2, quadratic_weight=0.0)] == [1000, 1000]
    # 1000 + 1000² a against 10 · (100 + 100² a): with a = 1 no short sample joins the long one.
    loads = [p.lengths for p in batch.split(3, quadratic_weight=1.0)]
    assert loads == [[1000], [100] * 5, [100] * 5]


def test_split_keeps_labels_that_a_user_masked():
    batch = pack_samples([[1, 2, 3], [4, 5, 6]])
    masked = dataclasses.replace(batch, labels=batch.labels.masked_fill(batch.labels == 5, -100))
    assert [p.labels.tolist() for p in masked.split(2)] == [[2, 3, -100], [-100, 6, -100]]
    assert masked.num_target_tokens == 3


def test_tensors_arrays_lists_and_mappings_pack_alike():
    rows = [[5, 6, 7], [8, 9]]
    kinds = (
        rows,
        [torch.tensor(r) for r in rows],
        [np.array(r, dtype=np.uint16) for r in rows],
        [{"input_ids": r} for r in rows],
        [torch.tensor(r, dtype=torch.uint8) for r in rows],
    )
    for samples in kinds:
        batch = pack_samples(samples)
        assert batch.input_ids.dtype == torch.int64
        assert batch.input_ids.tolist() == [5, 6, 7, 8, 9]


def test_a_data_loader_packs():
    rows = [list(range(n)) for n in (3, 4, 2)]
    (batch,) = DataLoader(rows, batch_size=3, collate_fn=pack_samples)
    assert isinstance(batch, PackedBatch)
    assert batch.lengths == [3, 4, 2]
    assert batch.labels.tolist() == [1, 2, -100, 1, 2, 3, -100, 1, -100]


def test_lightning_moves_a_batch_to_a_device():
    batch = pack_samples([[1, 2], [3]])
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, PackedBatch)
    tensors = [v for v in vars(moved).values() if isinstance(v, torch.Tensor)]
    assert {t.device.type for t in tensors} == {"meta"}
    assert len(tensors) == 4
    assert moved.max_seqlen == 2
    assert batch.input_ids.device.type == "cpu"


def test_a_packed_batch_never_changes_the_samples():
    sample = torch.tensor([1, 2, 3])
    pack_samples([sample]).input_ids.zero_()
    assert sample.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([[1], []], "Sample 1"),
        ([[1.5]], "Sample 0 holds float64"),
        ([torch.zeros(3)], "Sample 0 has shape"),
        ([torch.zeros(2, 2, dtype=torch.int64)], r"Sample 0 has shape \(2, 2\)"),
    ],
)
def test_samples_that_cannot_be_packed_are_named(samples, message):
    with pytest.raises(BatchError, match=message):
        pack_samples(samples)


def test_bad_counts_are_refused():
    with pytest.raises(BatchError, match="0 micro-batches"):
        pack_samples([[1, 2]]).split(0)


def test_labels_of_a_sample_are_shifted_and_masked_as_given():
    samples = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": torch.tensor([1, 2, 3])},
    ]
    assert pack_samples(samples).labels.tolist() == [-100, 7, 8, -100, 2, 3, -100]
    with pytest.raises(BatchError, match="2 labels"):
        pack_samples([{"input_ids": [1, 2, 3], "labels": [1, 2]}])


def test_a_batch_on_a_device_knows_its_targets_without_reading_them():
    batch = pack_samples([[1, 2, 3], [4, 5]])
    assert batch.to("meta").num_target_tokens == 3
    # What a step masks later counts in the loss's weight all the same.
    batch.labels[0] = -100
    assert int(batch.target_tokens) == 2


def test_lightnings_own_bf16_takes_a_batch_as_it_is():
    batch = pack_samples([[1, 2, 3], [4, 5]])
    converted = HalfPrecision("bf16-true").convert_input(batch)
    assert unpack(converted) == unpack(batch)


def test_a_batch_is_the_mapping_that_a_hugging_face_model_takes():
    batch = pack_samples([[1, 2, 3], [4, 5]])
    inputs = dict(**batch)
    assert set(inputs) == set(batch.keys())
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert inputs["labels"].tolist() == [[2, 3, -100, 5, -100]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert (batch["max_length_q"], batch["use_cache"]) == (3, False)
    with pytest.raises(BatchError, match=r"no 'attention_mask' but input_ids.*no mask"):
        batch["attention_mask"]


def test_a_sample_without_token_ids_is_named():
    with pytest.raises(BatchError, match=r"Sample 1 has 'text', but no 'input_ids'"):
        pack_samples([{"input_ids": [1]}, {"text": "a"}])
