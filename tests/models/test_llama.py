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


def test_packed_forward_equals_the_forward_of_each_sample():
    model = small_model()
    packed = logits_of(model, pack_samples(SAMPLES))
    alone = torch.cat([logits_of(model, pack_samples([sample])) for sample in SAMPLES])
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)
    assert packed.shape == (sum(map(len, SAMPLES)), 11)


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


def test_layers_work_on_a_received_hidden_state():
    """A stage runs layers on what another rank sent: nothing but the batch may feed them."""
    model = small_model()
    batch = pack_samples(SAMPLES)
    inputs = {}

    def remember(name):
        def hook(module, args, output):
            assert isinstance(output, torch.Tensor)
            inputs[name] = (args, output)

        return hook

    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(remember(index))
    logits_of(model, batch)
    for args, output in inputs.values():
        assert [a.requires_grad for a in args if isinstance(a, torch.Tensor)][1:] == [False] * 3
        assert output.shape == args[0].shape


def test_tensor_parallel_plan_names_every_matrix_once():
    model = small_model()
    for name, parameter in model.named_parameters():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        kind = model.tp_plan.get(pattern)
        assert (kind is None) == (parameter.dim() == 1), name
        assert kind in (None, "colwise", "rowwise", "vocab")


def test_attention_runs_with_a_share_of_the_heads():
    """Colwise q, k, v and rowwise o over two halves add up to the whole."""
    layer = small_model().layers[0].self_attn
    hidden = torch.randn(6, 32, dtype=torch.float64)
    cos, sin = torch.ones(6, 4).double(), torch.zeros(6, 4).double()
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    whole = layer(hidden, cos, sin, cu_seqlens, 4)
    weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    total = torch.zeros_like(whole)
    for half in range(2):
        for name, weight in weights.items():
            dim = 1 if name == "o_proj.weight" else 0
            part = weight.chunk(2, dim=dim)[half]
            layer.get_submodule(name.split(".")[0]).weight = nn.Parameter(part)
        total += layer(hidden, cos, sin, cu_seqlens, 4)
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-8)


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
