"""Sizes of models that are trained by adapters, against models that PEFT builds."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.model_config import QUANTIZATIONS, FineTuning
from lightning_hetero.core.model_spec import ModelSpec

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
SIZE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 80}
SIZES = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 96},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16},
}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture
def base(tmp_path):
    """Write a model's folder, and return it with the model."""

    def write(family="llama", **more):
        sizes = SIZE | SIZES[family]
        config = AutoConfig.for_model(family, **sizes)
        config.save_pretrained(tmp_path / "base")
        path = tmp_path / "base" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
        with torch.device("meta"):
            return tmp_path / "base", AutoModelForCausalLM.from_config(config)

    return write


@pytest.mark.parametrize("family", SIZES)
def test_what_trains_is_what_peft_trains(base, family):
    folder, model = base(family)
    settings = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
    peft = get_peft_model(model, settings)
    plain = ModelSpec.load(folder)
    found = plain.tuned(lora_rank=4)
    assert found.num_params == sum(p.numel() for p in peft.parameters() if p.requires_grad)
    assert found.num_frozen_params == plain.num_params


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_the_folder_of_an_adapter_trains_what_peft_trains(base, tmp_path, settings):
    folder, model = base(quantization_config=FOUR_BITS)
    peft = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    peft.peft_config["default"].base_model_name_or_path = str(folder)
    peft.peft_config["default"].save_pretrained(tmp_path / "lora")
    found = ModelSpec.load(tmp_path / "lora")
    assert found.num_params == sum(p.numel() for p in peft.parameters() if p.requires_grad)
    assert found.tuned() == found
    assert (found.tuning.stored_bits, found.tuning.method) == (4.5, "NF4 LoRA r 4")
    other = found.tuned(quantize="int8")
    assert (other.num_params, other.tuning.method) == (found.num_params, "INT8 LoRA r 4")
    assert found.tuned(lora_rank=8).tuning.method == "NF4 LoRA r 8"


def test_a_quantized_folder_stores_layers_in_its_bits_and_trains_adapters(base):
    folder, model = base(quantization_config=FOUR_BITS)
    found, plain = ModelSpec.load(folder).tuned(), ModelSpec.load("llama-7b")
    matrices = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    norms = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 1)
    layer, embedding, head = found.frozen_bytes(2)
    assert layer == matrices * 4.5 / 8 + 2 * norms
    assert embedding == 2 * model.model.embed_tokens.weight.numel()
    assert head == 2 * (model.lm_head.weight.numel() + model.model.norm.weight.numel())
    assert found.num_params == ModelSpec.load(folder).tuned(lora_rank=16).num_params > 0
    assert plain.frozen_bytes(2) == (0, 0, 0)


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        (FOUR_BITS, QUANTIZATIONS["nf4"]),
        (FOUR_BITS | {"bnb_4bit_use_double_quant": True}, QUANTIZATIONS["nf4-double"]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, 8),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
            },
            8,
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}
                },
            },
            4 + 32 / 32,
        ),
        *(
            ({"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}}, 8)
            for kind in ("Float8WeightOnlyConfig", "IntxWeightOnlyConfig")
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    ],
)
def test_bits_of_known_quantizations(base, config, bits):
    folder, _ = base(quantization_config=config)
    assert ModelSpec.load(folder).tuning.stored_bits == bits


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "hqq"},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "gptq", "bits": True, "group_size": 128},
        ["nf4"],
    ],
)
def test_what_cannot_be_planned_is_refused(base, config):
    folder, _ = base(quantization_config=config)
    with pytest.raises(ModelError, match="bytes aren't known"):
        ModelSpec.load(folder)


def test_frozen_weights_cost_no_gradients_of_weights():
    model = ModelSpec.load("llama-7b").tuned(lora_rank=16)
    plain, lengths = ModelSpec.load("llama-7b"), (2048,)
    share, of_head = model.weight_gradient_shares
    assert (0 < share < 0.01, of_head) == (True, 0)
    assert model.step_flops(lengths) == pytest.approx(2 / 3 * plain.step_flops(lengths), rel=0.03)
    whole = replace(plain, tuning=FineTuning(layer_params=plain.params_per_layer))
    assert whole.weight_gradient_shares == (1, 0)
