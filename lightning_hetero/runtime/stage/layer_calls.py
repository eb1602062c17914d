"""A call of a layer: find the hidden state in what it is called with, and in what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_hetero.core.errors import ModelError

__all__ = ["LayerCall", "hidden_output", "is_cache"]

_ONE_STAGE = "or use a plan whose pipelines have one stage."


@dataclass
class LayerCall:
    """One call of one of the model's layers by the user's model."""

    index: int
    """The layer's."""
    forward: Callable[..., Any]
    """The layer's own forward."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.given: dict[int | str, Any] = dict(enumerate(self.args))
        """The arguments by position or name."""
        if self.kwargs:
            self.given.update(self.kwargs)

    def run(self) -> Any:
        """Compute the layer."""
        return self.forward(*self.args, **self.kwargs)

    def without_caches(self) -> "LayerCall":
        """Return the call without a cache of keys and values.

        It would hold on to activations, and a layer that is computed again would write into it
        twice. Nothing reads it in training.
        """
        given = {key: None if is_cache(value) else value for key, value in self.given.items()}
        return self._with(given)

    def versions(self) -> list[tuple[int | str, Tensor, int]]:
        """Return how often each tensor among the arguments was changed in place, if that counts.

        Keys, tensors and counts.
        """
        return [
            (key, value, value._version)
            for key, value in self.given.items()
            if isinstance(value, Tensor) and not value.is_inference()
        ]

    def with_argument(self, key: int | str, value: Any) -> "LayerCall":
        """Return the same call with one other argument."""
        return self._with(self.given | {key: value})

    def _with(self, given: Mapping[int | str, Any]) -> "LayerCall":
        args = tuple(given[i] for i in range(len(self.args)))
        kwargs = {name: given[name] for name in self.kwargs}
        return LayerCall(self.index, self.forward, args, kwargs)

    def hidden_argument(self, previous: Tensor | None = None) -> int | str:
        """Return which argument is the hidden state.

        It is what the layer before returned, if that is known. Else it is the first argument that
        may be one.

        Raises:
            ModelError: None of them is.
        """
        if previous is not None:
            for key, value in self.given.items():
                if value is previous:
                    return key
            raise ModelError(
                f"The model computes something between layer {self.index - 1} and layer "
                f"{self.index}, which would be lost where a stage ends there: a layer's input must "
                "be the very tensor that the layer before returned. Move the computation into the "
                "layers, " + _ONE_STAGE
            )
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
    """Return the hidden state in what layer `index` returns.

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
