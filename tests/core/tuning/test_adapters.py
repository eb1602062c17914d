"""Sizes of models that are trained by adapters, against models that PEFT builds."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.tuning.adapters import load_model
from lightning_hetero.core.tuning.fine_tuning import QUANTIZATIONS, FineTuning

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
SIZE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 80}
SIZES = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 96},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16},
    "gpt2": {},
}
CASES = [
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("llama", {"target_modules": r".*\.(up_proj|down_proj)", "use_dora": True}),
    ("qwen3", {"target_modules": ["k_proj", "o_proj", "gate_proj"]}),
    ("gpt2", {"target_modules": ["c_proj"], "fan_in_fan_out": True}),
]
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


def write_adapter(folder, base, model, *, with_weights, **settings):
    peft = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    peft.peft_config["default"].base_model_name_or_path = str(base)
    if with_weights:
        peft = peft.to_empty(device="cpu")
        peft.save_pretrained(folder, save_embedding_layers=False)
    else:
        peft.peft_config["default"].save_pretrained(folder)
    return sum(p.numel() for p in peft.parameters() if p.requires_grad)


@pytest.mark.parametrize("with_weights", [True, False], ids=["weights", "config"])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_what_trains_is_what_peft_trains(base, tmp_path, family, settings, with_weights):
    folder, model = base(family)
    count = write_adapter(tmp_path / "lora", folder, model, with_weights=with_weights, **settings)
    found = load_model(tmp_path / "lora")
    assert found.num_params == count
    assert found.num_frozen_params == ModelSpec.load(folder).num_params - (found.tuning.head_params)


def test_a_quantized_folder_stores_layers_in_its_bits_and_trains_adapters(base):
    folder, model = base(quantization_config=FOUR_BITS)
    found, plain = load_model(folder), ModelSpec.load("llama-7b")
    matrices = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    norms = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 1)
    layer, embedding, head = found.frozen_bytes(2)
    assert layer == matrices * 4.5 / 8 + 2 * norms
    assert embedding == 2 * model.model.embed_tokens.weight.numel()
    assert head == 2 * (model.lm_head.weight.numel() + model.model.norm.weight.numel())
    assert found.num_params == load_model(folder, lora_rank=16).num_params > 0
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
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    ],
)
def test_bits_of_known_quantizations(base, config, bits):
    folder, _ = base(quantization_config=config)
    assert ModelSpec.load(folder).tuning.stored_bits == bits


def test_what_cannot_be_planned_is_refused_with_the_remedy(base, tmp_path):
    folder, model = base()
    other = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=48, vocab_size=80)
    other.save_pretrained(tmp_path / "other")
    settings = {"with_weights": True, "target_modules": "all-linear"}
    write_adapter(tmp_path / "lora", tmp_path / "other", model, **settings)
    with pytest.raises(ModelError, match=r"another base model. Name that in its adapter_config"):
        load_model(tmp_path / "lora")
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    del config["base_model_name_or_path"]
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="names no base_model_name_or_path"):
        load_model(tmp_path / "lora")
    with pytest.raises(ModelError, match="it must be 1 or more"):
        load_model(folder, lora_rank=0)
    folder, _ = base(quantization_config={"quant_method": "hqq"})
    with pytest.raises(ModelError, match="bytes aren't known"):
        load_model(folder)


def test_frozen_weights_cost_no_gradients_of_weights():
    model = load_model("llama-7b", lora_rank=16)
    plain, lengths = ModelSpec.load("llama-7b"), (2048,)
    share, of_head = model.weight_gradient_shares
    assert (0 < share < 0.01, of_head) == (True, 0)
    assert model.step_flops(lengths) == pytest.approx(2 / 3 * plain.step_flops(lengths), rel=0.03)
    whole = replace(plain, tuning=FineTuning(layer_params=plain.params_per_layer))
    assert whole.weight_gradient_shares == (1, 0)
