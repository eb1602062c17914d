"""`CollectGarbage`: Python's garbage collector runs at the same step on all ranks.

By default each rank's collector runs at a time of its own, and all other ranks wait for that rank:
with many ranks some rank collects in nearly every step. If all collect in the same step, they wait
once.
"""

import gc
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError


class CollectGarbage(Callback):
    """Collect garbage on all ranks every `every_n_steps` steps, and at no other time.

    ::

        Trainer(strategy=HeteroStrategy(), callbacks=[CollectGarbage(every_n_steps=200)])

    Objects that were made during set-up live as long as the run, so collections no longer visit
    them. Objects in reference cycles stay until the next collection: if memory grows too much
    meanwhile, choose fewer steps.

    Args:
        every_n_steps: Optimizer steps between two collections, 1 or more.

    Raises:
        ConfigurationError: `every_n_steps` is less than 1.
    """

    def __init__(self, every_n_steps: int = 200) -> None:
        if every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}; give 1 or more.")
        self.every_n_steps = every_n_steps
        self._was_enabled = False
        self._step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # After a change of ranks in place, training begins again without having ended.
        self._was_enabled = self._was_enabled or gc.isenabled()
        self._step = trainer.global_step
        gc.disable()
        gc.collect()
        gc.freeze()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Batches that only accumulate gradients end no step.
        ended, self._step = trainer.global_step > self._step, trainer.global_step
        if ended and trainer.global_step % self.every_n_steps == 0:
            gc.collect()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    @override
    def on_exception(self, *_: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = False
