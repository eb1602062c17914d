"""bf16 stays within 1e-2 of fp32 under plans of unequal degrees and stages; the rest is refused."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.strategy.precision import HeteroPrecision
from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import CONFIGS, HuggingFaceCase, HuggingFaceOutcome
from tests.runtime.huggingface_runs import train as train_hugging_face
from tests.runtime.runs import Case, pipeline, plan_of, stage, train
from tests.toy import quiet

TOLERANCE = 1e-2
# The plain model in bf16 is 1.6e-2 away from itself in fp32.
TOLERANCES = {"gemma3_text": 2e-2}
PLAN = plan_of(pipeline(stage([0, 1], 0, 4)), pipeline(stage(2, 0, 3), stage(3, 3, 4)))
THREE_STAGES = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 4)))


def update(outcome: HuggingFaceOutcome) -> np.ndarray:
    """Return what one step of SGD did to all weights: the gradient, but for a factor."""
    return np.concatenate(
        [(outcome.after[name] - before).ravel() for name, before in outcome.before.items()]
    )


@pytest.mark.dist
@pytest.mark.parametrize("model", CONFIGS)
def test_bf16_propagation_gives_the_gradient_of_fp32(pool: ProcessPool, model: str) -> None:
    # Weights as large as the families' own: rounding grows with them, in any implementation.
    case = HuggingFaceCase(
        model=model,
        plan=PLAN,
        world_size=4,
        precision="bf16-mixed",
        config=(("initializer_range", 0.02),),
    )
    expected = pool.run_alone(train_hugging_face, case.on_single_device(), 1)
    wanted = update(expected)
    assert np.linalg.norm(wanted) > 0
    for outcome in pool.run(train_hugging_face, 4, case, 1):
        np.testing.assert_allclose(outcome.losses, expected.losses, rtol=TOLERANCE)
        found = update(outcome)
        tolerance = TOLERANCES.get(model, TOLERANCE)
        assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_reference_model_trains_in_bf16_as_in_fp32(pool: ProcessPool, precision: str) -> None:
    case = Case(
        plan=THREE_STAGES, world_size=3, model="packed", num_layers=4, num_rows=24, batch_size=3
    )
    expected = pool.run_alone(train, case.on_single_device())
    for outcome in pool.run(train, 3, replace(case, precision=precision)):
        np.testing.assert_allclose(outcome.losses, expected.losses, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("16-mixed", "GradScaler would skip steps on some ranks"),
        ("16-true", "underflow"),
        ("64-true", "float64"),
        ("transformer-engine", "modules aren't supported"),
        ("8-true", "isn't supported"),
    ],
)
def test_other_precisions_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{reason}.*32-true, bf16-mixed, bf16-true"):
        HeteroPrecision(name)  # type: ignore[arg-type]


class Regression(L.LightningModule):
    """A module whose inputs and targets are floating-point numbers."""

    def __init__(self, cast: str = "") -> None:
        super().__init__()
        self.cast = cast
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
        self.losses: list[float] = []
        self.dtypes: list[torch.dtype] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        self.dtypes = [x.dtype, y.dtype]
        if self.cast == "input":
            x = x.to(self.layers[0][0].weight.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast == "autocast"):
            for layer in self.layers:
                x = layer(x)
        return F.mse_loss(x.to(y.dtype), y)

    def on_train_batch_end(self, outputs: object, *_: object) -> None:
        assert isinstance(outputs, dict)
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit_regression(strategy: object, precision: str, cast: str = "") -> Regression:
    L.seed_everything(0, verbose=False)
    module = Regression(cast)
    data = TensorDataset(torch.randn(24, 8), torch.randn(24, 8))
    options = quiet(max_steps=6, precision=precision, strategy=strategy, devices=1)
    L.Trainer(**options).fit(module, DataLoader(data, batch_size=4))
    return module


def test_with_bf16_true_floats_of_a_batch_are_bf16_as_in_lightning() -> None:
    expected = fit_regression("auto", "bf16-true")
    found = fit_regression(HeteroStrategy(), "bf16-true")
    assert found.dtypes == expected.dtypes == [torch.bfloat16] * 2
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)


@pytest.mark.parametrize("cast", ["input", "autocast"])
def test_with_bf16_mixed_targets_keep_their_digits(cast: str) -> None:
    expected = fit_regression("auto", "bf16-mixed", cast)
    found = fit_regression(HeteroStrategy(), "bf16-mixed", cast)
    assert found.dtypes == [torch.float32] * 2
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)


def test_with_bf16_mixed_an_input_of_another_dtype_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        fit_regression(HeteroStrategy(), "bf16-mixed")
    (note,) = [note for note in caught.value.__notes__ if "autocast" in note]
    assert "x = x.to(self.head.weight.dtype)" in note
