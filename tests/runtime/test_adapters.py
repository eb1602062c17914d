"""Models with adapters, quantized or not, train under plans of any degrees as in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetero.callbacks import LayerwiseCheckpoint
from tests.exchange.message_lists import pulls_of, pushes_of
from tests.fits import (
    TOLERANCE,
    Outcome,
    assert_same,
    check,
    check_refused,
    fit,
    outcome_of,
    train,
)
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import HuggingFaceCase
from tests.runtime.peft_runs import PeftCase

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

PLANS = {
    "one": plan_of(pipeline(stage(0, 0, 4))),
    "stages": plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 4))),
    "beside a copy": plan_of(
        pipeline(stage(2, 0, 3), stage(0, 3, 4), num_microbatches=3),
        pipeline(stage(1, 0, 4), num_microbatches=1),
    ),
    "mirrored": plan_of(
        pipeline(stage(1, 0, 2), stage(0, 2, 4), num_microbatches=2),
        pipeline(stage(2, 0, 4), num_microbatches=2),
    ),
    "pair": plan_of(pipeline(stage([1, 0], 0, 4))),
    "unequal": plan_of(pipeline(stage([2, 0], 0, 3), stage(3, 3, 4)), pipeline(stage(1, 0, 4))),
    "four": plan_of(pipeline(stage([3, 0, 2, 1], 0, 4))),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mixtral": ALL[:4],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "bert": ["query", "key", "value", "dense"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
SHARED_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 24}


def case_of(plan: str, model: str = "llama", max_steps: int = 2, **more: Any) -> PeftCase:
    """Return a case of four rows an iteration."""
    found = PLANS[plan]
    adapters = {"target_modules": TARGETS.get(model, ALL), **more.pop("adapters", {})}
    batch = 4 // len(found["pipelines"])
    given = {"plan": found, "batch_size": batch, "max_steps": max_steps, **more}
    return PeftCase(model=model, adapters=adapters, **given)


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
CUT = {"sequence_parallel": True}
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
    *(("pair", model, DORA) for model in ("phi3", "qwen3", "gemma3_text", "bert")),
    *(("unequal", model, DORA) for model in ("qwen3", "gemma3_text", "bert")),
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
    expected = pool.run_alone(fit, case_of("one", adapters=dropping))
    for found in pool.run(fit, 2, case_of("pair", adapters=dropping)):
        assert_same(found, expected)


def test_degrees_change_between_steps(pool: ProcessPool) -> None:
    plans = (PLANS["stages"], PLANS["pair"])
    check(pool, case_of("pair", config=SHARED_HEADS, max_steps=3, later=plans))


class Count(L.Callback):
    """Counts the elements that a rank owns, sends and receives in an iteration, and all trained."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        table, rank = engine.plans.running.table, trainer.global_rank
        self.counts = (
            sum(item.numel() for item in engine.store.masters.values()),
            sum(item.numel for item in pulls_of(table, rank)),
            sum(item.numel for item in pushes_of(table, rank)),
            sum(s.numel for s in engine.store.specs.values() if s.requires_grad),
        )


def train_and_count(rank: int, case: PeftCase) -> tuple[int, ...]:
    """Train a case on one of its ranks; return what moved."""
    count = Count()
    train(case, count)
    return count.counts


def test_only_adapters_are_owned_and_travel(pool: ProcessPool) -> None:
    found = pool.run(train_and_count, 3, case_of("beside a copy"))
    owned, pulled, pushed, (adapters, *_) = zip(*found, strict=True)
    assert sum(owned) == adapters
    # Each of two holders gets every weight once; a message counts at both of its ends.
    assert sum(pulled) <= 1.05 * 4 * adapters
    assert sum(pushed) <= 1.05 * 4 * adapters


