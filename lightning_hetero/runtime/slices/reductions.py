"""Reductions over tensors whose rows are on several ranks: norms, sums, means and the like.

Each is computed from this rank's elements and then over all ranks. Elements that standbys have,
too, are added once for each rank that has them, and the sum is divided by the number of these
ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_AddUp = Callable[[Tensor, str], Tensor]
"""Returns the "sum", "max" or "min" of a tensor over all ranks."""
_NORMS = {"norm": 2, "linalg_vector_norm": 2, "linalg_norm": 2}
"""Norms, with the position of their argument `dim`; other reductions have it at 1."""
_KNOWN_NORMS = {None: 2.0, "fro": 2.0, "inf": torch.inf}


def sum_of_powers(
    parts: Sequence[Tensor], order: float, *, device: torch.device | None = None
) -> Tensor:
    """Return Σ |x| ** order over tensors, in float64; their greatest |x| if `order` is infinite."""
    if device is None:
        device = parts[0].device if parts else torch.device("cpu")
    filled = [part for part in parts if part.numel()]
    found = torch.zeros((), dtype=torch.float64, device=device)
    for part in filled:
        norm = torch.linalg.vector_norm(part, order, dtype=_wide(part)).double()
        found = torch.maximum(found, norm) if order == torch.inf else found + norm**order
    return found


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A call that reduces a tensor."""

    name: str
    dims: list[int] | None
    """The dims over which it reduces; None for all of them."""
    keeps_dims: bool
    order: float | None
    """Kind of the norm; None if it is none."""
    correction: float = 1.0
    """What a variance subtracts from the number of elements."""

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Reduction | None":
        """Return the reduction that a call is; None if it is none."""
        if name not in REDUCTIONS and name not in _NORMS and name not in _UNKNOWN:
            return None
        place = _NORMS.get(name, 1)
        given = [kwargs.get(key) for key in ("dim", "axis", "other") if kwargs.get(key) is not None]
        dim = given[0] if given else args[place] if len(args) > place else None
        if isinstance(dim, Tensor):
            return None  # As in `torch.max(x, y)`, which goes element by element.
        correction = float(kwargs.get("correction", kwargs.get("unbiased", 1)) or 0)
        if isinstance(dim, bool):  # `x.std(False)`
            correction, dim = float(dim), None
        keeps = kwargs.get("keepdim", len(args) > place + 1 and args[place + 1] is True)
        order: Any = None
        if name in _NORMS:
            order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
            is_vector = name != "linalg_norm" or order is None or args[0].ndim == 1
            order = _KNOWN_NORMS.get(order, order)
            name = "norm" if is_vector and isinstance(order, int | float) and order > 0 else "nuc"
        ndim = max(args[0].ndim, 1)
        listed = [dim] if isinstance(dim, int) else dim
        return cls(
            name=name,
            dims=[item % ndim for item in listed] if listed else None,
            keeps_dims=bool(keeps),
            order=float(order) if order is not None and name == "norm" else None,
            correction=correction,
        )

    @property
    def is_known(self) -> bool:
        """Whether it can be computed from parts."""
        is_indexed = self.name in ("max", "min") and self.dims is not None
        return self.name in REDUCTIONS and not is_indexed

    def of_whole(self, own: Tensor, copies: int, add_up: _AddUp) -> Tensor:
        """Return the result for the whole tensor; collective.

        Args:
            own: This rank's elements.
            copies: How many ranks have each element.
            add_up: See `_AddUp`.
        """

        def add_once(found: Tensor, operation: str) -> Tensor:
            total = add_up(found, operation)
            if operation != "sum" or copies == 1:
                return total
            return total / copies if total.is_floating_point() else total // copies

        return REDUCTIONS[self.name](own, self, add_once)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _total(own: Tensor, reduction: Reduction | None, add_up: _AddUp) -> Tensor:
    """Return the sum over the reduction's dims and all ranks."""
    dims, keeps = (None, False) if reduction is None else (reduction.dims, reduction.keeps_dims)
    found = own.sum(dims, keepdim=keeps)
    return add_up(found.double() if own.is_floating_point() else found, "sum")


def _sum(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    found: Tensor = _total(own, reduction, add_up)
    return found.to(own.dtype) if own.is_floating_point() else found


def _mean(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    number = _total(torch.ones_like(own, dtype=torch.int64), reduction, add_up)
    return (_total(own, reduction, add_up) / number).to(own.dtype)


def _variance(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    keeping = Reduction(name="mean", dims=reduction.dims, keeps_dims=True, order=None)
    wide = own.double()
    mean = _mean(wide, keeping if reduction.dims else None, add_up)
    number = _total(torch.ones_like(own, dtype=torch.int64), reduction, add_up)
    squares = _total((wide - mean).square(), reduction, add_up)
    found = squares / (number - reduction.correction)
    root: Tensor = found.sqrt() if reduction.name == "std" else found
    return root.to(own.dtype)


def _norm(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    order = reduction.order
    if order == torch.inf:
        return _most(own.abs(), reduction, add_up)
    dims, keeps = reduction.dims, reduction.keeps_dims
    norm = torch.linalg.vector_norm(own, order, dims, keeps, dtype=_wide(own)).double()
    found: Tensor = add_up(norm**order, "sum") ** (1 / order)
    return found.to(own.dtype)


def _most(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    lowest = -torch.inf if own.is_floating_point() else 0 if own.dtype is torch.bool else -(2**31)
    dims, keeps = (reduction.dims, reduction.keeps_dims) if reduction.dims else ((), False)
    if own.numel():
        found = own.amax(dims, keepdim=keeps)
    else:
        shape = own.sum(dims or None, keepdim=keeps).shape
        found = torch.full(shape, lowest, dtype=own.dtype, device=own.device)
    wide = found.double() if own.is_floating_point() else found.long()
    return add_up(wide, "max").to(own.dtype)


def _least(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    signed = own if own.is_floating_point() else own.long()
    return (-_most(-signed, reduction, add_up)).to(own.dtype)


def _any(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    return _total(own != 0, reduction, add_up) > 0


def _all(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    return _total(own == 0, reduction, add_up) == 0


def _count(own: Tensor, reduction: Any, add_up: _AddUp) -> Tensor:
    return _total(own != 0, reduction, add_up)


REDUCTIONS: dict[str, Callable[[Tensor, Any, _AddUp], Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "norm": _norm,
    "var": _variance,
    "std": _variance,
    "max": _most,
    "amax": _most,
    "min": _least,
    "amin": _least,
    "any": _any,
    "all": _all,
    "count_nonzero": _count,
}
"""Reductions that can be computed of parts, by the names of torch's functions."""
_UNKNOWN = {"prod", "median", "quantile", "argmax", "argmin", "logsumexp", "aminmax", "nansum"}
"""Other reductions. They can't be computed from parts, so they are allowed only if each row is
reduced by itself."""
