"""A call of a layer, and which of its arguments and outputs is the hidden state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_hetero.core.errors import ModelError

__all__ = ["LayerCall", "hidden_output", "is_cache"]

_ONE_STAGE = "or use a plan whose pipelines have one stage."


@dataclass
class LayerCall:
    """One call of one of the model's layers by the user's model."""

    index: int
    """Index of the layer."""
    forward: Callable[..., Any]
    """The layer's own forward."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def given(self) -> dict[int | str, Any]:
        """The arguments by position or name."""
        given: dict[int | str, Any] = dict(enumerate(self.args))
        if self.kwargs:
            given.update(self.kwargs)
        return given

    def run(self) -> Any:
        """Compute the layer."""
        return self.forward(*self.args, **self.kwargs)

    def without_caches(self) -> "LayerCall":
        """Return the call with None for any cache of keys and values: training doesn't read it.

        It would keep activations alive, and a recomputed layer would write into it twice.
        """
        args = tuple(None if is_cache(value) else value for value in self.args)
        kwargs = {name: None if is_cache(value) else value for name, value in self.kwargs.items()}
        return LayerCall(self.index, self.forward, args, kwargs)

    def argument(self, key: int | str) -> Any:
        """Return the argument at a position or with a name."""
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments."""
        return (*self.args, *self.kwargs.values()) if self.kwargs else self.args

    def with_argument(self, key: int | str, value: Any) -> "LayerCall":
        """Return the same call with one argument replaced."""
        if isinstance(key, int):
            args = (*self.args[:key], value, *self.args[key + 1 :])
            return LayerCall(self.index, self.forward, args, self.kwargs)
        return LayerCall(self.index, self.forward, self.args, {**self.kwargs, key: value})

    def hidden_argument(self, previous: Tensor | None = None) -> int | str:
        """Return the position or name of the argument that is the hidden state.

        Args:
            previous: The tensor that it must be, returned by the layer before. If None, it is the
                first argument that may be one, floating-point tensors before others.

        Raises:
            ModelError: There is none.
        """
        if previous is not None:
            if self.args and self.args[0] is previous:
                return 0
            for key, value in self.given.items():
                if value is previous:
                    return key
            raise ModelError(
                f"The model computes something between layer {self.index - 1} and layer "
                f"{self.index}, which would be lost where a stage ends there: a layer's input must "
                "be the very tensor that the layer before returned. Hooks of layers that change "
                "it are computed there, too. Move the computation into the layers, " + _ONE_STAGE
            )
        first = self.args[0] if self.args else None
        if isinstance(first, Tensor) and first.is_floating_point():
            _check_plain(first)
            return 0
        tensors = {key: value for key, value in self.given.items() if isinstance(value, Tensor)}
        likely = [p for p, v in tensors.items() if v.is_floating_point() or v.is_complex()]
        for key in (*likely, *tensors):
            _check_plain(tensors[key])
            return key
        kinds = {key: type(value).__name__ for key, value in self.given.items()}
        raise ModelError(
            f"Layer {self.index} is called with {kinds}; one argument must be the hidden state, a "
            "tensor."
        )


def hidden_output(output: Any, index: int) -> Tensor:
    """Return the hidden state in the output of layer `index`: a tensor, or the first of a tuple.

    Raises:
        ModelError: There is none.
    """
    if type(output) is Tensor and not output.is_nested:
        return output
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor):
        _check_plain(first)
        return first
    raise ModelError(
        f"Layer {index} returns {type(output).__name__}; it must return the hidden state, a "
        "tensor, or a tuple that begins with it."
    )


def is_cache(value: object) -> bool:
    """Return whether a value is a Hugging Face cache, without importing transformers."""
    return any(
        kind.__name__ == "Cache" and kind.__module__ == "transformers.cache_utils"
        for kind in type(value).__mro__
    )


def _check_plain(hidden: Tensor) -> None:
    """Refuse a nested tensor."""
    if hidden.is_nested:
        raise ModelError(
            "The layers get a nested tensor, which can't travel between stages. Build "
            "nn.TransformerEncoder with enable_nested_tensor=False."
        )
