"""Runs of the Trainer's features, called in the processes of the pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.toy import TokenRows, ToyModule, ToyOptions, loader, quiet

SEED = 5


def strategy_of(plan: dict[str, Any] | None, world_size: int, **options: Any) -> dict[str, Any]:
    """Trainer options for a plan; a single device without one."""
    if plan is None:
        return {"devices": 1}
    strategy = HeteroStrategy(ParallelPlan.from_dict(plan), whole_after_run=True, **options)
    return {"strategy": strategy, "devices": world_size}


def as_arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def metrics_of(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def use_every_entry_point(
    rank: int, world_size: int, trainer_options: dict[str, Any], batch_size: int
) -> dict[str, Any]:
    """Fit, validate, test and predict with one Trainer, then fit again with another."""
    L.seed_everything(SEED, verbose=False)
    module = ToyModule(ToyOptions())
    trainer = L.Trainer(**quiet(max_epochs=2, num_sanity_val_steps=2), **trainer_options)
    trainer.fit(module, loader(12, batch_size), loader(10, batch_size, seed=1))
    fitted = metrics_of(trainer)
    weights = as_arrays(module)
    validated = trainer.validate(module, loader(10, batch_size, seed=1), verbose=False)
    tested = trainer.test(module, loader(10, batch_size, seed=2), verbose=False)
    predictions = trainer.predict(module, loader(10, batch_size, seed=2))
    if world_size > 1:
        trainer_options["strategy"] = HeteroStrategy(num_stages=2, whole_after_run=True)
    again = L.Trainer(**quiet(max_epochs=1), **trainer_options)
    again.fit(module, loader(12, batch_size), loader(10, batch_size, seed=1))
    return {
        "losses": module.losses,
        "fitted": fitted,
        "weights": weights,
        "validated": validated,
        "tested": tested,
        "predictions": [None if p is None else p.numpy() for p in predictions],
        "weights_again": as_arrays(module),
    }


def fit_with_defaults(rank: int, num_stages: int, world_size: int) -> dict[str, Any]:
    strategy = HeteroStrategy(num_stages=num_stages, whole_after_run=True)
    options = {"strategy": strategy, "devices": world_size}
    return use_every_entry_point(rank, world_size, options, 2)


def fit_single(rank: int, batch_size: int) -> dict[str, Any]:
    return use_every_entry_point(rank, 1, {"devices": 1}, batch_size)


class WorseningModule(ToyModule):
    """Its validation gets worse after three epochs."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss * 0 + abs(self.current_epoch - 2))


def stop_early(rank: int, plan: dict[str, Any], world_size: int, folder: str) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    stopping = EarlyStopping("val_loss", patience=2)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_top_k=1)
    options = {**quiet(callbacks=[stopping, best], max_epochs=20), "enable_checkpointing": True}
    trainer = L.Trainer(**options, **strategy_of(plan, world_size))
    trainer.fit(WorseningModule(ToyOptions()), loader(8, 2), loader(4, 2, seed=1))
    epochs, stopped = trainer.current_epoch, stopping.stopped_epoch
    trainer.test(ckpt_path="best", dataloaders=loader(4, 2, seed=2), verbose=False)
    return {
        "epochs": epochs,
        "stopped": stopped,
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),
        "tested": metrics_of(trainer),
    }


class SaveAt(L.Callback):
    """Saves checkpoints when so many steps are done, behind the epoch if they end one."""

    def __init__(self, paths: Mapping[int, str | Path]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.paths and not trainer.is_last_batch:
            trainer.save_checkpoint(self.paths[trainer.global_step])

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.paths:
            trainer.save_checkpoint(self.paths[trainer.global_step])


def stateful_loader(batch_size: int) -> DataLoader[Any]:
    return StatefulDataLoader(TokenRows(24), batch_size=batch_size)


def shuffled_loader(batch_size: int, num_workers: int) -> DataLoader[Any]:
    return StatefulDataLoader(
        TokenRows(24), batch_size=batch_size, shuffle=True, num_workers=num_workers
    )


def train_and_save(
    rank: int,
    plan: dict[str, Any] | None,
    world_size: int,
    batch_size: int,
    *,
    saves: Mapping[int, str | Path] | None = None,
    resume: str | Path | None = None,
    options: ToyOptions | None = None,
    shuffle: bool = False,
    num_workers: int = 0,
) -> dict[str, Any]:
    """Train two epochs, save at some steps if asked, begin at a checkpoint if given."""
    saves = saves or {}
    L.seed_everything(SEED, verbose=False)
    module = ToyModule(options or ToyOptions())
    trainer = L.Trainer(
        **quiet(callbacks=[SaveAt(saves)], max_epochs=2),
        **strategy_of(plan, world_size),
    )
    train = shuffled_loader(batch_size, num_workers) if shuffle else stateful_loader(batch_size)
    trainer.fit(module, train, loader(10, batch_size, seed=1), ckpt_path=resume)
    return {
        "losses": module.losses,
        "weights": as_arrays(module),
        "metrics": metrics_of(trainer),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "global_step": trainer.global_step,
    }


def read_with_plain_lightning(rank: int, path: str | Path) -> dict[str, Any]:
    module = ToyModule.load_from_checkpoint(path, options=ToyOptions())
    content = torch.load(path, weights_only=True)
    state = content["optimizer_states"][0]["state"]
    shapes = {index: tuple(item["exp_avg"].shape) for index, item in state.items()}
    return {"weights": as_arrays(module), "shapes": shapes, "keys": sorted(content)}


def average_weights(
    rank: int,
    plan: dict[str, Any] | None,
    world_size: int,
    batch_size: int,
    path: str,
    resume: str | None = None,
) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    averaging = WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    module = ToyModule(ToyOptions())
    trainer = L.Trainer(
        **quiet(callbacks=[averaging, SaveAt({3: path})], max_epochs=2),
        **strategy_of(plan, world_size),
    )
    train, valid = stateful_loader(batch_size), loader(10, batch_size, seed=1)
    trainer.fit(module, train, valid, ckpt_path=resume)
    return {
        "losses": module.losses,
        "weights": as_arrays(module),
        "metrics": metrics_of(trainer),
    }
