"""A folder is mapped as transformers maps it; nothing is read before somebody asks."""

import warnings

import pytest
import torch
import transformers
from transformers import conversion_mapping
from transformers import core_model_loading as loading

from lightning_hetero.core.errors import CheckpointError, ModelError
from lightning_hetero.models.huggingface import load_pretrained
from tests.runtime.huggingface_runs import CONFIGS, VOCABULARY, auto_class, make_model


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(2)
    return tmp_path / "saved"


def save(name, folder, **options):
    model = make_model(name)
    model.save_pretrained(folder, **options)
    return model


def whole(shape):
    return tuple((0, size) for size in shape)


def assert_source_equals(model, expected):
    """Compare every parameter of a model on meta, and a box of each, with a whole model."""
    values = expected.state_dict()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in parameters.items():
        assert parameter.is_meta
        found = model.weight_source.read(name, whole(parameter.shape))
        assert torch.equal(found, values[name]), name
        box = tuple((size // 3, size // 3 + max(size // 2, 1)) for size in parameter.shape)
        part = model.weight_source.read(name, box)
        assert torch.equal(part, values[name][tuple(slice(*ends) for ends in box)]), name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shard_bytes", ["3KB", "1GB"])
def test_a_saved_model_is_found_as_from_pretrained_finds_it(folder, name, shard_bytes):
    save(name, folder, max_shard_size=shard_bytes)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_bytes == "3KB")
    kind = auto_class(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_pretrained(folder, kind)
    assert model.weight_source.num_bytes_read == 0
    assert model.training
    assert_source_equals(model, kind.from_pretrained(folder))


def test_a_class_of_its_own_and_other_options_are_taken(folder):
    model = make_model("llama")
    model.generation_config.max_new_tokens = 17
    model.bfloat16().save_pretrained(folder)
    kind = transformers.LlamaForCausalLM
    found = load_pretrained(folder, kind, dtype=torch.float64, attention_dropout=0.5)
    assert type(found) is kind
    assert found.config.attention_dropout == 0.5
    assert found.generation_config.max_new_tokens == 17
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float64}
    assert_source_equals(found, kind.from_pretrained(folder, dtype=torch.bfloat16))


def test_experts_saved_one_by_one_are_read_one_by_one(folder):
    save("mixtral", folder)
    model = load_pretrained(folder)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape = model.get_parameter(name).shape
    stored = [key for file in model.weight_source.files for key in file.tensors]
    assert any("layers.1" in key and "experts.3.w1" in key for key in stored), "they were merged"
    # One expert, half of its gate: a quarter of what its two tensors take.
    model.weight_source.read(name, ((2, 3), (0, shape[1] // 4), (0, shape[2])))
    assert model.weight_source.num_bytes_read == 4 * shape[1] * shape[2] // 4


def test_a_base_model_is_read_into_a_model_with_a_head_that_is_said_to_be_new(folder):
    base = transformers.AutoModel.from_config(make_model("llama").config)
    base.save_pretrained(folder)
    with pytest.warns(UserWarning, match=r"lacks \['lm_head.weight'\], which LlamaForCausalLM"):
        model = load_pretrained(folder)
    assert "lm_head.weight" not in model.weight_source.shapes
    name = "layers.2.mlp.up_proj.weight"
    value = base.get_parameter(name)
    found = model.weight_source.read(f"model.{name}", whole(value.shape))
    assert torch.equal(found, value)


def test_a_model_with_a_head_is_read_into_a_base_model_that_has_no_use_for_it(folder):
    save("llama", folder)
    with pytest.warns(UserWarning, match=r"LlamaModel has no use for \['lm_head.weight'\]"):
        model = load_pretrained(folder, transformers.AutoModel)
    assert_source_equals(model, transformers.AutoModel.from_pretrained(folder))


@pytest.fixture
def converted(monkeypatch):
    """Let llama's files be converted as the test says."""
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    return lambda *transforms: conversion_mapping.register_checkpoint_conversion_mapping(
        "llama", list(transforms)
    )


def test_fused_tensors_are_read_in_part(folder, converted):
    converted(
        loading.WeightConverter(
            ["self_attn.fused.weight"],
            ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            [loading.Chunk(dim=0)],
        ),
    )
    save("llama", folder)
    model = load_pretrained(folder)
    stored = [key for file in model.weight_source.files for key in file.tensors]
    assert "model.layers.0.self_attn.fused.weight" in stored
    assert_source_equals(model, transformers.AutoModelForCausalLM.from_pretrained(folder))


def test_what_cannot_be_converted_slice_by_slice_is_refused(folder, converted):
    converted(
        loading.WeightConverter("mlp.mixed", "mlp.up_proj.weight", [loading.Interleave(dim=0)])
    )
    save("llama", folder)
    with pytest.raises(ModelError, match=r"layers.0.mlp.up_proj.weight .*Interleave"):
        load_pretrained(folder)


def test_weights_of_another_size_than_the_config_says_are_refused(folder):
    save("llama", folder)
    with pytest.raises(ModelError, match=rf"has shape \(40, 16\) .* but \({VOCABULARY}, 16\)"):
        load_pretrained(folder, vocab_size=40)


def test_a_folder_without_weights_is_refused(folder):
    make_model("llama").config.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"found: \['config.json'\]"):
        load_pretrained(folder)