def save_adapters(rank: int, case: PeftCase, folder: Path) -> None:
    """Train a case, and write its adapters by `save_pretrained`; PEFT reads them."""
    module = train(case)
    if rank == 0:
        module.model.save_pretrained(folder)
        base = HuggingFaceCase(model=case.model, config=case.config).module().model
        peft.PeftModel.from_pretrained(base, folder)


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
    check_refused(pool, case, "ModelError", named, "degree 1")


@pytest.mark.parametrize(
    "quantized",
    [
        "nf4",
        "int8",
        "torchao",
        *(pytest.param(kind, marks=slow) for kind in ("fp4", "float8", "intx")),
    ],
)
def test_quantized_layers_train_and_validating_changes_nothing(
    pool: ProcessPool, quantized: str
) -> None:
    """bitsandbytes repacks 4-bit weights in eval mode, on CPUs that compute in bf16."""
    how = {"validates": True, "trainer": {"num_sanity_val_steps": 2}}
    check(pool, case_of("stages", max_steps=4, quantized=quantized, **how))


class Unfreeze(L.Callback):
    """Unfreezes a weight of the base model before the first step, or after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.after == 0:
            self._unfreeze(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.after:
            self._unfreeze(pl_module)

    def _unfreeze(self, module: L.LightningModule) -> None:
        for name, weight in module.named_parameters():
            if "layers.2.mlp.up_proj" in name:
                weight.requires_grad_(True)


@pytest.mark.parametrize("after", [0, 2])
def test_training_a_quantized_weight_is_refused_on_all_ranks(pool: ProcessPool, after: int) -> None:
    """Of torchao's weights, as torch itself refuses gradients of bitsandbytes' integers."""
    adapters = {"target_modules": ["q_proj"]}
    how = {"adapters": adapters, "trainer": {"callbacks": [Unfreeze(after)]}}
    case = case_of("stages", quantized="torchao", max_steps=4, **how)
    words = "layers.2.mlp.up_proj.weight is quantized", "train adapters beside it"
    check_refused(pool, case, *words)


def train_and_resume(rank: int, case: PeftCase, file: Path) -> list[float]:
    """Train half of a case, save a whole checkpoint, and train the other half from it."""
    half = replace(case, max_steps=case.max_steps // 2)
    train(half, ModelCheckpoint(file.parent, file.stem, every_n_train_steps=half.max_steps))
    losses: list[float] = train(replace(case, ckpt_path=file)).losses
    return losses


@pytest.mark.parametrize("quantized", ["nf4", pytest.param("int8", marks=slow)])
def test_whole_checkpoints_resume(pool: ProcessPool, quantized: str, tmp_path: Path) -> None:
    case = case_of("stages", quantized=quantized, max_steps=4)
    whole = pool.run(fit, 2, case)[0]
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


def train_with_checkpoints(rank: int, case: PeftCase, folder: Path) -> Outcome:
    """Train a case, going on from the newest layer-wise checkpoint in a folder."""
    saves = LayerwiseCheckpoint(folder, every_n_train_steps=2, shared_memory=False)
    return outcome_of(train(case, saves))


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
    expected = pool.run_alone(fit, later.on_single_device())
    plans = (PLANS["mirrored"],)
    first = case_of("beside a copy", model, max_steps=3, later=plans, **how)
    for found in pool.run(train_with_checkpoints, 3, first, folder):
        np.testing.assert_allclose(found.losses, expected.losses[:3], rtol=1e-5)
    stored = [load_file(file) for file in folder.rglob("*.safetensors")]
    numel = sum(rows.size for content in stored for rows in content.values())
    # Two checkpoints, which hold adapters once.
    assert numel == 2 * sum(item.size for item in expected.weights.values())
    # With BERT's own head, one device's weights differ by 1.8e-5 between two CPUs' kernels.
    rtol = 4e-5 if (way, model) == ("saved", "bert") else TOLERANCE
    for found in pool.run(train_with_checkpoints, 2, later, folder):
        np.testing.assert_allclose(found.losses, expected.losses[3:], TOLERANCE)
        assert_same(replace(found, losses=expected.losses), expected, rtol)
