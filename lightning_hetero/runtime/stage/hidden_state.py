"""Find the hidden state in what a layer is called with, and in what it returns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_hetero.core.errors import ModelError

__all__ = ["check_plain", "hidden_output", "hidden_place", "named_arguments"]

_ONE_STAGE = "or use a plan whose pipelines have one stage."


def named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """Return a call's arguments by place or name."""
    named: dict[int | str, Any] = dict(enumerate(args))
    return named | kwargs


def hidden_place(given: Mapping[int | str, Any], previous: Tensor | None, index: int) -> int | str:
    """Return which argument of layer `index` is the hidden state.

    It is what the layer before returned. Of the first layer's it is the first that may be one.

    Raises:
        ModelError: None of them is.
    """
    if previous is not None:
        for place, value in given.items():
            if value is previous:
                return place
        raise ModelError(
            f"The model computes something between layer {index - 1} and layer {index}, which "
            "would be lost where a stage ends there: a layer's input must be the very tensor that "
            "the layer before returned. Move the computation into the layers, " + _ONE_STAGE
        )
    tensors = {place: value for place, value in given.items() if isinstance(value, Tensor)}
    likely = [p for p, v in tensors.items() if v.is_floating_point() or v.is_complex()]
    for place in (*likely, *tensors):
        check_plain(tensors[place])
        return place
    kinds = {place: type(value).__name__ for place, value in given.items()}
    raise ModelError(
        f"Layer {index} is called with {kinds}; one argument must be the hidden state, a tensor."
    )


def hidden_output(output: Any, index: int) -> Tensor:
    """Return the hidden state in what layer `index` returns.

    Raises:
        ModelError: There is none.
    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor):
        check_plain(first)
        return first
    raise ModelError(
        f"Layer {index} returns {type(output).__name__}; it must return the hidden state, a "
        "tensor, or a tuple that begins with it."
    )


def check_plain(hidden: Tensor) -> None:
    """Refuse a nested tensor."""
    if hidden.is_nested:
        raise ModelError(
            "The layers get a nested tensor, which can't travel between stages. Build "
            "nn.TransformerEncoder with enable_nested_tensor=False."
        )
