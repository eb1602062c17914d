"""Refuse calls of a module outside its steps, where its parameters are a rank's slices.

The usual case is a hook that generates a few words. Without this it would fail somewhere inside the
model, with shapes that tell the user nothing.
"""

from typing import Any, Self

from torch import nn

from lightning_hetero.core.errors import StepError

__all__ = ["ModuleCalls"]


class ModuleCalls:
    """Watches the calls of a module and of its children.

    Args:
        module: The LightningModule.
        has_slices: Whether its parameters are whole only inside this context; else it may be called
            anywhere.
    """

    def __init__(self, module: nn.Module, *, has_slices: bool) -> None:
        self._are_allowed = False
        children = (item for item in module.children() if any(True for _ in item.parameters()))
        watched = (module, *children) if has_slices else ()
        self._handles = [item.register_forward_pre_hook(self._check) for item in watched]

    def __enter__(self) -> Self:
        """Let the module be called inside this context."""
        self._are_allowed = True
        return self

    def __exit__(self, *_: object) -> None:
        self._are_allowed = False

    def remove(self) -> None:
        """Stop watching: the module may be called anywhere."""
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
