"""The toy of the runs with faults: each sample takes a device's time, which no CPU has to give.

Four workers share two cores here. So a step's work is a pause of so long for each sample, as if
each worker had a device of its own, and what is compared are recoveries, not loops in Python.
"""

import time
from typing import Any

from torch import Tensor, nn

from tests.toy import ToyModule, ToyOptions

NUM_ROWS = 24_000
"""Of an epoch, of which several make the longest run."""
BATCH = 4
"""Samples of a worker in a step."""
ROW_MS = 25.0
"""What a sample takes."""


class PacedToy(ToyModule):
    """A toy whose training step takes its time; it logs nothing, as loops of peers log nothing."""

    def __init__(self, row_ms: float = ROW_MS) -> None:
        super().__init__(ToyOptions(num_layers=4))
        self._row_s = row_ms / 1000.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        """Return the toy's optimizer alone, whose rate stays."""
        optimizers, _ = super().configure_optimizers()
        return optimizers[0]

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, after a while."""
        time.sleep(self._row_s * len(batch[0]))
        return super().loss(batch)


class PacedLoss(nn.Module):
    """The same for loops that call a module itself."""

    def __init__(self, row_ms: float = ROW_MS) -> None:
        super().__init__()
        self.toy = PacedToy(row_ms)

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.toy.loss(batch)
