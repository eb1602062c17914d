"""The hidden state that a stage received, as its first layer gets it.

The layer may change it in place, as it might change what the layer before it returned. And a model
that checkpoints its own layers runs the layer again in backward, on the same hidden state.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_hetero.core.errors import ModelError

__all__ = ["StageInput"]


class StageInput:
    """One micro-batch's hidden state on a stage that isn't the first.

    Args:
        received: What the stage before made; its `grad` is what that stage gets back.
    """

    def __init__(self, received: Tensor) -> None:
        self.received = received
        self._given: Tensor | None = None
        self._version = 0

    def give(self) -> Tensor:
        """Return what the stage's first layer gets, each time anew.

        Raises:
            ModelError: The layer changed what it got the first time.
        """
        if not self.received.requires_grad:
            return self.received
        given: Tensor = _WithoutCopy.apply(self.received)  # type: ignore[no-untyped-call]
        if self._given is None:
            self._given, self._version = given, given._version
        elif self._given._version != self._version:
            raise ModelError(
                "A layer that changes its input in place is computed again in backward, where its "
                "input is needed as it was. Don't checkpoint it, or let it leave its input alone."
            )
        return given


class _WithoutCopy(torch.autograd.Function):
    """A tensor in the memory of a leaf, to which operations in place are allowed."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return it; no view of the leaf, for which autograd would forbid them as well."""
        memory = leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride()
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(*memory)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Hand the gradient on."""
        return gradients[0]
