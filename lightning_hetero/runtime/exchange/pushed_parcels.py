"""Push units whose owners and holders may be any ranks: send gradients, and sum them at the owners.

Small weights are picked from their unit's gradients end to end by one call, and summed by one call,
instead of one for each parameter: each call takes as long as some thousand elements do.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from lightning_hetero.runtime.exchange.messages import sum_dtype
from lightning_hetero.runtime.exchange.parcels import (
    Parcel,
    ParcelUnit,
    Part,
    SentRows,
    split_line,
)
from lightning_hetero.runtime.slices.weights import narrow_rows

_SMALL_NUMEL = 2**14
"""Largest number of elements of the weights whose gradients are picked by index: an index takes 8
bytes."""


class _OwnRows:
    """Picks the rows of this rank's gradients that a parcel takes.

    Args:
        parts: For each part the weight, and which rows of its gradient are taken: cut dim, first
            row, number of rows.
    """

    def __init__(self, parts: Sequence[tuple[nn.Parameter, int, int, int]]) -> None:
        self._parts = parts
        self.elements: Tensor | None = None
        """The places of the parcel's elements in all gradients end to end; None if weights aren't
        small."""
        sizes = [shard.numel() for shard, *_ in parts]
        if sum(sizes) <= _SMALL_NUMEL:
            numbers = torch.split(torch.arange(sum(sizes), device=parts[0][0].device), sizes)
            of_parts = zip(numbers, parts, strict=True)
            rows = [_narrow(all_.view_as(i), *rows) for all_, (i, *rows) in of_parts]
            self.elements = torch.cat([item.reshape(-1) for item in rows])

    def __call__(self) -> list[Tensor]:
        """Return each part's rows, or all parts as one line; zeros where there is no gradient."""
        gradients = [
            torch.zeros_like(shard) if shard.grad is None else shard.grad
            for shard, *_ in self._parts
        ]
        if self.elements is not None:
            line: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
            return [line.index_select(0, self.elements)]
        pairs = zip(gradients, self._parts, strict=True)
        return [_narrow(gradient, *rows) for gradient, (_, *rows) in pairs]


def _narrow(tensor: Tensor, dim: int, first: int, count: int) -> Tensor:
    return (tensor if tensor.ndim else tensor.view(1)).narrow(dim, first, count)


class _Summand(NamedTuple):
    """One of the parcels that an owner adds up.

    It arrives from a peer, or is made of this rank's own gradients.
    """

    parcel: Parcel
    names: list[str]
    """The parameter of each part."""
    like: list[Tensor]
    """Tensors on the meta device, shaped like the parts."""
    own: _OwnRows | None
    """None if the parcel arrives from a peer."""

    @property
    def is_line(self) -> bool:
        """Whether it is one tensor that has all rows of each parameter that this rank keeps."""
        is_line = self.own is None or self.own.elements is not None
        return is_line and all(part.is_whole_slice for part in self.parcel.parts)


class PushedParcels(ParcelUnit):
    """A unit whose gradients go to their owners as parcels."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        return self._names(self.parcels.leaving)

    def post(self) -> None:
        """Post the gradients that leave this rank, which must be final; others needn't be."""
        self._exchange([SentRows([peer], rows()) for peer, rows in self._leaving])

    @cached_property
    def _leaving(self) -> list[tuple[int, _OwnRows]]:
        """For each parcel that leaves, its destination and the gradients that it takes."""
        return [(item.destination, self._own_rows(item)) for item in self.parcels.leaving]

    def _own_rows(self, parcel: Parcel) -> _OwnRows:
        specs = ((self._spec(part), *part.held) for part in parcel.parts)
        shards = self.weights.shards
        return _OwnRows([(shards[spec.name], spec.cut_dim, a, b - a) for spec, a, b in specs])

    @cached_property
    def _summands(self) -> list[_Summand]:
        """All parcels that arrive or are kept, in order of pipeline, then rank."""
        found = []
        for parcel in self.parcels.summed:
            names = [self._spec(part).name for part in parcel.parts]
            like = [self._kept_rows(self.store.masters, part) for part in parcel.parts]
            shapes = [torch.empty(rows.shape, device="meta") for rows in like]
            is_own = parcel.source == self.store.global_rank
            own = self._own_rows(parcel) if is_own else None
            found.append(_Summand(parcel, names, shapes, own))
        return found

    def wait(self) -> None:
        """Wait for the other holders' gradients."""
        self._wait_for_arrivals()

    def sum(self) -> dict[str, Tensor]:
        """Return the gradients of what this rank keeps, summed in order of pipeline, then rank.

        Where a standby must get the same sums, bit for bit, this rank's own gradients are rounded
        like those that travel, and every sum starts from zero: 0 + -0 is 0, but -0 alone stays -0.
        """
        if self._are_lines:
            return self._sum_lines()
        is_kept_twice = self.unit.kind.has_standbys
        totals: dict[str, Tensor] = {}
        for parcel, names, like, own in self._summands:
            if own is None:
                pieces = self._take(parcel, like)
            else:
                pieces = own()
                if own.elements is not None:
                    pieces = split_line(pieces[0], like)
                pairs = zip(pieces, like, strict=True)
                pieces = [i if i.ndim == rows.ndim else i.reshape(rows.shape) for i, rows in pairs]
                if is_kept_twice:
                    pieces = [piece.to(self.options.dtype) for piece in pieces]
            into, added = [], []
            for part, name, piece in zip(parcel.parts, names, pieces, strict=True):
                if name not in totals:
                    dtype = self._sum_dtypes[name]
                    if part.is_whole_slice and not is_kept_twice:
                        # Not used otherwise in this iteration, so it can become the sum itself.
                        totals[name] = piece.detach().to(dtype)  # No view of what it's part of.
                        continue
                    shape = self.store.masters[name].shape
                    totals[name] = torch.zeros(shape, dtype=dtype, device=piece.device)
                into.append(self._kept_rows(totals, part))
                added.append(piece)
            if into:
                torch._foreach_add_(into, added)
        return totals

    @cached_property
    def _are_lines(self) -> bool:
        found = self._summands
        is_one = (
            len({tuple(item.names) for item in found}) == len({*self._sum_dtypes.values()}) == 1
        )
        is_rounded = self.unit.kind.has_standbys
        return is_one and not is_rounded and all(item.is_line for item in found)

    def _sum_lines(self) -> dict[str, Tensor]:
        """Sum parcels that have the same elements in the same order, without splitting them."""
        lines = [
            self._arrived.pop(parcel.source) if own is None else own()[0]
            for parcel, _, _, own in self._summands
        ]
        _, names, like, _ = self._summands[0]
        total = lines[0].detach().to(self._sum_dtypes[names[0]])
        for line in lines[1:]:
            total += line
        return dict(zip(names, split_line(total, like), strict=True))

    @cached_property
    def _sum_dtypes(self) -> dict[str, torch.dtype]:
        masters = {spec.name: self.store.masters[spec.name] for spec in self.unit.specs}
        return {name: sum_dtype([master]) for name, master in masters.items()}

    def _kept_rows(self, tensors: Mapping[str, Tensor], part: Part) -> Tensor:
        """Return a part's rows of tensors that are shaped like this rank's slices."""
        spec = self._spec(part)
        own = tensors[spec.name]
        return own if part.is_whole_slice else narrow_rows(own, spec, *part.owned)
