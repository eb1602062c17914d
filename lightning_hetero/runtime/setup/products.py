"""Keep the outputs of matrix products and attention, for a call that recomputes everything else.

They take nearly all of a layer's time, and are about half of what autograd keeps of it. Outputs of
batched matrix products aren't kept: they are the scores of attention that isn't one operation.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_hetero.core.errors import ModelError

__all__ = ["Products"]

_MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm"}


class _Made(NamedTuple):
    """The outputs of one operation."""

    operation: Any
    leaves: list[Any]
    """Its tensors, replaced by None in `hand_over`, and other values."""
    form: TreeSpec
    versions: list[int]
    """Version of each tensor, which a change in place increments."""


class Products:
    """The outputs of the matrix products and attention of one call, in order."""

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._num_needed = 0

    def record(self) -> TorchDispatchMode:
        """Return a context that records the outputs."""
        return _Recording(self._made)

    def note_saved(self) -> None:
        """Note that autograd saves a tensor: recomputing it needs all outputs up to now."""
        self._num_needed = len(self._made)

    def hand_over(self) -> list[Tensor]:
        """Return the needed output tensors, and hold them no longer.

        Raises:
            ModelError: One was changed in place after it was recorded.
        """
        del self._made[self._num_needed :]
        tensors = []
        for made in self._made:
            found = [leaf for leaf in made.leaves if isinstance(leaf, Tensor)]
            if [tensor._version for tensor in found] != made.versions:
                raise _changed(made.operation)
            made.leaves[:] = [None if isinstance(x, Tensor) else x for x in made.leaves]
            tensors += found
        return tensors

    def give(self, tensors: Sequence[Tensor]) -> TorchDispatchMode:
        """Return a context in which operations return `tensors`, those from `hand_over`."""
        return _Giving(self._made, tensors)


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, made: list[_Made]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made


class _Recording(_Watching):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if _is_product(func, args, kwargs):
            leaves, form = tree_flatten(output)
            leaves = [_apart(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
            self._made.append(_Made(func, leaves, form, versions))
        elif getattr(func, "namespace", "") == "c10d":
            self._refuse_changed(args[0])
        return output

    def _refuse_changed(self, written: Any) -> None:
        """Raise ModelError if a collective writes to a recorded output; that changes no version.

        `written` is the collective's first argument: the tensors that it writes to.
        """
        given = {x.untyped_storage()._cdata for x in tree_leaves(written) if isinstance(x, Tensor)}
        for made in self._made:
            if any(
                isinstance(x, Tensor) and x.untyped_storage()._cdata in given for x in made.leaves
            ):
                raise _changed(made.operation)


class _Giving(_Watching):  # type: ignore[no-untyped-call]
    def __init__(self, made: list[_Made], tensors: Sequence[Tensor]) -> None:
        super().__init__(made)
        self._tensors = iter(tensors)
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_product(func, args, kwargs):
            return func(*args, **kwargs)
        made = self._made[self._next] if self._next < len(self._made) else None
        if made is None or made.operation is not func:
            first = "no more products" if made is None else str(made.operation)
            raise ModelError(
                f"A layer that was computed again in backward calls {func} where it called {first} "
                "the first time. A selectively recomputed layer must do the same both times."
            )
        self._next += 1
        leaves = [next(self._tensors).detach() if leaf is None else leaf for leaf in made.leaves]
        return tree_unflatten(leaves, made.form)


def _is_product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is a matrix product, or attention that draws no random numbers.

    Attention with dropout must run again, else later operations would draw other numbers.
    """
    is_product, dropout_at = _look_at(func)
    if not is_product or dropout_at is None:
        return is_product
    return not (args[dropout_at] if dropout_at < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _look_at(func: Any) -> tuple[bool, int | None]:
    """Return whether it is a product or attention, and the index of `dropout_p` if it has one."""
    schema: Any = getattr(func, "_schema", None)
    name = "" if schema is None else schema.name
    if "attention" not in name and "attn" not in name:
        return name in _MATRIX_PRODUCTS, None
    names = [argument.name for argument in schema.arguments]
    return True, names.index("dropout_p") if "dropout_p" in names else None


def _apart(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor that stays out of the autograd graph."""
    # With this dispatch key, the alias shares the tensor's version counter.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _changed(operation: Any) -> ModelError:
    return ModelError(
        f"A selectively recomputed layer changes in place what {operation} returned, which is kept "
        "for its backward. Let it make a new tensor, or recompute the whole layer."
    )
