"""What users do with Lightning around a run gives what it gives on one device."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from lightning_hetero.core.errors import StepError
from tests.fits import assert_same, check, each, outcome_of, train
from tests.plans import UNEQUAL, Plan, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.toy import CONTEXT, ROWS, VOCABULARY, Compared, Rows, TinyModule

pytestmark = pytest.mark.dist

TWO_COPIES = plan_of(*(pipeline(stage(rank, 0, 1)) for rank in (0, 2)))


class Trained(TinyModule):
    """Also knows its learning rates, and which parameters are trained."""

    validates = 1

    def rows(self, num_empty: int) -> Any:
        return Rows(3 * ROWS, num_empty)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(self.model(batch[0]), batch[1]))

    def on_train_end(self) -> None:
        rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.seen = [rates, [float(item.requires_grad) for item in self.parameters()]]

    def configure_optimizers(self) -> Any:
        trained = [item for item in self.parameters() if item.requires_grad]
        return torch.optim.SGD(trained, lr=0.2, momentum=0.9)


class Plateau(Trained):
    """Follows a plateau of a validation that is made after each batch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        scheduling = {"scheduler": scheduler, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduling}


class OwnClipping(Trained):
    """Knows the number of all its steps, and clips by itself."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, 0.2, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class OwnOptimizerStep(Trained):
    """Has two validation sets, and a hook that ends epochs early."""

    validates = 2

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Made(Trained):
    """Its layers are made by `configure_model`; Lightning's summary calls it on its example."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.example_input_array = torch.zeros(2, CONTEXT, dtype=torch.long)

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(3)
            self.model = TinyModule().model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def on_train_end(self) -> None: ...

    @property
    def seen(self) -> list[float]:
        return [float(self.example_input_array is not None)]


class NoLayers(Trained):
    """Nothing in it can be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY))


class Freeze(L.Callback):
    """Freezes a layer in the second epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.model.layers[2].requires_grad_(trainer.current_epoch == 0)


FEATURES: dict[str, tuple[type[Compared], Plan, dict[str, Any]]] = {
    "frozen in mid-run, ReduceLROnPlateau, val_check_interval": (
        Plateau,
        UNEQUAL,
        {"callbacks": [Freeze()], "val_check_interval": 1},
    ),
    "estimated_stepping_batches, configure_gradient_clipping, limits as shares": (
        OwnClipping,
        UNEQUAL,
        {"limit_train_batches": 0.7, "limit_val_batches": 0.5},
    ),
    "optimizer_step, several validation sets, an epoch that a hook ends, detect_anomaly": (
        OwnOptimizerStep,
        UNEQUAL,
        {"num_sanity_val_steps": 2, "detect_anomaly": True},
    ),
    "configure_model, example_input_array, GradientAccumulationScheduler": (
        Made,
        UNEQUAL,
        {
            "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})],
            "enable_model_summary": True,
        },
    ),
    "StochasticWeightAveraging": (
        Trained,
        UNEQUAL,
        {
            "callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)],
            "max_epochs": 4,
        },
    ),
    "a module without layers, overfit_batches": (NoLayers, TWO_COPIES, {"overfit_batches": 1}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_of_fit_gives_what_a_single_device_gives_on_every_rank(
    pool: ProcessPool, name: str
) -> None:
    make, plan, options = FEATURES[name]
    check(pool, *each([make], plan, **options))


class Thaw(BaseFinetuning):
    """Freezes the embedding and a layer, and thaws the layer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.embed)
        self.freeze(pl_module.model.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.layers[0], optimizer, lr=0.1)


def thaw_and_resume(rank: int, plan: Plan | None, folder: Path) -> Any:
    """Train with `Thaw`, save, and go on in another run."""
    path = folder / ("planned.ckpt" if plan else "plain.ckpt")
    (first,), (second,) = (
        each([Trained], plan, callbacks=[Thaw()], **how)
        for how in ({}, {"ckpt_path": path, "max_epochs": 3})
    )
    train(first).trainer.save_checkpoint(path)
    return outcome_of(train(second))


def test_a_run_resumes_with_parameters_that_it_thawed(pool: ProcessPool, tmp_path: Path) -> None:
    alone = pool.run_alone(thaw_and_resume, None, tmp_path)
    for found in pool.run(thaw_and_resume, 3, UNEQUAL, tmp_path):
        assert_same(found, alone)


class PredictionWriter(BasePredictionWriter):
    """Keeps predictions by the indices of their samples."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.written: dict[int, Any] = {}

    def write_on_batch_end(self, *arguments: Any) -> None:
        _, _, prediction, indices, *_ = arguments
        if prediction is not None:
            self.written |= dict(zip(indices, prediction.tolist(), strict=True))


class Hooked(Trained):
    """Gathers in a hook, calls its model in another, and predicts."""

    predicts = True
    answer = ""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)

    def on_train_epoch_end(self) -> None:
        self.gathered = self.all_gather(torch.tensor(self.global_rank)).tolist()
        try:
            self.model(torch.zeros(1, 2, dtype=torch.long))
        except StepError as error:
            self.answer = str(error)


def use_hooks(rank: int, plan: Plan | None) -> tuple[Any, str, dict[int, Any]]:
    writer = PredictionWriter()
    module = train(each([Hooked], plan)[0], writer)
    return module.gathered, module.answer, writer.written


def test_hooks_gather_and_are_told_where_to_call_and_predictions_have_their_indices(
    pool: ProcessPool,
) -> None:
    _, _, expected = pool.run_alone(use_hooks, None)
    assert len(expected) == 3 * ROWS
    written: dict[int, Any] = {}
    for gathered, answer, found in pool.run(use_hooks, 3, UNEQUAL):
        assert gathered == [0, 1, 2]
        assert "embedding is called on parameter" in answer
        assert "Call the model in steps" in answer
        written |= found
    assert written == expected
