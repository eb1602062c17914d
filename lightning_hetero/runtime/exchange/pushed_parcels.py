"""Push units whose owners and holders may be any ranks: send gradient parcels, sum at owners."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.runtime.exchange.messages import sum_dtype
from lightning_hetero.runtime.exchange.parcels import Parcel, ParcelUnit, Part, SentPart
from lightning_hetero.runtime.slices.weights import narrow_rows

__all__ = ["PushedParcels"]

_LINE_NUMEL = 2**14
"""Largest number of elements of a unit's weights for which all gradients are packed at once."""


class _GradientLine:
    """Packs the gradients of a unit's small weights: concatenates all, then indexes each parcel.

    This takes a quarter of the calls of packing row by row, but its indices take 16 bytes for each
    element, so it is used for small weights only.

    Args:
        weights: The weights, by their index in the unit.
        specs: The unit's parameters.
        parcels: The parcels that leave this rank, and those that stay.
    """

    def __init__(
        self,
        weights: dict[int, nn.Parameter],
        specs: Sequence[ParameterSpec],
        parcels: Sequence[Parcel],
    ) -> None:
        self._weights = list(weights.values())
        sizes = [weight.numel() for weight in self._weights]
        elements = torch.split(torch.arange(sum(sizes), device=self._weights[0].device), sizes)
        places = {
            index: own.view(weight.shape)
            for (index, weight), own in zip(weights.items(), elements, strict=True)
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
        """For each destination the indices of its elements in the concatenated gradients."""

    def parts(self) -> dict[int, Tensor]:
        """Return the packed parcel of each destination; zeros for weights without a gradient."""
        gradients = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in self._weights
        ]
        line: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
        return {peer: line.index_select(0, places) for peer, places in self._places.items()}


class PushedParcels(ParcelUnit):
    """A unit whose gradients go to their owners as parcels."""

    _buffers: dict[int, Tensor]
    """Gradients that have arrived, by source."""
    _parts: dict[int, Tensor] | None = None
    """Parcels that a `_GradientLine` has packed, by destination; None until gradients are final."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        return self._names(self.parcels.indices_leaving)

    def post(self) -> None:
        """Post the gradients that leave this rank, which must be final; others needn't be."""
        self._parts = None  # They may be left over from a failed iteration.
        sent = [
            SentPart([parcel.destination], self._rows(parcel)) for parcel in self.parcels.leaving
        ]
        sources = [parcel.source for parcel in self.parcels.arriving]
        self._buffers = dict(zip(sources, self._exchange(sent), strict=True))

    def _rows(self, parcel: Parcel) -> list[Tensor]:
        """Return a parcel's rows of this rank's gradients, each in one dim; or all in one line."""
        if self._line is not None:
            self._parts = self._parts or self._line.parts()
            return [self._parts[parcel.destination]]
        rows = []
        for part in parcel.parts:
            # Detached: a view would keep the gradient in memory after its plan is gone.
            gradient = self.weights.gradient(self._spec(part).name).detach()
            rows.append(narrow_rows(gradient, self._spec(part), *part.held).reshape(-1))
        return rows

    def wait(self) -> None:
        """Wait for the other holders' gradients."""
        self._wait_for_arrivals()

    def sum(self) -> dict[str, Tensor]:
        """Return the gradients of what this rank keeps, summed in order of pipeline, then rank."""
        if self._line is not None:
            return self._sum_lines()
        totals: dict[str, Tensor] = {}
        for parcel in self.parcels.summed:
            for part, piece in zip(parcel.parts, self._pieces(parcel), strict=True):
                self._add(totals, part, piece)
        return totals

    def finish(self) -> None:
        """Wait until everything sent has left."""
        super().finish()
        self._parts = None

    def _sum_lines(self) -> dict[str, Tensor]:
        """Sum whole slices that travel concatenated, with one operation for each holder."""
        if not self.parcels.summed:
            return {}
        names = [self._spec(part).name for part in self.parcels.summed[0].parts]
        masters = [self.store.masters[name] for name in names]
        dtype, total = sum_dtype(masters), None
        for parcel in self.parcels.summed:
            if parcel.source != self.store.global_rank:
                line = self._buffers.pop(parcel.source)  # Popped, so that its memory is freed.
            else:
                (line,) = self._rows(parcel)
                line = line.to(self.options.dtype) if self._is_kept_twice else line
            if total is None:  # Nobody else uses the line, so it becomes the sum.
                total = line.to(dtype) + 0.0 if self._is_kept_twice else line.to(dtype)
            else:
                total += line
        sums = _unflatten_dense_tensors(total, masters)  # type: ignore[no-untyped-call]
        return dict(zip(names, sums, strict=True))

    @cached_property
    def _line(self) -> _GradientLine | None:
        """The packer of all gradients; None if they are large, or some may not be final in time."""
        leaving, kept = set(self.parcels.indices_leaving), set(self.parcels.indices_kept)
        weights = {i: self.weights.shards[self.unit.specs[i].name] for i in sorted(leaving | kept)}
        is_small = sum(weight.numel() for weight in weights.values()) <= _LINE_NUMEL
        are_alike = len({weight.dtype for weight in weights.values()}) == 1
        if not (is_small and are_alike and self.parcels.has_whole_slices) or (
            leaving and kept - leaving
        ):
            return None
        parcels = (*self.parcels.leaving, *self.parcels.kept)
        return _GradientLine(weights, self.unit.specs, parcels)

    @property
    def _is_kept_twice(self) -> bool:
        """Whether a standby must get the same sums, bit for bit.

        Then this rank's own gradients are rounded like those that travel, and each sum starts from
        zero, because 0 + -0 is 0 but -0 alone stays -0.
        """
        return self.unit.kind.has_standbys

    def _pieces(self, parcel: Parcel) -> Sequence[Tensor]:
        """Return a parcel's gradients, each in one dim."""
        if parcel.source != self.store.global_rank:
            return parcel.split(self._buffers.pop(parcel.source))  # Popped: its memory is freed.
        pieces = self._rows(parcel)
        if self._is_kept_twice:
            pieces = [piece.to(self.options.dtype) for piece in pieces]
        return pieces

    def _add(self, totals: dict[str, Tensor], part: Part, piece: Tensor) -> None:
        spec = self._spec(part)
        if spec.name not in totals:
            master = self.store.masters[spec.name]
            dtype = sum_dtype([master])
            if part.is_whole_slice and not self._is_kept_twice:
                # The piece isn't used otherwise in this iteration, so it can become the sum itself.
                totals[spec.name] = piece.reshape(master.shape).to(dtype)
                return
            totals[spec.name] = torch.zeros(master.shape, dtype=dtype, device=piece.device)
        total = totals[spec.name]
        rows = total if part.is_whole_slice else narrow_rows(total, spec, *part.owned)
        rows += piece.reshape(rows.shape)
