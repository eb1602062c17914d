"""Units of many small gradients: all of them end to end, so that few operations do for all.

Small layers have dozens of gradients in a unit. To cut, pack, check, sum and scale them one by one
takes longer than to copy them. Counted, for the 49 gradients of four small layers and two owners:
7 operations of torch and 1.5 copies of each element, where one by one there are 300 and 1.
"""

from functools import cached_property

import torch
from torch import Tensor

from lightning_hetero.runtime.exchange.parcels import PushedParcels

__all__ = ["PushedLine", "is_line"]

_MOST_NUMEL = 2**14
"""Elements of a gradient, on average, up to which it costs less to copy it once more."""


def is_line(pushed: PushedParcels) -> bool:
    """Whether a unit's gradients may go as `PushedLine`.

    They do if they are several small ones, held and owned here in rows that are pieces of memory,
    and summed in one dtype. This rank may go so and another not: the same bytes travel.
    """
    shares = pushed.shares.values()
    numels = [item.weight.numel() for item in shares]
    is_small = len(numels) > 1 and sum(numels) <= _MOST_NUMEL * len(numels)
    if not is_small or pushed.is_kept_twice or not pushed.parcels.has_whole_slices:
        return False
    are_real = all(item.weight.is_floating_point() and item.is_all for item in shares)
    return are_real and len({dtype for _, dtype, _ in pushed.summed}) == 1


class PushedLine(PushedParcels):
    """A unit whose gradients are copied end to end, parameter by parameter."""

    _line: Tensor | None = None
    _stays: Tensor | None = None
    """What of it stays here."""

    def made(self) -> list[Tensor]:
        """Return the line, in which what is missing is zero."""
        if self._line is None or not self.travels:
            self._line = self._end_to_end()
        return [self._line]

    def _end_to_end(self) -> Tensor:
        weights = [shares.weight for shares in self.shares.values()]
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        line: Tensor = torch._C._nn.flatten_dense_tensors(gradients)
        return line.detach()

    def post(self) -> None:
        """Post the gradients that leave, which are final."""
        self._line = self._end_to_end()
        pieces = self._line.split_with_sizes(self._sizes)
        rows = {owner: [pieces[i] for i in which] for owner, which in self._pieces_of.items()}
        own = rows.get(self.store.global_rank)
        self._stays = None if own is None else torch.cat(own)
        self._exchange_rows(rows)

    @cached_property
    def _sizes(self) -> list[int]:
        """Elements of each piece: of each parameter one for each owner."""
        return [size for shares in self.shares.values() for size in shares.sizes]

    @cached_property
    def _pieces_of(self) -> dict[int, list[int]]:
        """Of each owner its pieces."""
        found: dict[int, list[int]] = {}
        owners = [owner for shares in self.shares.values() for owner in shares.owners]
        for index, owner in enumerate(owners):
            found.setdefault(owner, []).append(index)
        return found

    def sum(self) -> dict[str, Tensor]:
        """Return the sums of what this rank keeps, in order of pipeline, then rank."""
        own = self.made()[0] if self._stays is None else self._stays
        total: Tensor | None = None
        for parcel in self.parcels.summed:
            is_own = parcel.source == self.store.global_rank
            line = own if is_own else self._buffers.pop(parcel.source)
            # Nobody else's in this iteration, so the first becomes the sum if dtypes allow.
            total = line.to(self.summed[0][1]) if total is None else total.add_(line)
        assert total is not None
        parts = total.split_with_sizes(self.parcels.summed[0].sizes)
        return {
            name: part.view(shape) if has_shape else part
            for (name, _, shape), has_shape, part in zip(
                self.summed, self._have_shapes, parts, strict=True
            )
        }

    @cached_property
    def _have_shapes(self) -> list[bool]:
        """Of each sum whether it isn't of one dim."""
        return [len(shape) != 1 for _, _, shape in self.summed]

    def finish(self) -> None:
        """Wait until what was sent has left."""
        super().finish()
        self._line = self._stays = None
