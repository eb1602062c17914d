"""Refuse what would train something else, or nothing, while parameters are slices.

The engine calls the steps and runs their backwards itself, and parameters are a rank's own slices
outside of them.
"""

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelPruning

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["check_trainable"]


def check_trainable(module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
    """Refuse a module, or a callback, that can't train under a plan.

    Raises:
        ConfigurationError: On every rank alike.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "HeteroStrategy needs automatic optimization, because a step's backward runs inside "
            "the pipeline's schedule. Remove `self.automatic_optimization = False` and return the "
            "loss from training_step."
        )
    if type(module).backward is not pl.LightningModule.backward:
        raise ConfigurationError(
            f"{type(module).__name__} overrides backward, which HeteroStrategy never calls: the "
            "backward runs inside the pipeline's schedule. Put what it does into training_step, "
            "on_before_backward or on_after_backward."
        )
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ConfigurationError(
            "ModelPruning masks whole parameters, but each rank has slices of them. Prune after "
            "the run, when parameters are whole again, and leave the callback out."
        )
