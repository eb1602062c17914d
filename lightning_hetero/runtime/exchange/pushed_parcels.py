"""Push units whose owners and holders may be any ranks: send gradients, sum them at the owners."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from lightning_hetero.runtime.exchange.messages import sum_dtype
from lightning_hetero.runtime.exchange.parcels import Parcel, ParcelUnit, Part, SentRows
from lightning_hetero.runtime.slices.weights import narrow_rows


class PushedParcels(ParcelUnit):
    """A unit whose gradients go to their owners as parcels."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        return self._names(self.parcels.leaving)

    def post(self) -> None:
        """Post the gradients that leave this rank, which must be final; others needn't be."""
        leaving = self.parcels.leaving
        self._exchange([SentRows([item.destination], self._own_rows(item)) for item in leaving])

    def _own_rows(self, parcel: Parcel) -> list[Tensor]:
        """Return the rows of this rank's gradients that a parcel takes; zeros without gradient."""
        specs = [self._spec(part) for part in parcel.parts]
        return [
            narrow_rows(self.weights.gradient(spec.name), spec, *part.held)
            for spec, part in zip(specs, parcel.parts, strict=True)
        ]

    def wait(self) -> None:
        """Wait for the other holders' gradients."""
        self._wait_for_arrivals()

    def sum(self) -> dict[str, Tensor]:
        """Return the gradients of what this rank keeps, summed in order of pipeline, then rank.

        Where a standby must get the same sums, bit for bit, this rank's own gradients are rounded
        like those that travel, and every sum starts from zero: 0 + -0 is 0, but -0 alone stays -0.
        """
        is_kept_twice = self.unit.kind.has_standbys
        totals: dict[str, Tensor] = {}
        for parcel, like in zip(self.parcels.summed, self._shapes, strict=True):
            if parcel.source != self.store.global_rank:
                pieces = self._take(parcel, like)
            else:
                pairs = zip(self._own_rows(parcel), like, strict=True)
                pieces = [piece.reshape(rows.shape) for piece, rows in pairs]
                if is_kept_twice:
                    pieces = [piece.to(self.options.dtype) for piece in pieces]
            into, added = [], []
            for part, piece in zip(parcel.parts, pieces, strict=True):
                name = self._spec(part).name
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
    def _shapes(self) -> list[list[Tensor]]:
        """For each summed parcel, tensors on the meta device that are shaped like its parts."""
        masters = self.store.masters
        return [
            [self._kept_rows(masters, part).detach().to("meta") for part in parcel.parts]
            for parcel in self.parcels.summed
        ]

    @cached_property
    def _sum_dtypes(self) -> dict[str, torch.dtype]:
        masters = {spec.name: self.store.masters[spec.name] for spec in self.unit.specs}
        return {name: sum_dtype([master]) for name, master in masters.items()}

    def _kept_rows(self, tensors: Mapping[str, Tensor], part: Part) -> Tensor:
        """Return a part's rows of tensors that are shaped like this rank's slices."""
        spec = self._spec(part)
        own = tensors[spec.name]
        return own if part.is_whole_slice else narrow_rows(own, spec, *part.owned)
