"""One rank on a CUDA device trains as Lightning's single device does there."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fits import Case, assert_same, fit
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASE = Case(
    plan=plan_of(pipeline(stage(0, 0, 3), num_microbatches=2)),
    model="packed",
    width=64,  # Heads as wide as the packed kernels take them.
    num_rows=24,
    batch_size=6,
    accelerator="cuda",
)


@pytest.mark.parametrize("model", ["gpt", "packed"])
def test_fp32_on_cuda_trains_as_the_single_device(pool: ProcessPool, model: str) -> None:
    case = replace(CASE, model=model)
    expected = pool.run(fit, 1, case.on_single_device())[0]
    assert_same(pool.run(fit, 1, case)[0], expected)


@pytest.mark.parametrize("compiled", [0, 1])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16_on_cuda_stays_near_fp32(pool: ProcessPool, precision: str, compiled: int) -> None:
    expected = pool.run(fit, 1, CASE.on_single_device())[0]
    case = replace(CASE, precision=precision, options={"compile_layers": bool(compiled)})
    outcome = pool.run(fit, 1, case, timeout_s=280.0)[0]
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-2)


def test_bf16_on_cuda_trains_as_the_single_device_in_bf16(pool: ProcessPool) -> None:
    expected = pool.run(fit, 1, replace(CASE.on_single_device(), precision="bf16-true"))[0]
    outcome = pool.run(fit, 1, replace(CASE, precision="bf16-true"))[0]
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-2)


def test_what_is_computed_again_drops_the_same_on_cuda(pool: ProcessPool) -> None:
    case = replace(CASE, model="masking")
    expected = pool.run(fit, 1, case)[0]
    options = {"activation_checkpointing": "full"}
    outcome = pool.run(fit, 1, replace(case, options=options))[0]
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-6)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(outcome.weights[name], weight, rtol=1e-5, atol=1e-7)
