import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import BatchError, ModelError
from lightning_hetero.models import attention
from lightning_hetero.models.attention import varlen_attention

lengths_lists = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def random_packed(lengths, *, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(lengths) * 31 + len(lengths))
    return [
        torch.randn(
            sum(lengths), count, head_dim, generator=generator, dtype=dtype, requires_grad=True
        )
        for count in (heads, kv_heads, kv_heads)
    ]


def dense_reference(query, key, value, lengths, *, causal, window=None, scale=None):
    """One (T, T) score matrix per head in float64, masked to blocks."""
    heads = query.shape[1]
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = sample[:, None] == sample[None, :]
    if causal:
        visible &= torch.ones_like(visible).tril()
    if window is not None:
        place = torch.arange(len(sample))
        visible &= (place[:, None] - place[None, :]).abs() < window
    outputs = []
    for head in range(heads):
        shared = head // (heads // key.shape[1])
        scores = query[:, head].double() @ key[:, shared].double().T
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        outputs.append(weights @ value[:, shared].double())
    return torch.stack(outputs, dim=1)


@settings(max_examples=90)
@example(lengths=[6] * 5, kv_heads=2, causal=True, window=None, scale=None)
@given(
    lengths=lengths_lists,
    kv_heads=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 9),
    scale=st.sampled_from([None, 0.3]),
)
def test_output_and_gradients_equal_the_dense_masked_reference(
    lengths, kv_heads, causal, window, scale
):
    packed = random_packed(lengths, kv_heads=kv_heads)
    options = {"causal": causal, "window": window, "scale": scale}
    ours = varlen_attention(*packed, offsets(lengths), max_seqlen=max(lengths), **options)
    reference = dense_reference(*packed, lengths, **options)
    torch.testing.assert_close(ours.double(), reference, rtol=1e-6, atol=1e-6)
    weights = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    ours_grads = torch.autograd.grad((ours * weights).sum(), packed)
    reference_grads = torch.autograd.grad((reference * weights).sum(), packed)
    for ours_grad, reference_grad in zip(ours_grads, reference_grads, strict=True):
        torch.testing.assert_close(ours_grad, reference_grad, rtol=1e-5, atol=3e-6)


def test_empty_sequences_change_nothing():
    packed = random_packed([4, 3])
    plain = varlen_attention(*packed, offsets([4, 3]), max_seqlen=4)
    padded = varlen_attention(*packed, offsets([0, 4, 0, 3, 0]), max_seqlen=4)
    torch.testing.assert_close(plain, padded, rtol=0, atol=0)
    assert varlen_attention(*random_packed([0]), offsets([0]), max_seqlen=0).shape == (0, 4, 8)


def test_cost_is_the_sum_of_squares_not_the_square_of_the_sum():
    lengths = [64, 3, 40, 17, 80]
    packed = random_packed(lengths)
    pairs = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counting(query, key, value, **options):
        pairs.append(query.shape[0] * query.shape[-2] * key.shape[-2])
        return original(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        varlen_attention(*packed, offsets(lengths), max_seqlen=80)
    assert sum(pairs) == sum(length * length for length in lengths)


VISIBLE = [(True, None), (False, None), (True, 4), (False, 4)]
WINDOWS = [(-1, 0), (-1, -1), (3, 0), (3, 3)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("causal", "window"), VISIBLE)
def test_torch_varlen_equals_the_dense_reference_on_cuda(causal, window):
    lengths = [33, 1, 70]
    packed = [t.detach().cuda().bfloat16() for t in random_packed(lengths, head_dim=64)]
    options = {"causal": causal, "window": window, "scale": 0.2}
    ours = varlen_attention(*packed, offsets(lengths).cuda(), max_seqlen=70, **options)
    reference = dense_reference(*(t.cpu() for t in packed), lengths, **options)
    torch.testing.assert_close(ours.cpu().double(), reference, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["varlen_attn", "flash_attn_varlen_func"])
@pytest.mark.parametrize(("visible", "expected"), [*zip(VISIBLE, WINDOWS, strict=True)])
def test_kernels_get_lengths_heads_scale_and_how_far_a_token_sees(
    monkeypatch, name, visible, expected
):
    """They run on CUDA only."""
    seen = {}

    def kernel(query, key, value, *given, **options):
        seen.update(options, given=given, heads=key.shape[1])
        return query

    monkeypatch.setattr(attention, "flash_attn_varlen_func", None)
    monkeypatch.setattr(attention, name, kernel)
    monkeypatch.setattr(attention, "_kernel_takes", lambda query: True)
    causal, window = visible
    options = {"causal": causal, "window": window, "scale": 0.2}
    varlen_attention(*random_packed([5, 2]), offsets([5, 2]), max_seqlen=5, **options)
    assert seen["given"][2:] == (5, 5)
    assert seen["given"][0].dtype == torch.int32
    assert seen["window_size"] == expected
    assert 0.2 in (seen.get("scale"), seen.get("softmax_scale"))
    if name == "flash_attn_varlen_func":
        assert (seen["heads"], seen["causal"]) == (2, causal)


def test_heads_that_do_not_divide_and_offsets_that_miss_tokens_are_refused():
    with pytest.raises(ModelError, match="4 query heads can't share 3"):
        varlen_attention(*random_packed([3], kv_heads=3), offsets([3]), max_seqlen=3)
    with pytest.raises(BatchError, match="covers 5 tokens but the batch has 7"):
        varlen_attention(*random_packed([7]), offsets([2, 3]), max_seqlen=3)
