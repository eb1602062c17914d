"""Describe parameters without their values, and the slices into which owners divide them.

A parameter is cut along one dim, its *cut dim*, into slices. Each slice has one *owner*: the rank
that stores the fp32 master copy and the optimizer state of these rows, and updates them. With
`redundancy=1` a second rank, the *standby*, stores and updates the same rows. A rank *keeps* a row
if it is its owner or standby; it *holds* a row if it computes with it under the present plan.
Example: two ranks that own a weight of 10 rows evenly have `Slice(owner=0, start=0, stop=5)` and
`Slice(owner=1, start=5, stop=10)`; if both run the weight's layer, both hold all 10 rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.reading import Choice

Interval = tuple[int, int]
"""Half-open interval [start, stop) of rows: indices along a parameter's cut dim."""


class OuterRole(StrEnum):
    """The end of a pipeline that uses a parameter outside the layers."""

    FIRST = "first"
    LAST = "last"


class Ownership(Choice):
    """The ranks that own the slices."""

    AUTO = "auto"
    """MEMORY if the plan has `owner_shares`; else HOLDERS, or EVEN if there are several plans or
    idle ranks."""
    HOLDERS = "holders"
    """The ranks that compute with the parameter under the plan: least traffic."""
    EVEN = "even"
    """All ranks, in equal parts: least memory, and as good for one plan as for another."""
    PARAMETER = "parameter"
    """Whole parameters, one owner each: for optimizers that need whole matrices."""
    MEMORY = "memory"
    """All ranks, in proportion to the plan's `owner_shares`, or to the memory that their stages
    leave free."""


