"""In fp16 all ranks scale losses and skip steps as one process of plain Lightning does."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.strategy.precision import HeteroPrecision
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.strategy.test_precision import Mixer
from tests.toy import quiet

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
    """A layer whose gradients overflow at some steps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.is_due = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return Overflow.apply(x) if self.is_due else x  # type: ignore[no-any-return]


class Scaled(Mixer):
    """Notes the scale after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Overflows(layer) for layer in self.layers)
        self.scales: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layers[2].is_due = self.trainer.fit_loop.total_batch_idx in OVERFLOWS

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        plugin = self.trainer.precision_plugin
        self.scales.append(plugin.state_dict().get("scale", 1.0))


def fit_scaled(
    rank: int,
    plan: dict[str, Any] | None,
    options: dict[str, Any],
    resumed: Path | None = None,
    saved: Path | None = None,
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Return losses, scales, and weights; plain Lightning without a plan."""
    L.seed_everything(0, verbose=False)
    module = Scaled()
    data = TensorDataset(torch.randn(96, 8), torch.rand(96), torch.randint(5, (96,)))
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    strategy: dict[str, Any] = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    batch_size = 8
    if plan is not None:
        parsed = ParallelPlan.from_dict(plan)
        batch_size //= parsed.num_pipelines
        strategy = {
            "plugins": HeteroPrecision("16-mixed", scaler),
            "strategy": HeteroStrategy(parsed, num_microbatches=2, whole_after_run=True),
            "devices": len(parsed.ranks),
        }
    trainer = L.Trainer(**quiet(**{"max_steps": NUM_STEPS, **options}), **strategy)
    trainer.fit(module, DataLoader(data, batch_size=batch_size), ckpt_path=resumed)
    if saved is not None:
        trainer.save_checkpoint(saved)
    weights = {name: value.float().numpy() for name, value in module.state_dict().items()}
    return module.losses, module.scales, weights


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (STAGES, {"accumulate_grad_batches": 2, "max_steps": NUM_STEPS // 2}),
        (COPIES, {"gradient_clip_val": 0.5}),
    ],
    ids=["stages", "copies"],
)
def test_scales_and_skips_are_those_of_one_process(
    pool: ProcessPool, plan: dict[str, Any], options: dict[str, Any]
) -> None:
    losses, scales, weights = pool.run(fit_scaled, 1, None, options)[0]
    assert min(scales) < 2.0**10, "nothing was skipped"
    if "gradient_clip_val" in options:
        assert any(after > before for before, after in pairwise(scales))
    world_size = len(ParallelPlan.from_dict(plan).ranks)
    for found, found_scales, found_weights in pool.run(fit_scaled, world_size, plan, options):
        assert found_scales == scales
        np.testing.assert_allclose(found, losses, rtol=2e-3)
        for name, weight in weights.items():
            np.testing.assert_allclose(found_weights[name], weight, atol=2e-3)


def test_a_resumed_run_keeps_the_scale_under_another_plan(
    pool: ProcessPool, tmp_path: Path
) -> None:
    _, scales, _ = pool.run(fit_scaled, 1, None, {})[0]
    file = tmp_path / "half.ckpt"
    (_, first, _), _ = pool.run(fit_scaled, 2, STAGES, {"max_steps": 6}, None, file)
    for _, later, _ in pool.run(fit_scaled, 3, COPIES, {}, file):
        assert first + later == scales


def test_sums_in_fp16_are_refused() -> None:
    plugin = HeteroPrecision("16-mixed")
    strategy = HeteroStrategy(num_stages=1, exchange="reduce-scatter")
    trainer = L.Trainer(**quiet(max_steps=1), plugins=plugin, strategy=strategy, devices=1)
    data = TensorDataset(torch.randn(8, 8), torch.rand(8), torch.randint(5, (8,)))
    with pytest.raises(ConfigurationError, match="sums gradients in fp16"):
        trainer.fit(Mixer(), DataLoader(data, batch_size=8))
