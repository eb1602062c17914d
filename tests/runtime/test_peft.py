"""Models with adapters, quantized or not, train under unequal plans as in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.runtime.peft_runs import (
    PeftCase,
    train,
    train_and_count,
    train_and_resume,
    train_and_unfreeze,
    train_with_checkpoints,
)
from tests.runtime.runs import pipeline, plan_of, stage

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.*MatMul8bitLt.*", "ignore::DeprecationWarning"),
]

STAGES = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 4)))
BESIDE_A_COPY = plan_of(
    pipeline(stage(2, 0, 3), stage(0, 3, 4), num_microbatches=3),
    pipeline(stage(1, 0, 4), num_microbatches=1),
)

SLOWER = ["int8", "torchao"]


def check(
    pool: ProcessPool, case: PeftCase, run: Callable[..., Any] = train, *arguments: Any
) -> None:
    assert case.plan is not None
    copies = len(case.plan["pipelines"])
    size = case.batch_size * copies
    alone = replace(case, plan=None, world_size=1, batch_size=size, validates=False)
    expected = pool.run(run, 1, alone, *arguments)[0]
    assert len(expected.losses) == case.max_steps
    for found in pool.run(run, case.world_size, case, *arguments):
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
        assert found.trained.keys() == expected.trained.keys()
        for name, weight in expected.trained.items():
            np.testing.assert_allclose(found.trained[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "bert"])
def test_lora(pool: ProcessPool, model: str) -> None:
    check(pool, PeftCase(model=model, plan=STAGES, world_size=2))


@pytest.mark.parametrize(
    "adapters", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=["dora", "saved"]
)
def test_other_adapters(pool: ProcessPool, adapters: dict[str, object]) -> None:
    case = PeftCase(plan=BESIDE_A_COPY, world_size=3, adapters=adapters, max_steps=2)
    check(pool, case)


@pytest.mark.parametrize("quantized", ["nf4", "fp4", "int8", "torchao"])
def test_quantized(pool: ProcessPool, quantized: str) -> None:
    pytest.importorskip("torchao" if quantized == "torchao" else "bitsandbytes")
    check(pool, PeftCase(plan=STAGES, world_size=2, quantized=quantized))


@pytest.mark.parametrize("quantized", ["nf4", "int8", "torchao"])
def test_packed_samples_beside_quantized_weights(pool: ProcessPool, quantized: str) -> None:
    pytest.importorskip("torchao" if quantized == "torchao" else "bitsandbytes")
    case = PeftCase(plan=BESIDE_A_COPY, world_size=3, quantized=quantized, packed=True)
    check(pool, replace(case, max_steps=3))


def test_a_weight_that_is_unfrozen_in_mid_run_gets_owners(pool: ProcessPool) -> None:
    check(pool, PeftCase(plan=BESIDE_A_COPY, world_size=3, batch_size=2), train_and_unfreeze, 2)


@pytest.mark.parametrize("after", [0, 2])
def test_training_a_quantized_weight_is_refused_on_all_ranks(pool: ProcessPool, after: int) -> None:
    """Of torchao's weights, as torch itself refuses gradients of bitsandbytes' integers."""
    pytest.importorskip("torchao")
    case = PeftCase(plan=STAGES, world_size=2, quantized="torchao")
    for message in pool.run(train_and_unfreeze, 2, case, after):
        assert "layers.2.mlp.up_proj.weight is quantized" in message
        assert "train adapters beside it" in message


def test_validating_changes_nothing_for_quantized_weights(pool: ProcessPool) -> None:
    """bitsandbytes repacks 4-bit weights in eval mode, on CPUs that compute in bf16."""
    pytest.importorskip("bitsandbytes")
    check(pool, PeftCase(plan=STAGES, world_size=2, quantized="nf4", validates=True))


def test_only_adapters_are_owned_and_travel(pool: ProcessPool) -> None:
    case = PeftCase(plan=BESIDE_A_COPY, world_size=3, max_steps=2)
    found = pool.run(train_and_count, 3, case)
    adapters = found[0].adapters
    assert sum(item.owned for item in found) == adapters
    # Each of two holders gets every weight once; a message counts at both of its ends.
    assert sum(item.pulled for item in found) <= 1.05 * 4 * adapters
    assert sum(item.pushed for item in found) <= 1.05 * 4 * adapters


@pytest.mark.parametrize(
    "quantized", ["nf4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOWER)]
)
def test_checkpoints_hold_adapters_only_and_resume_on_other_ranks(
    pool: ProcessPool, tmp_path: Path, quantized: str
) -> None:
    pytest.importorskip("torchao" if quantized == "torchao" else "bitsandbytes")
    case = PeftCase(plan=BESIDE_A_COPY, world_size=3, quantized=quantized, batch_size=2)
    whole = pool.run(train, 3, case)[0]
    pool.run(train_with_checkpoints, 3, replace(case, max_steps=2), tmp_path)
    stored = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    adapters = sum(weight.nbytes for weight in whole.trained.values())
    assert adapters <= stored <= 1.05 * adapters + 40_000, "headers are 8 KB at most each"
    resumed = replace(case, plan=STAGES, world_size=2, batch_size=4)
    for found in pool.run(train_with_checkpoints, 2, resumed, tmp_path):
        np.testing.assert_allclose(found.losses, whole.losses[2:], rtol=1e-5)
        for name, weight in whole.trained.items():
            np.testing.assert_allclose(found.trained[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("quantized", ["nf4", "int8"])
def test_whole_checkpoints_resume(pool: ProcessPool, quantized: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    case = PeftCase(plan=STAGES, world_size=2, quantized=quantized)
    whole = pool.run(train, 2, case)[0]
    for losses in pool.run(train_and_resume, 2, case, tmp_path / "half.ckpt"):
        np.testing.assert_allclose(losses, whole.losses[2:], rtol=1e-5)
