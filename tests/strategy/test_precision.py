"""Each precision computes as in Lightning, bf16 near fp32 under any plan; the rest is refused."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.strategy.precision import HeteroPrecision
from tests.fits import Case, Outcome, fit, train
from tests.plans import Plan, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import CONFIGS, HuggingFaceCase
from tests.toy import Compared

TOLERANCE = 1e-2
# The plain model in bf16 is 1.6e-2 away from itself in fp32.
TOLERANCES = {"gemma3_text": 2e-2}
PLAN = plan_of(pipeline(stage([0, 1], 0, 4)), pipeline(stage(2, 0, 3), stage(3, 3, 4)))
TWO_STAGES = plan_of(pipeline(stage(0, 0, 2), stage(1, 2, 4)))


def update(outcome: Outcome, before: Outcome) -> np.ndarray:
    """Return what one step of SGD did to all weights: the gradient, but for a factor."""
    parts = [(outcome.weights[name] - old).ravel() for name, old in before.weights.items()]
    return np.concatenate(parts)


@pytest.mark.dist
@pytest.mark.parametrize("model", CONFIGS)
def test_bf16_propagation_gives_the_gradient_of_fp32(pool: ProcessPool, model: str) -> None:
    # Weights as large as the families' own: rounding grows with them, in any implementation.
    case = HuggingFaceCase(
        model=model,
        plan=PLAN,
        precision="bf16-mixed",
        config={"initializer_range": 0.02},
        max_steps=1,
        seed=5,
    )
    alone = case.on_single_device()
    expected, before = (pool.run_alone(fit, replace(alone, max_steps=n)) for n in (1, 0))
    wanted = update(expected, before)
    assert np.linalg.norm(wanted) > 0
    for outcome in pool.run(fit, 4, case):
        np.testing.assert_allclose(outcome.losses, expected.losses, rtol=TOLERANCE)
        found = update(outcome, before)
        tolerance = TOLERANCES.get(model, TOLERANCE)
        assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("64-true", "float64"),
        ("transformer-engine", "modules aren't supported"),
        ("8-true", "isn't supported"),
    ],
)
def test_other_precisions_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{reason}.*32-true, bf16-mixed, bf16-true"):
        HeteroPrecision(name)  # type: ignore[arg-type]


class Mixer(Compared):
    """Layers between a projection of floating-point inputs, a buffer, and a loss of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        block = [nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()]
        self.layers = nn.ModuleList([nn.Sequential(*deepcopy(block)) for _ in range(4)])
        self.head = nn.Linear(16, 5)
        self.register_buffer("scale", torch.full((16,), 1.2345678))
        self.dtypes: dict[str, torch.dtype] = {}

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, weight, y = batch
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden * self.scale)
        losses = F.cross_entropy(logits, y, reduction="none")
        made = torch.ones(1)
        found = {"x": x, "weight": weight, "scale": self.scale, "losses": losses, "made": made}
        self.dtypes = {name: item.dtype for name, item in found.items()}
        return (losses * (1 + 0 * weight)).mean()

    def rows(self, num_empty: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(0)
        x, weight = torch.randn(96, 8, generator=draw), torch.rand(96, generator=draw)
        return TensorDataset(x, weight, torch.randint(5, (96,), generator=draw))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gathering(Mixer):
    """A module whose weights meet an fp32 tensor of its own in an operation that casts nothing."""

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        sums = torch.zeros(5, dtype=torch.float32).index_add(0, torch.arange(5), self.head.bias)
        return super().training_step(batch) + sums.sum()


def fit_mixer(rank: int, case: Case) -> tuple[list[float], dict[str, torch.dtype]]:
    """Return the losses and the dtypes seen in the last step."""
    module = train(case)
    return module.losses, module.dtypes


def case_of(precision: str, plan: Plan | None, kind: type[Mixer] = Mixer) -> Case:
    how = {"batch_size": 8, "max_steps": 6, "max_epochs": -1, "num_microbatches": 2}
    # As for a GPU.
    given = {"plugins": HalfPrecision("16-true")} if precision == "16-true" else {}
    return Case(model=kind, plan=plan, precision=precision, trainer=given, **how)


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true"])
def test_steps_compute_in_the_dtypes_of_lightning(pool: ProcessPool, precision: str) -> None:
    losses, dtypes = pool.run_alone(fit_mixer, case_of(precision, None))
    # Twelve roundings of weights lie between bf16 weights and Lightning's fp32 ones.
    tolerances = {"32-true": 1e-5, "bf16-mixed": 3e-3, "bf16-true": 1e-2, "16-true": 5e-3}
    tolerance = tolerances[precision]
    outcomes = pool.run(fit_mixer, 2, case_of(precision, TWO_STAGES))
    for found, _ in outcomes:
        np.testing.assert_allclose(found, losses, rtol=tolerance)
    # A stage that isn't the last ends the step before.
    assert [seen for _, seen in outcomes] == [{}, dtypes]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_tensors_of_another_dtype_are_explained(precision: str) -> None:
    one = plan_of(pipeline(stage(0, 0, 4)))
    with pytest.raises(RuntimeError) as caught:
        train(case_of(precision, one, Gathering))
    assert any("x = x.to(self.head.weight.dtype)" in note for note in caught.value.__notes__)
