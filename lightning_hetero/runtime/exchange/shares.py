"""Share the gradient of a weight out among the owners of its rows, in few operations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from lightning_hetero.core.slices import Interval, ParameterSpec

__all__ = ["Shares"]


@dataclass
class Shares:
    """How the gradient of one weight falls to its owners."""

    weight: nn.Parameter
    dim: int
    owners: list[int]
    rows: list[Interval]
    """Of each owner, in order."""
    sizes: list[int]
    """Elements of each."""
    span: Interval | None
    """Where the elements of all lie end to end in memory; None if they don't."""
    is_all: bool
    """Whether these are all of the weight's."""

    @classmethod
    def of(
        cls, weight: nn.Parameter, spec: ParameterSpec, shares: Sequence[tuple[int, Interval]]
    ) -> Self:
        """Take shares of (owner, rows)."""
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
        """Return each owner with its rows of the gradient in one dim, zeros if there is none."""
        gradient = self.weight.grad
        # Detached: a view would keep the tensor of a plan's gradient alive after the plan.
        gradient = torch.zeros_like(self.weight) if gradient is None else gradient.detach()
        if self.span is None:
            rows = self.rows
            cut = [gradient.narrow(self.dim, a, b - a).reshape(-1) for a, b in rows]
            return zip(self.owners, cut, strict=True)
        line = gradient.reshape(-1)
        if not self.is_all:
            line = line[slice(*self.span)]
        return zip(self.owners, line.split_with_sizes(self.sizes), strict=True)
