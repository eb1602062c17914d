"""Divide gradients among the owners of their rows, in few operations.

For 49 weights with 12,000 elements in total, owned by two ranks, `Shares` takes 150 µs because of
its 200 calls, a `GradientLine` 40. That copies all elements twice, so it is for small weights.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from lightning_hetero.core.slices import Interval, ParameterSpec
from lightning_hetero.runtime.exchange.parcel_table import Parcel
from lightning_hetero.runtime.slices.weights import narrow_rows

__all__ = ["GradientLine", "Shares"]

_LINE_NUMEL = 2**14
"""Most elements of all weights for which gradients are copied into a line: 16 bytes for each."""


@dataclass
class Shares:
    """How the gradient of one weight is divided among owners."""

    weight: nn.Parameter
    dim: int
    owners: list[int]
    rows: list[Interval]
    """The rows of each owner, in order."""
    sizes: list[int]
    """Elements of each owner's rows."""
    span: Interval | None
    """The elements of all rows, if they lie end to end in memory; else None."""
    is_all: bool
    """Whether these are all elements of the weight."""

    @classmethod
    def of(
        cls, weight: nn.Parameter, spec: ParameterSpec, shares: Sequence[tuple[int, Interval]]
    ) -> Self:
        """Return the shares of a weight, given as (owner, rows)."""
        shares = sorted(shares, key=lambda item: item[1])
        owners, rows = [owner for owner, _ in shares], [rows for _, rows in shares]
        sizes = [(stop - start) * spec.row_numel for start, stop in rows]
        is_chain = all(one[1] == other[0] for one, other in pairwise(rows))
        span = None
        if is_chain and (spec.cut_dim == 0 or sizes == [weight.numel()]):
            span = rows[0][0] * spec.row_numel, rows[-1][1] * spec.row_numel
        is_all = span == (0, weight.numel())
        return cls(weight, spec.cut_dim, owners, rows, sizes, span, is_all)

    def pieces(self) -> Iterable[tuple[int, Tensor]]:
        """Return each owner with its rows of the gradient in one dim, zeros without a gradient."""
        gradient = self.weight.grad
        # Detached: a view would keep the gradient alive after its plan is gone.
        gradient = torch.zeros_like(self.weight) if gradient is None else gradient.detach()
        if self.span is None:
            rows = self.rows
            cut = [gradient.narrow(self.dim, a, b - a).reshape(-1) for a, b in rows]
            return zip(self.owners, cut, strict=True)
        line = gradient.reshape(-1)
        if not self.is_all:
            line = line[slice(*self.span)]
        return zip(self.owners, line.split_with_sizes(self.sizes), strict=True)


class GradientLine:
    """Lays small weights' gradients end to end, and takes all rows of each parcel from there.

    Args:
        weights: The weights, by their index in the unit.
        specs: The unit's parameters.
        parcels: The parcels that leave this rank, and those that stay.
    """

    def __init__(
        self,
        weights: Mapping[int, nn.Parameter],
        specs: Sequence[ParameterSpec],
        parcels: Sequence[Parcel],
    ) -> None:
        self._weights = [*weights.values()]
        ends = accumulate(weight.numel() for weight in self._weights)
        device = self._weights[0].device
        places = {
            index: torch.arange(end - weight.numel(), end, device=device).view(weight.shape)
            for (index, weight), end in zip(weights.items(), ends, strict=True)
        }
        self._places = {
            parcel.destination: torch.cat(
                [
                    narrow_rows(places[part.index], specs[part.index], *part.held).reshape(-1)
                    for part in parcel.parts
                ]
            )
            for parcel in parcels
        }
        """The indices, in the line, of the elements for each destination."""

    @staticmethod
    def fits(weights: Collection[Tensor]) -> bool:
        """Whether there are several weights, or gradients, of one dtype, small enough to pay."""
        numel = sum(map(Tensor.numel, weights))
        are_alike = len({weight.dtype for weight in weights}) == 1
        return are_alike and len(weights) > 1 and numel <= _LINE_NUMEL

    def parts(self) -> dict[int, Tensor]:
        """Return the packed parcel of each destination; zeros for weights without a gradient."""
        gradients = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in self._weights
        ]
        line: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
        return {peer: line.index_select(0, places) for peer, places in self._places.items()}
