"""Push units whose owners and holders may be any ranks: send gradients, sum them at the owners.

Small weights are picked from their unit's gradients end to end by one call, and summed by one call,
instead of one for each parameter: each call takes as long as some thousand elements do.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from lightning_hetero.runtime.exchange.messages import sum_dtype
from lightning_hetero.runtime.exchange.parcels import Parcel, ParcelUnit, Part, split_line
from lightning_hetero.runtime.slices.weights import narrow_rows

_SMALL_NUMEL = 2**14
"""Largest number of elements of the weights whose gradients are picked by index: an index takes 8
bytes."""


class PushedParcels(ParcelUnit):
    """A unit whose gradients go to their owners as parcels."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        return self._names(self.parcels.leaving)

    def post(self) -> None:
        """Post the gradients that leave this rank, which must be final; others needn't be."""
        leaving = self.parcels.leaving
        self._exchange([([item.destination], self._own_rows(item)) for item in leaving])

    def _own_rows(self, parcel: Parcel) -> list[Tensor]:
        """Return the rows of this rank's gradients that a parcel takes; zeros without gradient.

        Those of small weights are one line.
        """
        gradients = [self.weights.gradient(self._spec(part).name) for part in parcel.parts]
        elements = self._elements[id(parcel)]
        if elements is None:
            return self._narrowed(parcel, gradients)
        line: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
        return [line.index_select(0, elements)]

    def _narrowed(self, parcel: Parcel, wholes: Iterable[Tensor]) -> list[Tensor]:
        pairs = zip(wholes, parcel.parts, strict=True)
        return [narrow_rows(whole, self._spec(part), *part.held) for whole, part in pairs]

    @cached_property
    def _elements(self) -> dict[int, Tensor | None]:
        """By id of each own parcel, the places of its elements in all gradients end to end.

        None if its weights aren't small.
        """
        found = dict[int, Tensor | None]()
        for parcel in (*self.parcels.leaving, *self.parcels.kept):
            shards = [self.weights.shards[self._spec(part).name] for part in parcel.parts]
            sizes = [shard.numel() for shard in shards]
            found[id(parcel)] = None
            if sum(sizes) <= _SMALL_NUMEL:
                numbers = torch.split(torch.arange(sum(sizes), device=self.store.device), sizes)
                like = map(Tensor.view_as, numbers, shards)
                rows = [item.reshape(-1) for item in self._narrowed(parcel, like)]
                found[id(parcel)] = torch.cat(rows)
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
        for parcel, like in zip(self.parcels.summed, self._shapes, strict=True):
            if parcel.source != self.store.global_rank:
                pieces = self._take(parcel, like)
            else:
                pieces = self._own_rows(parcel)
                if self._elements[id(parcel)] is not None:
                    pieces = split_line(pieces[0], like)
                pairs = zip(pieces, like, strict=True)
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
    def _are_lines(self) -> bool:
        """Whether all parcels have the same elements in the same order, each in one line."""
        found = self.parcels.summed
        is_one = len({tuple(part.index for part in parcel.parts) for parcel in found}) == 1
        parts = (part for parcel in found for part in parcel.parts)
        are_own_lines = all(self._elements[id(parcel)] is not None for parcel in self.parcels.kept)
        is_one = is_one and len({*self._sum_dtypes.values()}) == 1 and are_own_lines
        return is_one and not self.unit.kind.has_standbys and all(p.is_whole_slice for p in parts)

    def _sum_lines(self) -> dict[str, Tensor]:
        lines = [
            self._own_rows(parcel)[0]
            if parcel.source == self.store.global_rank
            else self._arrived.pop(parcel.source)
            for parcel in self.parcels.summed
        ]
        names = [self._spec(part).name for part in self.parcels.summed[0].parts]
        total = lines[0].detach().to(self._sum_dtypes[names[0]])
        for line in lines[1:]:
            total += line
        return dict(zip(names, split_line(total, self._shapes[0]), strict=True))

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
