import dataclasses
import json

import pytest
import torch

from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.models import HeteroLM, LMConfig


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("bert-large", 0.334),
        ("llama-7b", 6.738),
        ("LLaMA 13B", 13.016),
        ("llama-70b", 68.977),
    ],
)
def test_known_models_have_their_published_number_of_parameters(name, billions):
    assert ModelSpec.load(name).num_params / 1e9 == pytest.approx(billions, rel=2e-3)


def test_counts_equal_the_reference_models():
    spec = ModelSpec(
        name="tiny",
        num_layers=3,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        vocab_size=50,
        gated_mlp=True,
        tied_embeddings=False,
    )
    config = LMConfig(
        vocab_size=50,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
    )
    with torch.device("meta"):
        model = HeteroLM(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert spec.num_params == count
    assert spec.params_per_layer == sum(p.numel() for p in model.layers[0].parameters())


def test_attention_costs_the_sum_of_squares_not_the_square_of_the_sum():
    model = ModelSpec.load("llama-7b")
    whole, halves = (
        model.attention_flops_per_layer(lengths) for lengths in ((4096,), (2048, 2048))
    )
    assert whole == 2 * halves
    assert model.linear_flops_per_layer(4096) == 2 * 4096 * model.matrix_params_per_layer
    everyone = dataclasses.replace(model, causal=False)
    assert everyone.attention_flops_per_layer((4096,)) == 2 * whole


def test_hugging_face_folders_are_read(tmp_path):
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
        "activation_function": "gelu_new",
    }
    for name, config in (("llama", llama), ("gpt2", gpt2), ("nested", {"text_config": llama})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    read = ModelSpec.load(tmp_path / "llama")
    assert dataclasses.replace(read, name="llama-7b") == ModelSpec.load("llama-7b")
    assert ModelSpec.load(tmp_path / "nested").num_params == read.num_params
    assert ModelSpec.load(tmp_path / "gpt2").num_params == 124_439_808


@pytest.mark.parametrize(
    ("key_heads", "degree", "copies"), [(8, 4, 8), (2, 2, 2), (2, 4, 4), (1, 8, 8), (3, 2, 4)]
)
def test_a_group_holds_the_key_heads_that_its_ranks_read(key_heads, degree, copies):
    spec = dataclasses.replace(
        ModelSpec.load("llama-7b"), num_heads=24, num_kv_heads=key_heads, head_dim=128
    )
    assert spec.key_size == 128 * key_heads
    assert spec.key_size_in_group(degree) == 128 * copies
    more = 2 * 4096 * 128 * (copies - key_heads)
    assert spec.copied_params_per_layer(degree) == more
