"""Runs that use one feature of Lightning each, the same on one device and under a plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    GradientAccumulationScheduler,
)
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import StepError
from tests.toy import ADAM_EPS, CONTEXT, VOCABULARY, ToyModule, ToyOptions, loader, quiet

WORLD_SIZE = 3
PLAN = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 3]}]},
        {"stages": [{"ranks": [2], "layers": [0, 3]}]},
    ]
}
TWO_COPIES = {"pipelines": [{"stages": [{"ranks": [rank], "layers": [0, 1]}]} for rank in (0, 2)]}
SAMPLES = 4
"""Of an iteration; two pipelines have half of it in a batch of theirs."""


class Trainable(ToyModule):
    def __init__(self) -> None:
        super().__init__(ToyOptions())

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPS)


class Plateau(Trainable):
    """Follows a plateau of a validation that is made after each batch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class OwnClipping(Trainable):
    """Knows the number of all its steps, and clips by itself."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, 1e-2, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class OwnOptimizerStep(Trainable):
    """Has two validation sets, and a hook that ends epochs early."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Made(Trainable):
    """Its layers are made by `configure_model`; Lightning's summary calls it on its example."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.example_input_array = torch.zeros(2, CONTEXT, dtype=torch.long)

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(3)
            self.model = ToyModule(ToyOptions()).model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


class NoLayers(Trainable):
    """Nothing in it can be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)
        )


class Thaw(BaseFinetuning):
    """Freezes the embedding and a layer, and thaws the layer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.wte)
        self.freeze(pl_module.model.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[0], optimizer, lr=5e-3)


class Freeze(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.model.blocks[2].requires_grad_(trainer.current_epoch == 0)


class PredictionWriter(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.written: dict[int, Any] = {}

    def write_on_batch_end(self, *arguments: Any) -> None:
        _, _, prediction, indices, *_ = arguments
        if prediction is not None:
            self.written |= dict(zip(indices, prediction.tolist(), strict=True))


FITS: dict[str, tuple[Callable[[], Trainable], Callable[[], dict[str, Any]]]] = {
    "frozen in mid-run, ReduceLROnPlateau, val_check_interval": (
        Plateau,
        lambda: {"callbacks": [Freeze()], "max_epochs": 2, "val_check_interval": 1},
    ),
    "estimated_stepping_batches, configure_gradient_clipping, limits as shares": (
        OwnClipping,
        lambda: {"max_epochs": 2, "limit_train_batches": 0.7, "limit_val_batches": 0.5},
    ),
    "optimizer_step, several validation sets, an epoch that a hook ends, detect_anomaly": (
        OwnOptimizerStep,
        lambda: {"max_epochs": 2, "num_sanity_val_steps": 2, "detect_anomaly": True},
    ),
    "configure_model, example_input_array, GradientAccumulationScheduler": (
        Made,
        lambda: {
            "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})],
            "max_epochs": 2,
            "enable_model_summary": True,
        },
    ),
    "a module without layers, overfit_batches": (
        NoLayers,
        lambda: {"overfit_batches": 1, "max_epochs": 2},
    ),
}


def norms_of(module: torch.nn.Module) -> list[float]:
    return [float(parameter.detach().double().norm()) for parameter in module.parameters()]


def options_of(
    *, planned: bool, plan: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    if not planned:
        return quiet(devices=1, **options)
    strategy = HeteroStrategy(ParallelPlan.from_dict(plan or PLAN), whole_after_run=True)
    return quiet(strategy=strategy, devices=WORLD_SIZE, **options)


def fit(name: str, *, planned: bool) -> dict[str, Any]:
    """Train as the feature's name says; returns losses, metrics, weights and learning rates."""
    make, trainer_options = FITS[name]
    L.seed_everything(5, verbose=False)
    module = make()
    plan = TWO_COPIES if isinstance(module, NoLayers) else PLAN
    options = {"max_epochs": 1, "num_sanity_val_steps": 0} | trainer_options()
    trainer = L.Trainer(**options_of(planned=planned, plan=plan, **options))
    batch_size = SAMPLES // 2 if planned else SAMPLES
    validation = [loader(8, batch_size, seed=seed) for seed in (1, 2)]
    several = isinstance(module, OwnOptimizerStep)
    trainer.fit(module, loader(12, batch_size), validation if several else validation[0])
    return {
        "losses": module.losses,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "weights": norms_of(module),
        "trainable": [p.requires_grad for p in module.parameters()],
        "has_example": module.example_input_array is not None,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    }


def thaw_and_resume(folder: Path, *, planned: bool) -> dict[str, Any]:
    """Train with `Thaw`, save, and go on in another run."""
    batch_size = SAMPLES // 2 if planned else SAMPLES
    path = folder / ("planned.ckpt" if planned else "plain.ckpt")
    L.seed_everything(5, verbose=False)
    for max_epochs, resumed in ((2, None), (3, path)):
        module = Trainable()
        trainer = L.Trainer(
            **options_of(
                planned=planned, callbacks=[Thaw()], max_epochs=max_epochs, limit_val_batches=0
            )
        )
        trainer.fit(
            module,
            loader(12, batch_size),
            loader(4, batch_size, seed=1),
            ckpt_path=resumed,
            weights_only=False,
        )
        if resumed is None:
            trainer.save_checkpoint(path)
    return {"losses": module.losses, "weights": norms_of(module)}


def write_predictions(*, planned: bool) -> dict[int, Any]:
    """Write predictions batch by batch; returns what this rank has written, by index."""
    L.seed_everything(5, verbose=False)
    writer = PredictionWriter()
    trainer = L.Trainer(**options_of(planned=planned, callbacks=[writer]))
    batch_size = SAMPLES // 2 if planned else SAMPLES
    trainer.predict(Trainable(), loader(10, batch_size), return_predictions=False)
    return writer.written


def use_a_hook(*, planned: bool) -> tuple[list[int], str]:
    """Return what a hook's `all_gather` gives, and what it gets if it calls the model."""

    class Hooked(Trainable):
        gathered = torch.empty(0)
        answer = ""

        def on_train_epoch_end(self) -> None:
            self.gathered = self.all_gather(torch.tensor(self.global_rank))
            try:
                self.model(torch.zeros(1, 2, dtype=torch.long))
            except StepError as error:
                self.answer = str(error)

    module = Hooked()
    L.Trainer(**options_of(planned=planned, max_epochs=1)).fit(module, loader(4, 2))
    return module.gathered.tolist(), module.answer


def use_all(rank: int, folder: Path) -> dict[str, Any]:
    """Use every feature, one after the other, in one set of processes."""
    return {
        "fits": {name: fit(name, planned=True) for name in FITS},
        "resumed": thaw_and_resume(folder, planned=True),
        "predictions": write_predictions(planned=True),
        "hook": use_a_hook(planned=True),
    }
