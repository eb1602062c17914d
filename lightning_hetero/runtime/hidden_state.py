"""Find the hidden state in what a layer is called with, and in what it returns."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_hetero.core.errors import ModelError

__all__ = ["hidden_argument", "hidden_output"]


def hidden_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return the layer's hidden state and a function that puts another one in its place."""
    if args and isinstance(args[0], Tensor):
        return _plain(args[0]), lambda hidden: ((hidden, *args[1:]), kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return _plain(value), lambda hidden, name=name: (args, {**kwargs, name: hidden})
    raise ModelError(
        f"A layer is called with {[type(arg).__name__ for arg in args]} and {sorted(kwargs)}; its "
        "first argument must be the hidden state, one tensor."
    )


def _plain(hidden: Tensor) -> Tensor:
    if hidden.is_nested:
        raise ModelError(
            "The layers get a nested tensor, which can't travel between stages. Build "
            "nn.TransformerEncoder with enable_nested_tensor=False."
        )
    return hidden


def hidden_output(output: Any, index: int, *, is_alone: bool = False) -> Tensor:
    """Return the hidden state of a layer's output; `is_alone` where no other stage follows."""
    if isinstance(output, Tensor):
        return output if is_alone else _plain(output)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        if is_alone:
            return output[0]
        extra = [item for item in output[1:] if isinstance(item, Tensor) and item.requires_grad]
        if not extra:
            return output[0]
        raise ModelError(
            f"Layer {index} returns {len(extra)} more tensors with gradients besides the hidden "
            "state, which later stages would never see. Return the hidden state alone."
        )
    raise ModelError(
        f"Layer {index} returns {type(output).__name__}; it must return the hidden state, a "
        "tensor, or a tuple that begins with it."
    )
