"""Refuse calls of a module outside of its steps, where its parameters are a rank's slices.

A hook that lets the model write a few words is the usual case. Without this it would fail somewhere
inside the model, on shapes that mean nothing to anybody.
"""

from typing import Any

from torch import nn

from lightning_hetero.core.errors import StepError

__all__ = ["ModuleCalls"]


class ModuleCalls:
    """Watches the calls of a module and of its children.

    Args:
        module: The LightningModule.
        has_slices: Whether its parameters are whole inside this context only; if not, calls may be
            made anywhere.
    """

    def __init__(self, module: nn.Module, *, has_slices: bool) -> None:
        self._are_allowed = False
        children = (item for item in module.children() if any(True for _ in item.parameters()))
        watched = (module, *children) if has_slices else ()
        self._handles = [item.register_forward_pre_hook(self._check) for item in watched]

    def __enter__(self) -> None:
        """Let the module be called inside this context."""
        self._are_allowed = True

    def __exit__(self, *_: object) -> None:
        self._are_allowed = False

    def remove(self) -> None:
        """Let it be called anywhere."""
        for handle in self._handles:
            handle.remove()

    def _check(self, module: nn.Module, _: Any) -> None:
        if not self._are_allowed:
            raise StepError(
                f"{type(module).__name__} is called outside of a step, for instance in a hook, "
                "where every rank has only its slices of the parameters. Call it in "
                "validation_step, test_step or predict_step, or after a run with "
                "HeteroStrategy(whole_after_run=True)."
            )
