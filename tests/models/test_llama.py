from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.models.llama import HeteroLM, LMConfig
from lightning_hetero.models.packing import pack_samples, packed_cross_entropy

SAMPLES = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9], [3, 2, 3, 8]]


def small_config(**changes):
    defaults = {
        "vocab_size": 11,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    return LMConfig(**(defaults | changes))


def small_model(**changes):
    torch.manual_seed(0)
    return HeteroLM(small_config(**changes)).double()


def logits_of(model, batch):
    return model(batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen)


def test_gradient_of_a_packed_batch_is_the_sum_over_samples():
    model = small_model()
    batch = pack_samples(SAMPLES)
    packed_cross_entropy(logits_of(model, batch), batch.labels).backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for sample in SAMPLES:
        part = pack_samples([sample])
        weight = part.num_target_tokens / batch.num_target_tokens
        (packed_cross_entropy(logits_of(model, part), part.labels) * weight).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, packed[name], rtol=1e-5, atol=1e-9, msg=name)


def test_attention_is_causal_and_knows_order_by_rotary_positions():
    model = small_model()
    first, second, swapped = (
        logits_of(model, pack_samples([s])) for s in ([1, 2, 3, 4], [1, 2, 3, 9], [2, 1, 3, 4])
    )
    torch.testing.assert_close(first[:3], second[:3])
    assert not torch.allclose(first[3], second[3])
    assert not torch.allclose(first[3], swapped[3])


@pytest.mark.parametrize("tie", [False, True])
def test_meta_model_materialises_to_the_same_distribution(tie):
    config = small_config(
        hidden_size=128, num_layers=3, num_heads=4, vocab_size=300, tie_embeddings=tie
    )
    with torch.device("meta"):
        model = HeteroLM(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    model.tie_weights()
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert (model.lm_head.weight is model.embed_tokens.weight) is tie
    assert not list(model.buffers())
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            scaled = "o_proj" in name or "down_proj" in name
            expected = 0.02 / (6**0.5 if scaled else 1)
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 36}, "multiple of 8"),
        ({"num_kv_heads": 3}, "divides num_heads"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        small_config(**changes)


def test_the_spec_counts_parameters_and_matrix_products_as_torch_does():
    config = LMConfig(vocab_size=50, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2)
    model, spec = HeteroLM(config), config.spec
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    lengths = [20, 3, 11]
    assert (config.intermediate_size, config.head_dim) == (192, 16)
    assert replace(config, num_kv_heads=0).num_kv_heads == config.num_heads
    # Attention grows with the sum of squares.
    assert spec.step_flops([100]) - spec.step_flops([50, 50]) == 6 * 3 * 64 * (100**2 - 2 * 50**2)
    batch = pack_samples([[1] * length for length in lengths])
    with FlopCounterMode(display=False) as counter:
        model(
            batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen
        ).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if op == torch.ops.aten.mm)
    attention = 3 * 3 * spec.attention_flops_per_layer(lengths)
    assert products == spec.step_flops(lengths) - attention
