"""Push units with any owners and holders: send gradients as parcels, and sum them at the owners."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.runtime.exchange.messages import Sums
from lightning_hetero.runtime.exchange.parcel_table import Parcel, Part
from lightning_hetero.runtime.exchange.parcels import ParcelUnit, SentPart
from lightning_hetero.runtime.slices.weights import narrow_rows

__all__ = ["GradientLine", "PushedParcels"]

_LINE_NUMEL = 2**14
"""Most elements of all weights for which gradients are copied into a line."""


class GradientLine:
    """Lays small weights' gradients end to end, and takes all rows of each parcel from there.

    That takes a quarter of the calls, and 16 bytes for each element, so it is for small weights.

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


class _Slices(NamedTuple):
    """Slices that are summed as wholes."""

    names: list[str]
    masters: list[nn.Parameter]
    dtype: torch.dtype
    """The dtype of the sums."""


class PushedParcels(ParcelUnit):
    """A unit whose gradients go to their owners as parcels."""

    _buffers: dict[int, Tensor]
    """Gradients that have arrived, by source."""
    _parts: Mapping[int, Tensor] = MappingProxyType({})
    """Parcels packed by a `GradientLine`, by destination."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        return self._names(self.parcels.indices_leaving)

    def gradients(self) -> list[Tensor]:
        """Return this rank's own gradients of the unit, in as few tensors as possible."""
        if self._line is not None:
            return [*self._go_through(self._line).values()]
        return [item.grad for item in self._held.values() if item.grad is not None]

    def post(self) -> None:
        """Post the gradients that leave, which must be final; others may not be computed yet."""
        self._parts = MappingProxyType({})  # An iteration that failed may have left its own.
        sent = [
            SentPart([parcel.destination], parcel.numel, self._rows(parcel))
            for parcel in self.parcels.leaving
        ]
        sources = [parcel.source for parcel in self.parcels.arriving]
        self._buffers = dict(zip(sources, self._exchange(sent), strict=True))

    def _packed(self, rows: Sequence[Tensor]) -> Tensor:
        # A line's parcel is a new tensor already, so it can be sent as it is.
        is_packed = self._line is not None and [row.dtype for row in rows] == [self.options.dtype]
        return rows[0] if is_packed else super()._packed(rows)

    def _rows(self, parcel: Parcel) -> list[Tensor]:
        """Return a parcel's rows of this rank's gradients: in one tensor if there is a line."""
        if self._line is not None:
            return [self._go_through(self._line)[parcel.destination]]
        rows = []
        for part in parcel.parts:
            # Detached: a view would keep the gradient alive after its plan is gone.
            gradient = self.weights.gradient(self._spec(part).name).detach()
            rows.append(narrow_rows(gradient, self._spec(part), *part.held).reshape(-1))
        return rows

    def wait(self) -> None:
        """Wait for the other holders' gradients."""
        self._wait_for_arrivals()

    def sum(self) -> Sums:
        """Return the gradients of what this rank keeps, summed in order of pipeline, then rank."""
        if self._slices is not None:
            return self._sum_slices(self._slices)
        totals: dict[str, Tensor] = {}
        for parcel in self.parcels.summed:
            for part, piece in zip(parcel.parts, self._pieces(parcel), strict=True):
                self._add(totals, part, piece)
        return Sums.of(totals)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        super().finish()
        self._parts = MappingProxyType({})

    @property
    def _is_kept_twice(self) -> bool:
        """Whether a second keeper must get the same sums, bit for bit.

        Then this rank's own gradients are rounded like those that travel, and every sum begins with
        zero, because 0 + -0 is 0.
        """
        return self.unit.kind.has_standbys

    def _sum_slices(self, slices: _Slices) -> Sums:
        """Sum whole slices, in as few operations as there are holders."""
        first, *others = self.parcels.summed
        # Nobody else uses these in this iteration, so they become the sums if their dtype allows.
        totals = [item.to(slices.dtype) for item in self._lines(first)]
        if self._is_kept_twice:
            totals = list(torch._foreach_add(totals, 0.0))
        for parcel in others:
            torch._foreach_add_(totals, [*self._lines(parcel)])
        if self._line is None:
            items = zip(totals, slices.masters, strict=True)
            pieces: Sequence[Tensor] = [total.view(master.shape) for total, master in items]
        else:
            pieces = _unflatten_dense_tensors(totals[0], slices.masters)  # type: ignore[no-untyped-call]
        return Sums(dict(zip(slices.names, pieces, strict=True)), totals)

    @cached_property
    def _slices(self) -> _Slices | None:
        """The slices to sum, if all parcels have them whole and in one dtype; else None."""
        if not self.parcels.has_whole_slices:
            return None
        names = [self._spec(part).name for part in self.parcels.summed[0].parts]
        masters = [self.store.masters[name] for name in names]
        dtypes = set(map(_sum_dtype, masters))
        return _Slices(names, masters, dtypes.pop()) if len(dtypes) == 1 else None

    def _lines(self, parcel: Parcel) -> Sequence[Tensor]:
        """Return a parcel's gradients: one tensor if a line has packed it, else one per part."""
        line = None if self._line is None else self._flat(parcel)
        return self._pieces(parcel) if line is None else [line]

    def _flat(self, parcel: Parcel) -> Tensor | None:
        """Return a parcel's gradients in one tensor; None of this rank's own without a line."""
        if parcel.source != self.store.global_rank:
            return self._buffers.pop(parcel.source)  # So that it is let go.
        if self._line is None:
            return None
        (own,) = self._rows(parcel)
        return own.to(self.options.dtype) if self._is_kept_twice else own

    def _pieces(self, parcel: Parcel) -> Sequence[Tensor]:
        """Return a parcel's gradients, each in one dim."""
        line = self._flat(parcel)
        if line is not None:
            return parcel.split(line)
        pieces = self._rows(parcel)
        if self._is_kept_twice:
            pieces = [piece.to(self.options.dtype) for piece in pieces]
        return pieces

    @cached_property
    def _held(self) -> dict[int, nn.Parameter]:
        """The weights whose gradients leave or stay, by parameter."""
        indices = {*self.parcels.indices_leaving, *self.parcels.indices_kept}
        return {i: self.weights.shards[self.unit.specs[i].name] for i in sorted(indices)}

    @cached_property
    def _line(self) -> GradientLine | None:
        """Through which all gradients go; None if they are large, or some may be late for it."""
        leaving, kept = set(self.parcels.indices_leaving), set(self.parcels.indices_kept)
        if not GradientLine.fits(self._held.values()) or (leaving and kept - leaving):
            return None
        parcels = (*self.parcels.leaving, *self.parcels.kept)
        return GradientLine(self._held, self.unit.specs, parcels)

    def _go_through(self, line: GradientLine) -> Mapping[int, Tensor]:
        """Return what goes to each destination, once gradients are final."""
        self._parts = self._parts or line.parts()
        return self._parts

    def _add(self, totals: dict[str, Tensor], part: Part, piece: Tensor) -> None:
        spec = self._spec(part)
        if spec.name not in totals:
            master = self.store.masters[spec.name]
            dtype = _sum_dtype(master)
            if part.is_whole_slice and not self._is_kept_twice:
                # Nobody else's in this iteration, so it becomes the sum itself if its dtype allows.
                totals[spec.name] = piece.reshape(master.shape).to(dtype)
                return
            totals[spec.name] = torch.zeros(master.shape, dtype=dtype, device=piece.device)
        total = totals[spec.name]
        rows = total if part.is_whole_slice else narrow_rows(total, spec, *part.owned)
        rows += piece.reshape(rows.shape)


def _sum_dtype(master: Tensor) -> torch.dtype:
    if master.dtype is torch.float32:
        return torch.float32
    return torch.promote_types(master.dtype, torch.float32)
