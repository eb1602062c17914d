"""Judge by shapes whether a function of slices returns a slice of what it returns for the whole.

A function of a slice is allowed if its result is a slice of its result for the whole, cut along one
dim. So it is also called on meta tensors of the whole shapes. If both results have the same shape,
it reduces over the dim that is cut (a norm, a mean). If they differ in two dims, it multiplies only
this rank's rows with each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_hetero.runtime.leaves import tensors_in

__all__ = ["KnownTensor", "cut_dim_of", "made_of_slices"]

Shape = tuple[int, ...]
_KEEPING_ORDER = {"view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as"}
_MOVING = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "detach", "clone"}
_MOVING |= {"get", "zeros_like", "ones_like", "full_like", "empty_like"}
"""Functions that keep each element in its place; "get" is the getter of a tensor's `data`."""
_OF_OPERATORS = {"truediv": "div", "itruediv": "div", "rtruediv": "div", "and": "bitwise_and"}
"""Operators whose functions in torch have other names."""


@dataclass(frozen=True)
class KnownTensor:
    """What is known of a tensor that is made of a parameter's slice."""

    parameter: str
    """The parameter's name."""
    is_cut: bool
    """Whether this rank has only a part of the tensor."""
    whole: Shape | None
    """Shape of the tensor that one device would have; None if its rows' positions are unknown."""


def cut_dim_of(tensor: Tensor, known: KnownTensor) -> int | None:
    """Return the dim along which this rank has a part of a tensor; None if unknown."""
    dims = _dims_that_differ(tuple(tensor.shape), known.whole)
    return dims[0] if len(dims) == 1 else None


def made_of_slices(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Mapping[int, KnownTensor],
    made: Sequence[Tensor],
) -> list[KnownTensor | None]:
    """Return what is known of each tensor that a function has made of slices.

    Args:
        name: Name of the function.
        func: The function.
        args: Its arguments, with sizes of wholes in place of slices' sizes.
        kwargs: Its keyword arguments.
        known: What is known of arguments, by id; at least one is cut.
        made: The tensors of its result.

    Returns:
        One item for each tensor; None if it isn't a part of what one device would have made.
    """
    given = tensors_in((args, kwargs))
    cut = [
        (item, known[id(item)]) for item in given if id(item) in known and known[id(item)].is_cut
    ]
    tensor, first = cut[0]
    shapes = {item.shape for item in given if item.ndim}
    goes_by_elements = name in _MOVING or _is_pointwise(name)
    if len(shapes) == 1 and goes_by_elements and all(item.shape in shapes for item in made):
        return [first] * len(made)
    wholes = _shapes_made(func, args, kwargs, known)
    if wholes is None or len(wholes) != len(made):
        # Other tensors may have the slice's own sizes: then only pointwise functions are known.
        fits = [item.shape == tensor.shape and goes_by_elements for item in made]
        return [first if fit else None for fit in fits]
    return [_known_of(name, item, whole, cut) for item, whole in zip(made, wholes, strict=True)]


def _known_of(
    name: str, made: Tensor, whole: Shape, cut: Sequence[tuple[Tensor, KnownTensor]]
) -> KnownTensor | None:
    own, first = tuple(made.shape), cut[0][1]
    dims = _dims_that_differ(own, whole)
    if len(dims) != 1:
        return None
    dim = dims[0]
    for tensor, known in cut:
        source = cut_dim_of(tensor, known)
        if source is None or known.whole is None:
            continue
        length, whole_length = tensor.shape[source], known.whole[source]
        if name in _KEEPING_ORDER:
            # The slice stays one run of elements per index of the dims before the one that is cut.
            is_run = prod(own[:dim]) == prod(tensor.shape[:source])
            is_plain = is_run and own[dim] * whole_length == whole[dim] * length
        else:
            is_plain = (own[dim], whole[dim]) == (length, whole_length)
        if is_plain:
            return replace(known, whole=whole)
    largest = max(item.numel() for item, _ in cut)
    is_as_large = made.numel() >= largest if largest else not made.numel()
    return replace(first, whole=None) if is_as_large else None


def _shapes_made(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Mapping[int, KnownTensor],
) -> list[Shape] | None:
    """Return the shapes of a function's results for whole tensors; None if unknown."""
    items = [item for item in tensors_in((args, kwargs)) if id(item) in known]
    alike = {tuple(item.shape): known[id(item)].whole for item in items}
    if None in alike.values():
        return None
    for others in ({}, alike):

        def form_of(tensor: Tensor, others: Any = others) -> _Form:
            own = tuple(tensor.shape)
            shape = known[id(tensor)].whole if id(tensor) in known else others.get(own, own)
            return _Form(shape or (), tensor.dtype)

        forms = tree_map_only(Tensor, form_of, (tuple(args), dict(kwargs)))
        try:
            made = _shapes_called(func, forms[0], tuple(forms[1].items()))
        except TypeError:  # A list can't be hashed for the cache.
            made = _shapes_called.__wrapped__(func, forms[0], tuple(forms[1].items()))
        if made is not None:
            return list(made)
    return None


@dataclass(frozen=True)
class _Form:
    """Stands for a tensor of this shape and dtype."""

    shape: Shape
    dtype: torch.dtype


@lru_cache(maxsize=1024)
def _shapes_called(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[Shape, ...] | None:
    def without_values(form: _Form) -> Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device="meta")

    given = tree_map_only(_Form, without_values, (args, dict(kwargs)))
    try:
        with torch.no_grad():
            result = func(*given[0], **given[1])
    except Exception:
        return None  # Whatever the reason: the shapes are unknown then.
    return tuple(tuple(item.shape) for item in tensors_in(result))


def _dims_that_differ(own: Shape, whole: Shape | None) -> list[int]:
    if whole is None or len(own) != len(whole):
        return []
    return [dim for dim, sizes in enumerate(zip(own, whole, strict=True)) if sizes[0] != sizes[1]]


@cache
def _is_pointwise(name: str) -> bool:
    """Whether torch tags a function, or the function of an operator, as pointwise."""
    for prefix in ("", "i", "r"):
        packet: Any = getattr(
            torch.ops.aten, _OF_OPERATORS.get(name, name).removeprefix(prefix), None
        )
        overloads = packet.overloads() if hasattr(packet, "overloads") else ()
        if any(torch.Tag.pointwise in getattr(packet, item).tags for item in overloads):
            return True
    return False
