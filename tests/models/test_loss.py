import pytest
import torch
import torch.nn.functional as F

from lightning_hetero.models import packing
from lightning_hetero.models.packing import packed_cross_entropy


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


def test_a_batch_without_targets_costs_nothing():
    logits, _ = random_case(torch.float32)
    value = packed_cross_entropy(logits, torch.full((50,), -100))
    value.backward()
    assert value.item() == 0.0
    assert not logits.grad.any()
