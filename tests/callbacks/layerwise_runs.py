"""Runs with `LayerwiseCheckpoint` that tests compare, under any plan."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy
from lightning_hetero.callbacks import LayerwiseCheckpoint
from tests import fits
from tests.fits import Case, Outcome, outcome_of
from tests.runtime.case_modules import PackedModule
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet


class Counts(PackedModule):
    """Counts its steps in a buffer, and knows its learning rate."""

    # Two iterations an epoch: inside one torchdata needs the sampler that saved.
    loader = StatefulDataLoader

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_steps += 1

    def on_train_end(self) -> None:
        self.seen = [self.trainer.optimizers[0].param_groups[0]["lr"]]


def leg(until: int, plan: Any = None, *, redundancy: int = 0, **how: Any) -> Case:
    """Return one part of a run, until a step, of six samples an iteration."""
    size = 6 if plan is None else 6 // len(plan["pipelines"])
    options = {"redundancy": redundancy} if redundancy else {}
    given = {"batch_size": size, "max_steps": until, "max_epochs": -1, "options": options, **how}
    case = Case(plan=plan, **given)
    return Case(plan=plan, model=partial(Counts, case), **given)


def fit(rank: int, case: Case, folder: Path | None = None) -> Outcome:
    """Train until the leg's end, from the folder's newest checkpoint on, if there is one.

    In the end the averaged weights are put into the module, whole on every rank.
    """
    callbacks: list[L.Callback] = [WeightAveraging(use_buffers=False, avg_fn=get_ema_avg_fn(0.8))]
    if folder is not None:
        callbacks.append(LayerwiseCheckpoint(folder, every_n_train_steps=100, shared_memory=False))
    return outcome_of(fits.train(case, *callbacks))


def export(folder: Path, file: Path) -> None:
    """Write the newest checkpoint as one file by the command line's code."""
    from lightning_hetero.cli import main

    assert main(["checkpoint", "export", str(folder), "--output", str(file)]) == 0


class Drops(ToyModule):
    """Draws random numbers in each step."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * torch.nn.functional.dropout(torch.ones(8)).mean()


def train(
    folder: Path | str | None,
    num_steps: int,
    *callbacks: L.Callback,
    in_epochs: bool = False,
    ckpt_path: Path | None = None,
    **saving: Any,
) -> list[float]:
    """Train on one device and return the losses; two steps are an epoch."""
    torch.manual_seed(0)
    options = {"every_n_train_steps": 2, "shared_memory": False, **saving}
    module = Drops(ToyOptions())
    limit = {"max_epochs": num_steps // 2} if in_epochs else {"max_steps": num_steps}
    settings = {**quiet(devices=1, **limit), "enable_checkpointing": True}
    trainer = L.Trainer(
        strategy=HeteroStrategy(num_stages=1),
        callbacks=[LayerwiseCheckpoint(folder, **options), *callbacks],
        **settings,
    )
    torch.manual_seed(1)
    loader = StatefulDataLoader(TokenRows(8), batch_size=4)
    trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
    return module.losses
