"""See which parameters outside the layers a stage really needs.

The stages of a pipeline run the same step, so all of them read what is computed before the layers,
and most throw the result away: it only makes the first layer's input. A watch follows what is
computed from each parameter, through the memory of tensors, until it is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hetero.runtime.unknown import Unknown, written_by

__all__ = ["ReadWatch"]

_LOOKS_AT_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class ReadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which parameters are used in one pass of a micro-batch.

    Args:
        parameters: The stage's parameters outside the layers.
        reads: Names of those that are used are added here.
        is_first: Whether the stage is the first, which uses all that it reads.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], reads: set[str], *, is_first: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses_all = is_first
        """Whether whatever is read is used: on first stages, and from a stage's layers on."""
        self._reads = reads
        self._kept: list[UntypedStorage] = []
        """Memory that may not be used anew while its address stands for what lies there."""
        self._names: dict[int, frozenset[str]] = {}
        for name, parameter in parameters.items():
            self._mark((parameter,), frozenset({name}))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and follow what it reads."""
        names = self._names_in((args, kwargs))
        made = func(*args, **(kwargs or {}))
        if names:
            written = written_by(func, args, kwargs or {})
            reaches_others = any(not self._names_in(item) for item in written)
            if self.uses_all or reaches_others or _looks_at_values(func, args):
                self._reads |= names
            self._mark(_tensors(made), names)
        return made

    def reach_layers(self, given: Any) -> None:
        """Say that the stage's own layers begin, with these arguments."""
        self.use(given)
        self.uses_all = True

    def use(self, value: Any) -> None:
        """Say that the stage's own layers use a value."""
        self._reads |= self._names_in(value)

    def _names_in(self, value: Any) -> frozenset[str]:
        found = (self._names.get(item.untyped_storage()._cdata) for item in _tensors(value))
        return frozenset().union(*(names for names in found if names is not None))

    def _mark(self, tensors: Iterable[Tensor], names: frozenset[str]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._kept.append(storage)
            key = storage._cdata
            self._names[key] = self._names.get(key, frozenset()) | names


def _looks_at_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether what an operation makes is no tensor, or its shape depends on values."""
    if func._schema.name == "aten::index":
        return any(item.dtype is torch.bool for item in _tensors(args[1]))
    return not _LOOKS_AT_VALUES.isdisjoint(func.tags)


def _tensors(value: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and not isinstance(leaf, Unknown)
    ]
