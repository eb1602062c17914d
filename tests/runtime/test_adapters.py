"""Models with adapters, quantized or not, train under plans of any degrees as in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.peft_runs import (
    PeftCase,
    PeftOutcome,
    refusal,
    save_adapters,
    train,
    train_and_count,
    train_and_resume,
    train_and_unfreeze,
    train_with_checkpoints,
)
from tests.runtime.runs import assert_same_weights

peft = pytest.importorskip("peft")
load_file = pytest.importorskip("safetensors.numpy").load_file
pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")


pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.*MatMul8bitLt.*", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
slow = pytest.mark.slow

PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "one": (plan_of(pipeline(stage(0, 0, 4))), 1),
    "stages": (plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 4))), 2),
    "beside a copy": (
        plan_of(
            pipeline(stage(2, 0, 3), stage(0, 3, 4), num_microbatches=3),
            pipeline(stage(1, 0, 4), num_microbatches=1),
        ),
        3,
    ),
    "mirrored": (
        plan_of(
            pipeline(stage(1, 0, 2), stage(0, 2, 4), num_microbatches=2),
            pipeline(stage(2, 0, 4), num_microbatches=2),
        ),
        3,
    ),
    "pair": (plan_of(pipeline(stage([1, 0], 0, 4))), 2),
    "unequal": (
        plan_of(pipeline(stage([2, 0], 0, 3), stage(3, 3, 4)), pipeline(stage(1, 0, 4))),
        4,
    ),
    "four": (plan_of(pipeline(stage([3, 0, 2, 1], 0, 4))), 4),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mixtral": ALL[:4],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "bert": ["query", "key", "value", "dense"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
SHARED_HEADS = (
    ("num_attention_heads", 12),
    ("num_key_value_heads", 3),
    ("hidden_size", 24),
)


def case_of(plan: str, model: str = "llama", max_steps: int = 2, **more: Any) -> PeftCase:
    """Return a case of four rows an iteration."""
    found, world_size = PLANS[plan]
    adapters = {"target_modules": TARGETS.get(model, ALL), **more.pop("adapters", {})}
    batch = 4 // len(found["pipelines"])
    sizes = {"plan": found, "world_size": world_size, "batch_size": batch}
    return PeftCase(model=model, adapters=adapters, max_steps=max_steps, **sizes, **more)


def check(pool: ProcessPool, case: PeftCase, alone: PeftCase | None = None) -> None:
    """Compare with one process."""
    expected = pool.run_alone(train, alone or replace(case.on_single_device(), validates=False))
    assert len(set(expected.losses)) == len(expected.losses) == case.max_steps
    for found in pool.run(train, case.world_size, case):
        check_outcome(found, expected)


def check_outcome(found: PeftOutcome, expected: PeftOutcome) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert_same_weights(found.trained, expected.trained, least=1e-3)


MODELS = ["llama", "qwen3", "gpt2", "mixtral", "phi3", "gemma3_text", "bert", "gpt_neox"]
OTHERS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "biases": {"lora_bias": True, "lora_alpha": 3},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "both ends": {"target_modules": [*ALL, "lm_head", "embed_tokens"]},
    "ranks": {"use_rslora": True, "rank_pattern": {"o_proj": 2}},
}
SCALED = {
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "phi3": (["qkv_proj", "down_proj"], ["down_proj"]),
    "llama": ([*ALL[1:5], "down_proj"], ["down_proj", "gate_proj"]),
}
"""What IA3 scales, and of which of them the inputs."""
DORA = {"adapters": {"use_dora": True}}
FIRST = {"adapters": {"layers_to_transform": [0]}}
"""Then nothing trains on the last stage, where the loss is measured."""
TOKENS = {
    "adapters": {"target_modules": ["embed_tokens"], "token_indices": [3, 5, 7]},
    "method": "TrainableTokensConfig",
}
CUT = (("sequence_parallel", True),)
NIGHTLY: list[tuple[str, str, dict[str, Any]]] = [
    *((plan, model, {}) for plan in ("stages", "pair", "unequal") for model in MODELS),
    *(
        (plan, "llama", {"adapters": OTHERS[name]})
        for plan in ("pair", "unequal")
        for name in OTHERS
    ),
    *(
        (
            "unequal",
            model,
            {
                "adapters": {"target_modules": names, "feedforward_modules": inputs},
                "method": "IA3Config",
            },
        )
        for model, (names, inputs) in SCALED.items()
    ),
    ("pair", "phi3", DORA),
    ("stages", "mixtral", {"max_steps": 4}),
    ("beside a copy", "llama", {"adapters": OTHERS["dora"]}),
    ("beside a copy", "llama", TOKENS),
    ("unequal", "llama", {**FIRST, "options": CUT}),
    ("pair", "gpt2", DORA),  # Layers with biases and gathered outputs.
    *(
        ("four", "llama", {"adapters": {"use_dora": use_dora}, "config": SHARED_HEADS})
        for use_dora in (False, True)
    ),
]
DAILY: list[tuple[str, str, dict[str, Any]]] = [
    ("stages", "gpt2", {"max_steps": 4}),
    ("stages", "llama", FIRST),
    ("pair", "phi3", {}),
    ("beside a copy", "llama", {"adapters": OTHERS["saved"]}),
    ("pair", "llama", {**DORA, "options": CUT}),
    ("unequal", "llama", {"more_adapters": 1}),
]


@pytest.mark.parametrize(
    ("plan", "model", "more"), [*DAILY, *(pytest.param(*case, marks=slow) for case in NIGHTLY)]
)
def test_adapters_train_as_in_one_process(
    pool: ProcessPool, plan: str, model: str, more: dict[str, Any]
) -> None:
    check(pool, case_of(plan, model, **more))


@slow
@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_is_that_of_one_rank(pool: ProcessPool, *, use_dora: bool) -> None:
    dropping = {"lora_dropout": 0.5, "use_dora": use_dora}
    check(pool, case_of("pair", adapters=dropping), case_of("one", adapters=dropping))


def test_degrees_change_between_steps(pool: ProcessPool) -> None:
    plans = (PLANS["stages"][0], PLANS["pair"][0])
    check(pool, case_of("pair", config=SHARED_HEADS, max_steps=3, plans=plans))


def test_only_adapters_are_owned_and_travel(pool: ProcessPool) -> None:
    found = pool.run(train_and_count, 3, case_of("beside a copy"))
    owned, pulled, pushed, (adapters, *_) = zip(*found, strict=True)
    assert sum(owned) == adapters
    # Each of two holders gets every weight once; a message counts at both of its ends.
    assert sum(pulled) <= 1.05 * 4 * adapters
    assert sum(pushed) <= 1.05 * 4 * adapters


def test_saved_adapters_are_those_of_one_process(pool: ProcessPool, tmp_path: Path) -> None:
    case = case_of("unequal")
    alone = case.on_single_device()
    pool.run(save_adapters, 4, case, tmp_path / "many")
    pool.run(save_adapters, 1, alone, tmp_path / "one")
    many, one = (load_file(tmp_path / i / "adapter_model.safetensors") for i in ("many", "one"))
    assert many.keys() == one.keys()
    for name, weight in one.items():
        np.testing.assert_allclose(many[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "adapters", "named"),
    [
        ("PrefixTuningConfig", {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}, "PREFIX"),
        ("LoHaConfig", {"target_modules": ALL}, "loha"),
        ("VeraConfig", {"target_modules": ["q_proj"]}, "vera"),
        (
            "LoraConfig",
            {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM", "target_modules": ALL},
            "ALora",
        ),
        ("LoraConfig", {"target_parameters": ["mlp.experts.gate_up_proj"]}, "ParamWrapper"),
        ("nf4", {}, "is quantized"),
        ("torchao", {}, "is quantized"),
    ],
)
def test_other_adapters_and_quantized_layers_are_refused_by_name_under_degrees(
    pool: ProcessPool, method: str, adapters: dict[str, Any], named: str
) -> None:
    case = case_of("pair", "mixtral" if "target_parameters" in adapters else "llama")
    if method.endswith("Config"):
        case = replace(case, method=method, adapters=adapters)
    else:
        case = replace(case, quantized=method)
    for message in pool.run(refusal, 2, case):
        assert "ModelError" in message
        assert named in message
        assert "degree 1" in message


@pytest.mark.parametrize("quantized", ["nf4", pytest.param("fp4", marks=slow), "int8", "torchao"])
def test_quantized_layers_train_and_validating_changes_nothing(
    pool: ProcessPool, quantized: str
) -> None:
    """bitsandbytes repacks 4-bit weights in eval mode, on CPUs that compute in bf16."""
    check(pool, case_of("stages", max_steps=4, quantized=quantized, validates=True))


OF_QUERIES = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize("after", [0, 2])
def test_training_a_quantized_weight_is_refused_on_all_ranks(pool: ProcessPool, after: int) -> None:
    """Of torchao's weights, as torch itself refuses gradients of bitsandbytes' integers."""
    case = case_of("stages", quantized="torchao", max_steps=4, adapters=OF_QUERIES)
    for message in pool.run(train_and_unfreeze, 2, case, after):
        assert "layers.2.mlp.up_proj.weight is quantized" in message
        assert "train adapters beside it" in message


@pytest.mark.parametrize("quantized", ["nf4", pytest.param("int8", marks=slow)])
def test_whole_checkpoints_resume(pool: ProcessPool, quantized: str, tmp_path: Path) -> None:
    case = case_of("stages", quantized=quantized, max_steps=4)
    whole = pool.run(train, 2, case)[0]
    for losses in pool.run(train_and_resume, 2, case, tmp_path / "half.ckpt"):
        np.testing.assert_allclose(losses, whole.losses[2:], rtol=1e-5)


WAYS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"adapters": {"use_dora": True}},
    "saved": {"adapters": {"modules_to_save": ["lm_head", "cls"]}},
    "nf4": {"quantized": "nf4"},
    "int8": {"quantized": "int8"},
    "torchao": {"quantized": "torchao"},
}
FAMILIES = ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "bert"]
OFTEN = {("nf4", "llama"), ("dora", "gpt2"), ("int8", "bert"), ("torchao", "mixtral")}


@pytest.mark.parametrize(
    ("way", "model"),
    [
        pytest.param(way, model, marks=[] if (way, model) in OFTEN else [slow])
        for way in WAYS
        for model in FAMILIES
        if way in ("lora", "dora", "saved") or model != "gpt2"  # Which has no linear layers.
    ],
)
def test_packed_samples_a_change_of_plan_and_a_resume_on_other_ranks(
    pool: ProcessPool, tmp_path: Path, way: str, model: str
) -> None:
    """Three ranks train under two plans, and two ranks go on from their checkpoint."""
    how, folder = {"packed": True, **WAYS[way]}, tmp_path
    later = case_of("stages", model, max_steps=5, **how)
    expected = pool.run_alone(train, later.on_single_device())
    changing = (PLANS["mirrored"][0],)
    first = case_of("beside a copy", model, max_steps=3, plans=changing, **how)
    for found in pool.run(train_with_checkpoints, 3, first, folder):
        np.testing.assert_allclose(found.losses, expected.losses[:3], rtol=1e-5)
    stored = [load_file(file) for file in folder.rglob("*.safetensors")]
    numel = sum(rows.size for content in stored for rows in content.values())
    # Two checkpoints, which hold adapters once.
    assert numel == 2 * sum(item.size for item in expected.trained.values())
    for found in pool.run(train_with_checkpoints, 2, later, folder):
        check_outcome(replace(found, losses=expected.losses[:3] + found.losses), expected)
