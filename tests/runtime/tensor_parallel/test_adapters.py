"""Adapters of tensor-parallel layers train as they do in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.runtime.peft_runs import (
    PeftCase,
    refusal,
    save_adapters,
    train,
    train_and_change,
    train_with_checkpoints,
)
from tests.runtime.runs import pipeline, plan_of, stage

pytest.importorskip("peft")

from safetensors.numpy import load_file

pytestmark = pytest.mark.dist

PAIR = plan_of(pipeline(stage([1, 0], 0, 4)))
UNEQUAL = plan_of(pipeline(stage([2, 0], 0, 3), stage(3, 3, 4)), pipeline(stage(1, 0, 4)))
FOUR = plan_of(pipeline(stage([3, 0, 2, 1], 0, 4)))
PLANS = {"pair": (PAIR, 2), "unequal": (UNEQUAL, 4), "four": (FOUR, 4)}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHARED = (("num_attention_heads", 12), ("num_key_value_heads", 3), ("hidden_size", 24))
ALORA = {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mixtral": ALL[:4],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "bert": ["query", "key", "value", "dense"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
MORE = ["gemma3_text", "bert", "gpt_neox"]


def case_of(plan: str, model: str = "llama", **adapters: Any) -> PeftCase:
    found, world_size = PLANS[plan]
    chosen = {"target_modules": TARGETS.get(model, ALL), **adapters}
    batch = 4 // len(found["pipelines"])
    sizes = {"plan": found, "world_size": world_size, "batch_size": batch}
    return PeftCase(model=model, adapters=chosen, max_steps=2, **sizes)


def check(pool: ProcessPool, case: PeftCase, alone: PeftCase | None = None) -> None:
    alone = alone or replace(case, plan=None, world_size=1, batch_size=4, strategy={})
    expected = pool.run(train, alone.world_size, alone)[0]
    assert len(set(expected.losses)) == len(expected.losses) == case.max_steps
    for found in pool.run(train, case.world_size, case):
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
        assert found.trained.keys() == expected.trained.keys()
        for name, weight in expected.trained.items():
            scale = max(np.abs(weight).max(), 1e-3)
            assert np.abs(found.trained[name] - weight).max() <= 1e-5 * scale, name


@pytest.mark.parametrize("model", [*("llama", "qwen3", "gpt2", "mixtral", "phi3"), *MORE])
@pytest.mark.parametrize("plan", ["pair", "unequal"])
def test_lora(pool: ProcessPool, model: str, plan: str) -> None:
    check(pool, case_of(plan, model))


@pytest.mark.parametrize(
    "adapters",
    [
        {"use_dora": True},
        {"lora_bias": True, "lora_alpha": 3},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": [*ALL, "lm_head", "embed_tokens"]},
        {"use_rslora": True, "rank_pattern": {"o_proj": 2}},
    ],
    ids=["dora", "biases", "saved", "both ends", "ranks"],
)
@pytest.mark.parametrize("plan", ["pair", "unequal"])
@pytest.mark.slow
def test_other_lora(pool: ProcessPool, adapters: dict[str, Any], plan: str) -> None:
    check(pool, case_of(plan, **adapters))


@pytest.mark.parametrize("model", ["gpt2", "phi3"])
def test_dora_of_layers_with_biases_and_gathered_outputs(pool: ProcessPool, model: str) -> None:
    check(pool, case_of("pair", model, use_dora=True))


@pytest.mark.parametrize("model", ["llama", "gpt2", "phi3"])
def test_ia3(pool: ProcessPool, model: str) -> None:
    names = {"gpt2": ["c_attn", "mlp.c_proj"], "phi3": ["qkv_proj", "down_proj"]}
    targets = names.get(model, ["k_proj", "v_proj", "o_proj", "down_proj", "gate_proj"])
    inputs = {"gpt2": ["mlp.c_proj"]}.get(
        model, ["down_proj", *(["gate_proj"] * (model == "llama"))]
    )
    case = case_of("unequal", model, target_modules=targets, feedforward_modules=inputs)
    check(pool, replace(case, method="IA3Config"))


def test_several_adapters_at_once(pool: ProcessPool) -> None:
    check(pool, replace(case_of("unequal"), more_adapters=1))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.slow
def test_dropout_drops_the_same_features_under_any_degree(
    pool: ProcessPool, *, use_dora: bool
) -> None:
    case = case_of("pair", lora_dropout=0.5, use_dora=use_dora)
    check(pool, case, replace(case, plan=plan_of(pipeline(stage(0, 0, 4))), world_size=1))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.slow
def test_key_heads_that_ranks_share(pool: ProcessPool, *, use_dora: bool) -> None:
    check(pool, replace(case_of("four", use_dora=use_dora), config=SHARED))


@pytest.mark.parametrize("adapters", [{}, {"use_dora": True}])
@pytest.mark.slow
def test_sequence_parallelism(pool: ProcessPool, adapters: dict[str, Any]) -> None:
    check(pool, replace(case_of("pair", **adapters), strategy={"sequence_parallel": True}))


def test_saved_adapters_are_those_of_one_process(pool: ProcessPool, tmp_path: Path) -> None:
    case = case_of("unequal")
    alone = replace(case, plan=None, world_size=1, batch_size=4)
    pool.run(save_adapters, 4, case, tmp_path / "many")
    pool.run(save_adapters, 1, alone, tmp_path / "one")
    many, one = (load_file(tmp_path / i / "adapter_model.safetensors") for i in ("many", "one"))
    assert many.keys() == one.keys()
    for name, weight in one.items():
        np.testing.assert_allclose(many[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_checkpoint_of_one_degree_goes_on_under_others(pool: ProcessPool, tmp_path: Path) -> None:
    first = replace(case_of("four", "llama"), config=SHARED, max_steps=4)
    whole = pool.run(train, 4, first)[0]
    pool.run(train_with_checkpoints, 4, replace(first, max_steps=2), tmp_path)
    stored = [load_file(file) for file in tmp_path.rglob("*.safetensors")]
    # Every row once, however many ranks hold it.
    numel = sum(rows.size for content in stored for rows in content.values())
    assert numel == sum(item.size for item in whole.trained.values())
    later = replace(case_of("unequal"), config=SHARED, max_steps=4)
    for found in pool.run(train_with_checkpoints, 4, later, tmp_path):
        np.testing.assert_allclose(found.losses, whole.losses[2:], rtol=1e-5)


def test_degrees_change_between_steps(pool: ProcessPool) -> None:
    case = replace(case_of("pair"), config=SHARED, max_steps=3)
    expected = pool.run(train, 2, case)[0]
    other = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 4)))
    for found in pool.run(train_and_change, 2, case, {1: other, 2: PAIR}):
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "adapters", "named"),
    [
        ("PrefixTuningConfig", {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}, "PREFIX"),
        ("LoHaConfig", {"target_modules": ALL}, "loha"),
        ("VeraConfig", {"target_modules": ["q_proj"]}, "vera"),
        ("LoraConfig", {**ALORA, "target_modules": ALL}, "ALora"),
        ("LoraConfig", {"target_parameters": ["mlp.experts.gate_up_proj"]}, "ParamWrapper"),
    ],
)
def test_other_adapters_are_refused_by_name(
    pool: ProcessPool, method: str, adapters: dict[str, Any], named: str
) -> None:
    model = "mixtral" if "target_parameters" in adapters else "llama"
    case = replace(case_of("pair", model), method=method, adapters=adapters)
    for message in pool.run(refusal, 2, case):
        assert "ModelError" in message
        assert named in message
        assert "degree 1" in message


@pytest.mark.parametrize("quantized", ["nf4", "torchao"])
def test_quantized_layers_are_refused(pool: ProcessPool, quantized: str) -> None:
    pytest.importorskip("torchao" if quantized == "torchao" else "bitsandbytes")
    for message in pool.run(refusal, 2, replace(case_of("pair"), quantized=quantized)):
        assert "is quantized" in message
        assert "degree 1" in message
