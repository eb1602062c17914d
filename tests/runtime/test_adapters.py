"""Models with adapters, quantized or not, train under plans of any degrees as in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from tests.runtime.runs import pipeline, plan_of, stage

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


def check(
    pool: ProcessPool, case: PeftCase, alone: PeftCase | None = None, after: int | None = None
) -> None:
    """Compare with one process; `after` so many steps a weight of the base is unfrozen."""
    run, arguments = (train, ()) if after is None else (train_and_unfreeze, (after,))
    alone = alone or replace(case.on_single_device(), validates=False)
    expected = pool.run_alone(run, alone, *arguments)
    assert len(set(expected.losses)) == len(expected.losses) == case.max_steps
    for found in pool.run(run, case.world_size, case, *arguments):
        check_outcome(found, expected)


def check_outcome(found: PeftOutcome, expected: PeftOutcome) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert found.trained.keys() == expected.trained.keys()
    for name, weight in expected.trained.items():
        scale = max(np.abs(weight).max(), 1e-3)
        assert np.abs(found.trained[name] - weight).max() <= 1e-5 * scale, name


MODELS = ["llama", "qwen3", "gpt2", "mixtral", "phi3", "gemma3_text", "bert", "gpt_neox"]
OFTEN = {("stages", "gpt2"), ("stages", "mixtral"), ("pair", "phi3"), ("unequal", "llama")}
"""Of the fast suite."""


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        pytest.param(plan, model, marks=[] if (plan, model) in OFTEN else [slow])
        for plan in ("stages", "pair", "unequal")
        for model in MODELS
    ],
)
def test_lora(pool: ProcessPool, plan: str, model: str) -> None:
    is_long = plan == "stages" and model not in ("phi3", "gpt_neox")
    check(pool, case_of(plan, model, 4 if is_long else 2))


OTHERS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "biases": {"lora_bias": True, "lora_alpha": 3},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "both ends": {"target_modules": [*ALL, "lm_head", "embed_tokens"]},
    "ranks": {"use_rslora": True, "rank_pattern": {"o_proj": 2}},
}


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("beside a copy", "dora"),
        ("beside a copy", "saved"),
        *(pytest.param(plan, name, marks=slow) for plan in ("pair", "unequal") for name in OTHERS),
    ],
)
def test_other_lora(pool: ProcessPool, plan: str, name: str) -> None:
    check(pool, case_of(plan, adapters=OTHERS[name]))


@pytest.mark.parametrize("model", ["gpt2", pytest.param("phi3", marks=slow)])
def test_dora_of_layers_with_biases_and_gathered_outputs(pool: ProcessPool, model: str) -> None:
    check(pool, case_of("pair", model, adapters={"use_dora": True}))


@pytest.mark.parametrize(
    "model", ["phi3", pytest.param("llama", marks=slow), pytest.param("gpt2", marks=slow)]
)
def test_ia3(pool: ProcessPool, model: str) -> None:
    names, inputs = {
        "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
        "phi3": (["qkv_proj", "down_proj"], ["down_proj"]),
        "llama": ([*ALL[1:5], "down_proj"], ["down_proj", "gate_proj"]),
    }[model]
    adapters = {"target_modules": names, "feedforward_modules": inputs}
    check(pool, case_of("unequal", model, adapters=adapters, method="IA3Config"))


def test_several_adapters_at_once(pool: ProcessPool) -> None:
    check(pool, case_of("unequal", more_adapters=1))


@slow
@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_shared_key_heads_and_sequence_parallelism_change_nothing(
    pool: ProcessPool, *, use_dora: bool
) -> None:
    dropping = {"lora_dropout": 0.5, "use_dora": use_dora}
    check(pool, case_of("pair", adapters=dropping), case_of("one", adapters=dropping))
    check(pool, case_of("four", adapters={"use_dora": use_dora}, config=SHARED_HEADS))
    cut = (("sequence_parallel", True),)
    check(pool, case_of("pair", adapters={"use_dora": use_dora}, options=cut))


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
    ("first", "later", "more"),
    [
        ("beside a copy", "stages", {"quantized": "nf4"}),
        pytest.param("beside a copy", "stages", {"quantized": "int8"}, marks=slow),
        pytest.param("beside a copy", "stages", {"quantized": "torchao"}, marks=slow),
        pytest.param("four", "unequal", {"config": SHARED_HEADS}, marks=slow),
    ],
)
def test_checkpoints_hold_adapters_once_and_resume_under_other_degrees(
    pool: ProcessPool, tmp_path: Path, first: str, later: str, more: dict[str, Any]
) -> None:
    case = case_of(first, max_steps=4, **more)
    whole = pool.run(train, case.world_size, case)[0]
    pool.run(train_with_checkpoints, case.world_size, replace(case, max_steps=2), tmp_path)
    stored = [load_file(file) for file in tmp_path.rglob("*.safetensors")]
    numel = sum(rows.size for content in stored for rows in content.values())
    assert numel == sum(item.size for item in whole.trained.values())
    resumed = case_of(later, max_steps=4, **more)
    for found in pool.run(train_with_checkpoints, resumed.world_size, resumed, tmp_path):
        np.testing.assert_allclose(found.losses, whole.losses[2:], rtol=1e-5)
        for name, weight in whole.trained.items():
            np.testing.assert_allclose(found.trained[name], weight, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("quantized", ["nf4", "fp4", "int8", "torchao"])
def test_quantized_layers_train_and_validating_changes_nothing(
    pool: ProcessPool, quantized: str
) -> None:
    """bitsandbytes repacks 4-bit weights in eval mode, on CPUs that compute in bf16."""
    check(pool, case_of("stages", max_steps=4, quantized=quantized, validates=True))


@pytest.mark.parametrize("quantized", ["nf4", "int8", "torchao"])
def test_packed_samples_beside_quantized_weights(pool: ProcessPool, quantized: str) -> None:
    check(pool, case_of("beside a copy", quantized=quantized, packed=True))


OF_QUERIES = {"target_modules": ["q_proj"]}


def test_a_weight_that_is_unfrozen_in_mid_run_gets_owners(pool: ProcessPool) -> None:
    check(pool, case_of("beside a copy", max_steps=4, adapters=OF_QUERIES), after=2)


@pytest.mark.parametrize("after", [0, 2])
def test_training_a_quantized_weight_is_refused_on_all_ranks(pool: ProcessPool, after: int) -> None:
    """Of torchao's weights, as torch itself refuses gradients of bitsandbytes' integers."""
    case = case_of("stages", quantized="torchao", max_steps=4, adapters=OF_QUERIES)
    for message in pool.run(train_and_unfreeze, 2, case, after):
        assert "layers.2.mlp.up_proj.weight is quantized" in message
        assert "train adapters beside it" in message


@pytest.mark.parametrize("quantized", ["nf4", "int8"])
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
DAILY = {("dora", "gpt2"), ("saved", "qwen3"), ("int8", "bert"), ("torchao", "mixtral")}


@pytest.mark.parametrize(
    ("way", "model"),
    [
        pytest.param(way, model, marks=[] if (way, model) in DAILY else [slow])
        for way in WAYS
        for model in FAMILIES
        if way in ("lora", "dora", "saved") or model != "gpt2"  # Which has no linear layers.
    ],
)
def test_packed_samples_a_change_of_plan_and_a_resume_on_other_ranks(
    pool: ProcessPool, tmp_path: Path, way: str, model: str
) -> None:
    check_packed_changed_and_resumed(pool, tmp_path, model, WAYS[way])


def check_packed_changed_and_resumed(
    pool: ProcessPool, folder: Path, model: str, way: dict[str, Any]
) -> None:
    """Three ranks train under two plans, and two ranks go on from their checkpoint in a folder."""
    later = case_of("stages", model, max_steps=5, packed=True, **way)
    expected = pool.run_alone(train, later.on_single_device())
    changing = (PLANS["mirrored"][0],)
    first = case_of("beside a copy", model, max_steps=3, packed=True, plans=changing, **way)
    for found in pool.run(train_with_checkpoints, 3, first, folder):
        np.testing.assert_allclose(found.losses, expected.losses[:3], rtol=1e-5)
    for found in pool.run(train_with_checkpoints, 2, later, folder):
        check_outcome(replace(found, losses=expected.losses[:3] + found.losses), expected)
