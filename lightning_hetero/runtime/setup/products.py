"""Selective recomputation: keep what matrix products and attention return, compute the rest again.

These operations take nearly all of a layer's time, and what they return is about half of what
autograd keeps. So recomputing everything else saves the other half of the memory for little time.
It is done by torch's own checkpointing. What batched matrix products return isn't kept: where
attention isn't a single operation, these are its scores, which grow with the square of the length.

`SavedBytes` counts the bytes that autograd saves for the backward pass, on any kind of device.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


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


_MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm"}


class KeptProducts:
    """Recomputes one layer, except for the products whose outputs its backward needs.

    In the first pass all products are kept. The recomputation in its backward stops as soon as it
    has everything that autograd saves, so later passes don't keep the products behind that point,
    such as the layer's last one.
    """

    def __init__(self) -> None:
        self.num_needed: int | None = None
        """Number of products up to the last one that backward needs; None before the first one."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a function's result; its backward recomputes all but products."""
        return checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        most, num_made = self.num_needed, 0

        def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal num_made
            if not is_product(operation, args, kwargs):
                return CheckpointPolicy.PREFER_RECOMPUTE
            num_made += 1
            is_kept = most is None or num_made <= most
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        keeping, giving = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return keeping, giving if most is not None else self._learning(giving)

    @contextmanager
    def _learning(self, giving: AbstractContextManager[Any]) -> Iterator[None]:
        with giving, _Products() as seen:
            try:
                yield
            finally:
                self.num_needed = len(seen.sizes)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the bytes that each product returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if is_product(func, args, kwargs or {}):
            self.sizes.append(sum(i.nbytes for i in tree_leaves(made) if isinstance(i, Tensor)))
        return made


def bytes_of_products(layer: Callable[[], Any]) -> int:
    """Return the bytes that the products of a layer return, without its last one.

    The last product is added to the residual, so no backward needs its output.
    """
    with _Products() as seen:
        layer()
    return sum(seen.sizes[:-1])


def is_product(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is a matrix product, or attention that draws no random numbers.

    Attention with dropout must run again, else later operations would draw other numbers.
    """
    is_kind, dropout_at = _look_at(operation)
    if not is_kind or dropout_at is None:
        return is_kind
    return not (args[dropout_at] if dropout_at < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _look_at(operation: Any) -> tuple[bool, int | None]:
    """Return whether it is a product or attention, and the index of `dropout_p` if it has one."""
    schema: Any = getattr(operation, "_schema", None)
    name = "" if schema is None else schema.name
    if "attention" not in name and "attn" not in name:
        return name in _MATRIX_PRODUCTS, None
    names = [argument.name for argument in schema.arguments]
    return True, names.index("dropout_p") if "dropout_p" in names else None