class PackedSize(NamedTuple):
    """Size of a quantized weight."""

    num_values: int
    """Number of values that it encodes."""
    num_bytes: int
    """Bytes in memory, scales included."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Name, shape and sharding of a parameter, without its values."""

    name: str
    """Its name in the module; one name even if the parameter is tied."""
    shape: tuple[int, ...]
    layer: int | None = None
    """Index of its layer, None for a parameter outside the layers."""
    roles: frozenset[OuterRole] = frozenset()
    """For a parameter outside the layers: the stages that use it."""
    tp_dim: int | None = None
    """Dim along which tensor parallelism shards it; None if every rank of the group holds it."""
    tp_blocks: int = 1
    """Number of equal blocks along `tp_dim`, each of which is sharded: 3 for a fused QKV
    projection."""
    tp_uneven: bool = False
    """Whether shards may differ in size where the degree doesn't divide the dim (vocabularies)."""
    tp_heads: int = 0
    """Number of equal heads in each block that are never cut; 0 if rows may be cut anywhere."""
    tp_readers: int = 1
    """Number of query heads that read each head (grouped-query attention). If several ranks compute
    these query heads, each of them holds the head."""
    tp_partial: bool = False
    """Whether the parameter is whole on every rank of a group, but each rank computes only one
    summand of its gradient."""
    requires_grad: bool = True
    packed: "PackedSize | None" = None
    """Size of a quantized weight, whose `shape` may be that of its packed bytes; None for other
    weights."""

    @property
    def num_values(self) -> int:
        """Number of values in computations: of a quantized weight, the unpacked ones."""
        return self.numel if self.packed is None else self.packed.num_values

    def held_bytes(self, width: int) -> int:
        """Return the bytes of the whole parameter if each value takes `width` bytes."""
        return self.numel * width if self.packed is None else self.packed.num_bytes

    @property
    def cut_dim(self) -> int:
        """Dim along which slices and shards are cut."""
        return 0 if self.tp_dim is None else self.tp_dim

    @cached_property
    def cut_length(self) -> int:
        """Size of the cut dim; a scalar counts as one row."""
        return self.shape[self.cut_dim] if self.shape else 1

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def row_numel(self) -> int:
        """Elements in one row of the cut dim."""
        return self.numel // self.cut_length if self.cut_length else 0

    @property
    def cut(self) -> tuple[int | bool, ...]:
        """The fields that decide how the parameter is cut; equal ones mean equal cuts."""
        flags = self.tp_dim is None, self.tp_uneven, self.tp_partial
        return self.cut_length, *flags, self.tp_blocks, self.tp_heads, self.tp_readers

    @property
    def tp_parts(self) -> int:
        """Number of equal parts of a block, which the TP degree must divide."""
        return (self.tp_heads or self.cut_length // self.tp_blocks) * self.tp_readers

    def rows_of(self, tp_rank: int, tp_degree: int) -> tuple[Interval, ...]:
        """Return the rows of the cut dim that a rank of a tensor-parallel group holds.

        Each block's parts are divided evenly among the ranks, and a rank holds the heads that its
        parts read. Example: 2 key heads, each read by 4 query heads, under degree 4: ranks 0 and 1
        both hold the first key head, ranks 2 and 3 the second.

        Raises:
            ModelError: The degree doesn't divide the parts.
        """
        if self.tp_dim is None or tp_degree == 1:
            return ((0, self.cut_length),)
        if self.tp_uneven and self.tp_blocks == 1:
            return (piece_of(self.cut_length, tp_rank, tp_degree),)
        block, parts = self.cut_length // self.tp_blocks, self.tp_parts
        if block * self.tp_blocks != self.cut_length or parts % tp_degree:
            raise ModelError(
                f"Parameter {self.name} of shape {self.shape} can't be cut into {tp_degree} equal "
                f"tensor-parallel shards along dim {self.tp_dim}. Choose a TP degree that divides "
                f"{parts}."
            )
        share, per_head = parts // tp_degree, block * self.tp_readers // parts
        first = tp_rank * share // self.tp_readers * per_head
        stop = -(-(tp_rank + 1) * share // self.tp_readers) * per_head
        return tuple((b * block + first, b * block + stop) for b in range(self.tp_blocks))

    def shape_of_rows(self, num_rows: int) -> tuple[int, ...]:
        """Return the shape of `num_rows` rows of the cut dim; a scalar has one row, itself."""
        if not self.shape:
            return () if num_rows else (0,)
        return (*self.shape[: self.cut_dim], num_rows, *self.shape[self.cut_dim + 1 :])


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous piece of a parameter and the ranks that keep it."""

    owner: int
    """The rank that keeps it and, alone, adds it to norms, checkpoints and whole tensors."""
    start: int
    stop: int
    standby: int | None = None
    """A rank that keeps and updates the same rows in the same way; None without redundancy."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that keep it: its owner, then its standby if it has one."""
        return (self.owner,) if self.standby is None else (self.owner, self.standby)

    def server_of(self, holder: int) -> int:
        """Return the rank from which a holder pulls.

        That is the holder itself if it keeps the slice, else the next higher rank that does,
        cyclically.

        Example: ranks 0 and 1 each own half of a weight and are standby for the other half, so both
        have all rows. By this rule each serves half of the other holders with the whole weight, in
        half as many messages as if each served all holders with the rows that it owns.
        """
        return min(self.ranks, key=lambda rank: (rank < holder, rank))


def kept_rows(slices: Sequence[Slice], global_rank: int) -> tuple[Interval, ...]:
    """Return the rows that a rank keeps as owner or standby, ascending, adjacent ones merged."""
    rows: list[Interval] = []
    for item in slices:
        if global_rank in item.ranks:
            if rows and rows[-1][1] == item.start:
                rows[-1] = rows[-1][0], item.stop
            else:
                rows.append((item.start, item.stop))
    return tuple(rows)


def piece_of(length: int, index: int, count: int) -> Interval:
    """Return one of `count` nearly equal pieces of a length.

    Slices are rounded in the same way, so that holders which are owners own rows that they hold.
    """
    return round(length * index / count), round(length * (index + 1) / count)
