"""Count the bytes that autograd saves for the backward pass, on any kind of device alike."""

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["SavedBytes"]


class SavedBytes(saved_tensors_hooks):
    """Counts what is saved inside its context, each storage once.

    ::

        with SavedBytes(without=layer.parameters()) as saved:
            output = layer(hidden)
        print(saved.total)  # As long as `output` lives, so do they.

    Args:
        without: Tensors that there are in any case; what lies in their memory doesn't count.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in without}
        self._sizes: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedBytes":
        super().__enter__()
        return self

    @property
    def total(self) -> int:
        """Bytes saved so far."""
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor
