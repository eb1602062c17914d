"""Gradients of many micro-batches are summed as exactly as fp32 sums them."""

import pytest
import torch

from lightning_hetero.runtime.iteration.config import EngineConfig
from tests.runtime.gradient_runs import gradient_of_an_iteration, gradient_of_rows


@pytest.mark.parametrize("num_microbatches", [64, 256])
def test_gradients_of_bf16_are_summed_in_fp32(num_microbatches: int) -> None:
    exact = gradient_of_rows(num_microbatches, torch.float32)
    summed = gradient_of_rows(num_microbatches, torch.bfloat16)

    def error(gradient: torch.Tensor) -> float:
        return float((gradient - exact).norm() / exact.norm())

    assert error(gradient_of_an_iteration(0, num_microbatches)) <= 1.01 * error(summed) < 2e-3
    rounded = gradient_of_an_iteration(0, num_microbatches, fp32_gradients=False)
    assert error(rounded) > 4 * error(summed), "the option has its price"


def test_the_gradients_of_one_micro_batch_take_no_more_than_weights() -> None:
    config = EngineConfig(num_microbatches=4, compute_dtype=torch.bfloat16)
    assert config.gradient_dtype(1) is torch.bfloat16
    assert config.gradient_dtype(2) is torch.float32
