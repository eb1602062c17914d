"""Count the bytes that autograd saves for the backward pass, on any kind of device alike."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts the bytes that autograd saves inside its context, each storage once.

    ::

        with SavedBytes(without=layer.parameters()) as saved:
            output = layer(hidden)
        print(saved.total)  # Bytes that stay in use as long as `output` lives.

    Args:
        without: Tensors that exist anyway; tensors that share their storages don't count.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in without}
        self._sizes: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)

    @property
    def total(self) -> int:
        """Bytes saved so far."""
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # Else a node that saves its own output would keep itself alive.
