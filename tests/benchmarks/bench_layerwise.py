"""How long a training step waits for a `LayerwiseCheckpoint`, against a synchronous `torch.save`.

Floor: 201 MB of weights and optimizer state are read and written once in memory, beside the next
step's forward and backward; what is left is collecting the state and encoding its metadata.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.callbacks import LayerwiseCheckpoint
from tests.benchmarks.harness import Row
from tests.toy import quiet

EVERY = 5
NUM_STEPS = 42


class Wide(L.LightningModule):
    """Sixteen square layers: 67 MB of weights, 134 MB of optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(16)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Timed(LayerwiseCheckpoint):
    """Measures how long it holds up each step that saves."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, every_n_train_steps=EVERY, shared_memory=False)
        self.stalls_s: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        start_s = time.perf_counter()
        super().on_train_batch_end(trainer, *rest)
        if trainer.global_step % EVERY == 0:
            self.stalls_s.append(time.perf_counter() - start_s)

    def on_before_optimizer_step(self, trainer: L.Trainer, *rest: Any) -> None:
        start_s = time.perf_counter()
        super().on_before_optimizer_step(trainer, *rest)
        if trainer.global_step % EVERY == 0 and self.stalls_s:
            self.stalls_s[-1] += time.perf_counter() - start_s


def run() -> list[Row]:
    """Measure the stall."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Timed(Path(folder) / "ours")
        options = {**quiet(max_steps=NUM_STEPS, devices=1), "enable_checkpointing": True}
        trainer = L.Trainer(**options, callbacks=[checkpoint])
        module = Wide()
        trainer.fit(module, DataLoader(torch.randn(256 * NUM_STEPS, 1024), batch_size=256))
        state = {"module": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
        peer_s = statistics.median(_save(state, Path(folder) / "peer.pt") for _ in range(5))
    # The first one allocates the host memory.
    stall_s = statistics.median(checkpoint.stalls_s[1:])
    return [
        Row(
            name="stall of a training step for a LayerwiseCheckpoint of 201 MB",
            ours=stall_s,
            peer=peer_s,
            target=0.05,
            note="peer: torch.save and fsync",
        )
    ]


def _save(state: Any, path: Path) -> float:
    start_s = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start_s
