"""In fp16 all ranks scale losses and skip steps as one process of plain Lightning does."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.strategy.precision import HeteroPrecision
from tests.fits import Case, Outcome, outcome_of, train
from tests.plans import Plan, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.strategy.test_precision import Mixer

pytestmark = pytest.mark.dist

STAGES = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 4)))
COPIES = plan_of(pipeline(stage(2, 0, 3), stage(0, 3, 4)), pipeline(stage(1, 0, 4)))
OVERFLOWS = (1, 2, 7)
NUM_STEPS = 10


class Overflow(torch.autograd.Function):
    """Passes a tensor on, and makes its gradient infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


class Overflows(nn.Module):
    """A layer whose gradients overflow for some micro-batches."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.is_due = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return Overflow.apply(x) if self.is_due else x  # type: ignore[no-any-return]


class Scaled(Mixer):
    """Notes the scale after each step; in some of them micro-batches with certain rows overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Overflows(layer) for layer in self.layers)
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        is_due = self.trainer.fit_loop.total_batch_idx in OVERFLOWS
        self.layers[2].is_due = is_due and bool((batch[0][:, 2] > 1).any())
        return super().training_step(batch)

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        plugin = self.trainer.precision_plugin
        self.seen.append(plugin.state_dict().get("scale", 1.0))


def fit_scaled(rank: int, case: Case, saved: Path | None = None) -> Outcome:
    """Train; the outcome has seen the scales."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    plugin: Any = MixedPrecision("16-mixed", "cpu", scaler)
    if case.plan is not None:
        plugin = HeteroPrecision("16-mixed", scaler)
    module = train(replace(case, trainer={"plugins": plugin}))
    if saved is not None:
        module.trainer.save_checkpoint(saved)
    return outcome_of(module)


def case_of(plan: Plan | None, **more: Any) -> Case:
    size = 8 if plan is None else 8 // len(plan["pipelines"])
    given = {"max_steps": NUM_STEPS, "max_epochs": -1, "num_microbatches": 2, **more}
    return Case(model=Scaled, plan=plan, batch_size=size, **given)


@pytest.mark.parametrize(
    "case",
    [
        case_of(STAGES, accumulate=2, max_steps=NUM_STEPS // 2),
        case_of(COPIES, clip_val=0.5),
    ],
    ids=["stages", "copies"],
)
def test_scales_and_skips_are_those_of_one_process(pool: ProcessPool, case: Case) -> None:
    expected = pool.run_alone(fit_scaled, case.on_single_device())
    scales = expected.seen
    assert min(scales) < 2.0**10, "nothing was skipped"
    if case.clip_val is not None:
        assert any(after > before for before, after in pairwise(scales))
    for found in pool.run(fit_scaled, case.size, case):
        assert found.seen == scales
        np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-3)
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(found.weights[name], weight, atol=2e-3)


def test_a_resumed_run_keeps_the_scale_under_another_plan(
    pool: ProcessPool, tmp_path: Path
) -> None:
    scales, file = pool.run_alone(fit_scaled, case_of(None)).seen, tmp_path / "half.ckpt"
    first = pool.run(fit_scaled, 2, case_of(STAGES, max_steps=6), file)[0]
    for later in pool.run(fit_scaled, 3, case_of(COPIES, ckpt_path=file)):
        assert first.seen + later.seen == scales


def test_sums_in_fp16_are_refused() -> None:
    plan = plan_of(pipeline(stage(0, 0, 4)))
    with pytest.raises(ConfigurationError, match="sums gradients in fp16"):
        fit_scaled(0, case_of(plan, options={"exchange": "reduce-scatter"}))
