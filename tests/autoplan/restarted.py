"""A script for torchrun whose last rank has too little memory from its second step on.

Each start of it appends to `rank0.jsonl` which plan it trains under, and the loss of every step.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_hetero import HeteroStrategy
from lightning_hetero.autoplan import AutoPlan
from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint
from lightning_hetero.testing import EmulatedDevices
from tests.capped_memory import CappedMemory
from tests.toy import ToyModule, ToyOptions, loader, quiet

NUM_STEPS, GROWS_AT = 3, 1
GROWN_BYTES = 900_000


class Growing(ToyModule):
    """Needs more memory from its second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        grown = torch.ones(GROWN_BYTES // 4 if self.trainer.global_step >= GROWS_AT else 0)
        loss = super().training_step(batch, batch_idx)
        del grown
        return loss


class Record(L.Callback):
    """Writes down what happens; lets each checkpoint be safe before the next step."""

    def __init__(self, file: Path, checkpoint: LayerwiseCheckpoint) -> None:
        self.file, self.checkpoint = file, checkpoint

    def write(self, trainer: L.Trainer, **entry: Any) -> None:
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.write(trainer, plan=trainer.strategy.plan.to_dict(), begin=trainer.global_step)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.checkpoint.saved is not None:
            self.checkpoint.saved.wait_until_uploaded()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.write(trainer, step=trainer.global_step, loss=float(outputs["loss"]))


def train(folder: Path, cap_bytes: float) -> None:
    torch.manual_seed(5)
    saving = LayerwiseCheckpoint(folder / "saved", every_n_train_steps=1, shared_memory=False)
    callbacks = [
        EmulatedDevices((1.0, 1.0), memory_bytes=2**30),
        CappedMemory((2**40, cap_bytes)),
        Record(folder / "rank0.jsonl", saving),
        saving,
        ElasticRestart(),
    ]
    options = quiet(devices=2, max_steps=NUM_STEPS, callbacks=callbacks)
    strategy = HeteroStrategy(AutoPlan(microbatch_sizes=(1,)))
    trainer = L.Trainer(strategy=strategy, **{**options, "enable_checkpointing": True})
    trainer.fit(Growing(ToyOptions(num_layers=4, width=64)), loader(24, 6))


def plain_losses() -> list[float]:
    """Return the losses of plain Lightning, which sees both ranks' batches together."""
    torch.manual_seed(5)
    module = ToyModule(ToyOptions(num_layers=4, width=64))
    L.Trainer(**quiet(devices=1, max_steps=NUM_STEPS)).fit(module, loader(24, 12))
    return module.losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), float(sys.argv[2]))
