import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import HalfPrecision
from torch.utils.data import DataLoader

from lightning_hetero.core.errors import BatchError
from lightning_hetero.models import packing
from lightning_hetero.models.packing import PackedBatch, pack_samples, packed_cross_entropy

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
    with pytest.raises(BatchError, match="0 micro-batches"):
        batch.split(0)


@given(samples_lists, st.integers(1, 15))
def test_split_covers_each_sample_once_in_order_within_the_list_scheduling_bound(samples, count):
    batch = pack_samples(samples)
    parts, again = (batch.split(count, quadratic_weight=0.01) for _ in range(2))
    assert [p.input_ids.tolist() for p in parts] == [p.input_ids.tolist() for p in again]
    assert len(parts) == min(count, len(samples))
    rows = unpack(batch)
    assert sorted(row for part in parts for row in unpack(part)) == sorted(rows)
    assert sum(part.num_target_tokens for part in parts) == batch.num_target_tokens
    assert unpack(parts[0])[0] == rows[0]
    for part in parts:
        order = iter(rows)
        assert all(row in order for row in unpack(part)), "another order"
        assert part.max_seqlen == max(part.lengths)
        assert part.cu_seqlens[-1] == part.num_tokens
    costs, *loads = (
        [length + 0.01 * length**2 for length in item.lengths] for item in (batch, *parts)
    )
    assert max(map(sum, loads)) <= sum(costs) / len(parts) + max(costs) + 1e-9


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


def test_a_data_loader_packs_a_copy_and_lightning_moves_and_converts_it():
    rows = [torch.arange(n) for n in (3, 4, 2)]
    (batch,) = DataLoader(rows, batch_size=3, collate_fn=pack_samples)
    assert batch.labels.tolist() == [1, 2, -100, 1, 2, 3, -100, 1, -100]
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, PackedBatch)
    tensors = [v for v in vars(moved).values() if isinstance(v, torch.Tensor)]
    assert [t.device.type for t in tensors] == ["meta"] * 4
    # Known without reading the device; what a step masks later counts all the same.
    assert (moved.max_seqlen, moved.num_target_tokens) == (4, 6)
    batch.labels[0] = -100
    assert int(batch.target_tokens) == 5
    assert unpack(HalfPrecision("bf16-true").convert_input(batch)) == unpack(batch)
    batch.input_ids.zero_()
    assert rows[0].tolist() == [0, 1, 2], "packing changed the samples"


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


def test_labels_of_a_sample_are_shifted_and_masked_as_given():
    samples = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": torch.tensor([1, 2, 3])},
        np.array([5, 6], dtype=np.uint16),
        torch.tensor([7, 8], dtype=torch.uint8),
    ]
    batch = pack_samples(samples)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 1, 2, 3, 5, 6, 7, 8]
    assert batch.labels.tolist() == [-100, 7, 8, -100, 2, 3, -100, 6, -100, 8, -100]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([[1], []], "Sample 1"),
        ([[1.5]], "Sample 0 holds float64"),
        ([torch.zeros(3)], "Sample 0 has shape"),
        ([torch.zeros(2, 2, dtype=torch.int64)], r"Sample 0 has shape \(2, 2\)"),
        ([{"input_ids": [1]}, {"text": "a"}], "Sample 1 has 'text', but no 'input_ids'"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2]}], "2 labels"),
    ],
)
def test_samples_that_cannot_be_packed_are_named(samples, message):
    with pytest.raises(BatchError, match=message):
        pack_samples(samples)


def random_case(dtype, tokens=50, vocab=13):
    generator = torch.Generator().manual_seed(7)
    logits = (3 * torch.randn(tokens, vocab, generator=generator)).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::7] = -100
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_are_the_fp32_mean_over_targets(dtype, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK_TOKENS", 16)
    logits, labels = random_case(dtype)
    ours = packed_cross_entropy(logits, labels)
    ours.backward()
    raised = logits.detach().double().requires_grad_()
    reference = F.cross_entropy(raised, labels, ignore_index=-100)
    reference.backward()
    empty = packed_cross_entropy(logits, torch.full_like(labels, -100))
    assert empty.item() == 0.0
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(ours.double(), reference, rtol=1e-6, atol=1e-6)
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(
        logits.grad.double(), raised.grad, rtol=4 * tolerance, atol=tolerance
    )


def test_bf16_loss_does_not_keep_fp32_logits(monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK_TOKENS", 8)
    logits, labels = random_case(torch.bfloat16, tokens=64)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        packed_cross_entropy(logits, labels)
    assert not [t for t in kept if t.dtype == torch.float32 and t.numel() >= 8 * 13]
