"""The parcels that one rank sends, receives and keeps in the exchanges of any unit of a kind."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_hetero.core.slices import Interval
from lightning_hetero.core.transfers import Unit
from lightning_hetero.runtime.slices.weights import SliceStore, local_rows

__all__ = ["Parcel", "Parcels", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one parameter in a parcel."""

    index: int
    """Index of the parameter in its unit."""
    numel: int
    held: Interval
    """The rows in this rank's shard, if it holds them; else (0, 0)."""
    owned: Interval
    """The rows in this rank's slice, if it keeps them; else (0, 0)."""
    is_whole_slice: bool
    """Whether they are all that this rank keeps."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Parts of a unit that go together from one rank to another, or stay on a rank."""

    source: int
    destination: int
    pipeline_index: int
    """Pipeline of the holder."""
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    """Elements of each part."""
    numel: int

    def split(self, buffer: Tensor) -> Sequence[Tensor]:
        """Return a buffer's elements part by part, each in one dim."""
        return buffer.split_with_sizes(self.sizes)


class Parcels:
    """The parcels that a rank sends, receives and keeps of any unit of a kind, in pull or push.

    Args:
        unit: A unit of the kind.
        store: The rank's slices.
        push: Whether they carry gradients to owners; else weights to holders.
    """

    def __init__(self, unit: Unit, store: SliceStore, *, push: bool) -> None:
        rank = store.global_rank
        names = [spec.name for spec in unit.specs]
        by_rank = [lot.holders.by_rank for lot in unit.kind.lots]
        holdings = [found.get(rank) for found in by_rank]
        held_rows = [() if item is None else item.intervals for item in holdings]
        kept_rows = [store.kept[name] for name in names]
        found = []
        for move in unit.kind.moves(rank, push=push):
            source, destination = move.source, move.destination
            holder, owner = (source, destination) if push else (destination, source)
            parts = []
            for index, start, stop in move.pieces:
                held = _local(held_rows[index], start, stop) if holder == rank else (0, 0)
                owned = _local(kept_rows[index], start, stop) if owner == rank else (0, 0)
                numel = (stop - start) * unit.kind.row_numels[index]
                is_whole = kept_rows[index] == ((start, stop),)
                parts.append(Part(index, numel, held, owned, is_whole))
            sizes = tuple(part.numel for part in parts)
            index = by_rank[move.pieces[0][0]][holder].pipeline_index
            parcel = Parcel(source, destination, index, tuple(parts), sizes, sum(sizes))
            found.append(parcel)
        self.leaving = tuple(p for p in found if p.source == rank != p.destination)
        self.arriving = tuple(p for p in found if p.source != rank == p.destination)
        self.kept = tuple(p for p in found if p.source == rank == p.destination)
        owned_here = (*self.arriving, *self.kept)
        self.summed = tuple(sorted(owned_here, key=lambda p: (p.pipeline_index, p.source)))
        """The parcels that arrive or are kept, in order of pipeline, then rank."""
        contents = {tuple(part.index for part in parcel.parts) for parcel in self.summed}
        self.has_whole_slices = len(contents) == 1 and all(
            part.is_whole_slice for parcel in self.summed for part in parcel.parts
        )
        """Whether `summed` are all whole slices of the same parameters."""
        self.indices_leaving, self.indices_arriving, self.indices_kept = (
            tuple(sorted({part.index for parcel in parcels for part in parcel.parts}))
            for parcels in (self.leaving, self.arriving, self.kept)
        )
        """The parameters of which any rows leave, arrive and are kept."""


def _local(intervals: Sequence[Interval], start: int, stop: int) -> Interval:
    local = local_rows(intervals, start, stop)
    assert local is not None, f"rows {start}-{stop} are not held here"
    return local
