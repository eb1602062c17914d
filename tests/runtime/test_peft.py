"""Models with adapters, quantized or not, train under unequal plans as in one process."""

from dataclasses import replace

import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.runtime.peft_runs import PeftCase, train
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


def check(pool: ProcessPool, case: PeftCase) -> None:
    assert case.plan is not None
    copies = len(case.plan["pipelines"])
    alone = replace(case, plan=None, world_size=1, batch_size=case.batch_size * copies)
    expected = pool.run(train, 1, alone)[0]
    assert len(expected.losses) == case.max_steps
    for found in pool.run(train, case.world_size, case):
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
