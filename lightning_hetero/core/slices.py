"""Describe which rank keeps which piece of a parameter, and which ranks compute with it.

A parameter is cut along one dim into slices, each with one *owner*, which keeps its master copy and
optimizer state; with redundancy a *standby* keeps both, too. The ranks that compute with it under a
plan are its *holders*. All pieces are intervals along the cut dim, so ranks exchange the overlaps
of intervals, for any layer splits and TP degrees of the plan (Hydraulis §5.2).
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from math import prod
from operator import lt
from typing import NamedTuple

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.core.reading import Choice

__all__ = [
    "Holders",
    "Holding",
    "Interval",
    "Lot",
    "OuterRole",
    "Ownership",
    "PackedSize",
    "ParameterSpec",
    "PlanHolders",
    "SharedRows",
    "Slice",
    "holdings_of",
    "kept_rows",
    "piece_of",
]

Interval = tuple[int, int]
"""Half-open [start, stop) along a parameter's cut dim."""


class OuterRole(StrEnum):
    """Which end of a pipeline uses a parameter that belongs to no layer."""

    FIRST = "first"
    LAST = "last"


class Ownership(Choice):
    """The ranks that own the slices."""

    AUTO = "auto"
    """MEMORY if the plan has `owner_shares`; else HOLDERS for a single plan without idle ranks;
    else EVEN."""
    HOLDERS = "holders"
    """The ranks that hold the parameter under the plan: least traffic."""
    EVEN = "even"
    """All ranks, in equal parts: least memory, and no plan is favoured."""
    PARAMETER = "parameter"
    """Whole parameters, one owner each: for optimizers that need whole matrices."""
    MEMORY = "memory"
    """In proportion to the plan's `owner_shares`, or to the memory that stages leave free."""


class PackedSize(NamedTuple):
    """Size of a quantized weight."""

    num_values: int
    """Values that it stands for."""
    num_bytes: int
    """Bytes in memory, with the scales of its blocks."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A parameter without its values."""

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
    """Number of equal blocks along `tp_dim` that are sharded one by one (fused projections)."""
    tp_uneven: bool = False
    """Whether shards may differ in size if the degree doesn't divide them (vocabularies)."""
    tp_heads: int = 0
    """Number of equal heads in each block that are never cut; 0 if rows may be cut anywhere."""
    tp_readers: int = 1
    """Query heads that read each head: the ranks of several of them hold it several times."""
    tp_partial: bool = False
    """Whether each rank of a group that holds it whole gets only a summand of its gradient."""
    requires_grad: bool = True
    packed: "PackedSize | None" = None
    """Size of a quantized weight, whose shape may be that of packed bytes; None if it isn't one."""

    @property
    def num_values(self) -> int:
        """Number of values that are computed with."""
        return self.numel if self.packed is None else self.packed.num_values

    def held_bytes(self, width: int) -> int:
        """Return the bytes of the whole on a rank that computes in values of `width` bytes."""
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
        """The fields that decide how it is cut: equal for parameters that are cut alike."""
        flags = self.tp_dim is None, self.tp_uneven, self.tp_partial
        return self.cut_length, *flags, self.tp_blocks, self.tp_heads, self.tp_readers

    @property
    def tp_parts(self) -> int:
        """Number of equal parts in which a block is shared out; a degree must divide it."""
        return (self.tp_heads or self.cut_length // self.tp_blocks) * self.tp_readers

    def rows_of(self, tp_rank: int, tp_degree: int) -> tuple[Interval, ...]:
        """Return the rows of the cut dim that a rank of a tensor-parallel group holds.

        The parts of each block are shared out evenly, and a rank holds the heads that its parts
        read. So ranks that read the same head all hold it, each with a summand of its gradient.

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
    def keepers(self) -> tuple[int, ...]:
        """Its owner, then its standby if it has one."""
        return (self.owner,) if self.standby is None else (self.owner, self.standby)

    def server_of(self, holder: int) -> int:
        """Return the keeper from which a holder pulls: itself, else the next rank, cyclically.

        So each of two ranks that stand by for each other serves half of the holders with the rows
        of both: half as many messages as if each served only what it owns.
        """
        return min(self.keepers, key=lambda keeper: (keeper < holder, keeper))


def kept_rows(slices: Sequence[Slice], global_rank: int) -> tuple[Interval, ...]:
    """Return the rows that a rank keeps as owner or standby, ascending, adjacent ones merged."""
    rows: list[Interval] = []
    for item in slices:
        if global_rank in item.keepers:
            if rows and rows[-1][1] == item.start:
                rows[-1] = rows[-1][0], item.stop
            else:
                rows.append((item.start, item.stop))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's shard of a parameter: intervals of the cut dim, laid end to end."""

    global_rank: int
    pipeline_index: int
    intervals: tuple[Interval, ...]
    pushes: tuple[Interval, ...]
    """The rows whose gradients it sends; ranks of a TP group with equal gradients divide them."""


def holdings_of(spec: ParameterSpec, plan: ParallelPlan) -> Iterator[Holding]:
    """Yield the holdings of a parameter under a plan, in pipeline order.

    Raises:
        ModelError: The TP degree doesn't divide the parameter.
    """
    for pipeline_index, pipeline in enumerate(plan.pipelines):
        for stage_index in _stages_that_use(spec, pipeline):
            ranks = pipeline.stages[stage_index].ranks
            for tp_rank, global_rank in enumerate(ranks):
                intervals = spec.rows_of(tp_rank, len(ranks))
                pushes = _pushes(spec, tp_rank, len(ranks))
                yield Holding(global_rank, pipeline_index, intervals, pushes)


@dataclass(frozen=True, eq=False)
class Holders:
    """The holders of parameters that are used by the same stages and cut alike."""

    holdings: tuple[Holding, ...]
    """The holdings in pipeline order."""
    by_rank: dict[int, Holding]
    """The holdings by global rank."""


class PlanHolders:
    """The holders of all parameters under a plan; computed once for those used and cut alike.

    Layers between two neighbouring stage boundaries of any pipelines belong to the same stages. So
    the work grows with ranks × boundaries and kinds of parameters, not with their number.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._cuts = sorted({stage.layers.start for _, _, stage in plan.iter_stages()})
        self._known: dict[Hashable, Holders] = {}

    @property
    def num_layers(self) -> int:
        """Number of layers of the plan."""
        return self._plan.num_layers

    def of(self, spec: ParameterSpec) -> Holders:
        """Return a parameter's holders; one object for all parameters with the same holders.

        Raises:
            ModelError: The TP degree doesn't divide the parameter.
        """
        is_known = spec.layer is None or 0 <= spec.layer < self._plan.num_layers
        segment = None if spec.layer is None else bisect(self._cuts, spec.layer)
        key = segment if is_known else -1, spec.roles if spec.layer is None else (), spec.cut
        if key not in self._known:
            holdings = tuple(holdings_of(spec, self._plan))
            by_rank = {item.global_rank: item for item in holdings}
            self._known[key] = Holders(holdings, by_rank)
        return self._known[key]


class SharedRows(NamedTuple):
    """Rows that several ranks all hold, and each of which one of these ranks keeps."""

    held: Interval
    pieces: tuple[Interval, ...]
    """The rows that each rank keeps, by ascending rank; counted from the first row held."""


class Lot:
    """The holders and slices that several parameters have in common."""

    def __init__(self, holders: Holders, slices: Sequence[Slice]) -> None:
        self.holders = holders
        self.slices = slices

    @cached_property
    def has_standbys(self) -> bool:
        """Whether any row is kept by two ranks."""
        return any(item.standby is not None for item in self.slices)

    @cached_property
    def kept(self) -> Sequence[Slice]:
        """The rows that each rank keeps, as owner or standby, ascending."""
        if not self.has_standbys:
            return self.slices
        by_keeper = defaultdict(list)
        for item in self.slices:
            for rank in item.keepers:
                by_keeper[rank].append(item)
        found = [Slice(rank, *rows) for rank, i in by_keeper.items() for rows in kept_rows(i, rank)]
        return sorted(found, key=lambda item: (item.start, item.owner))

    @cached_property
    def members(self) -> frozenset[int]:
        """Ranks that hold or keep any rows."""
        return frozenset(self.holders.by_rank) | {item.owner for item in self.kept}

    def circles(self, *, push: bool) -> dict[tuple[int, ...], SharedRows] | None:
        """Return the groups of ranks that hold the same rows and own exactly these among them.

        In a push the rows of standbys count as owned, too. None if any rank keeps rows that it
        doesn't hold, or several pieces, or if groups hold overlapping rows.
        """
        slices = self.kept if push else self.slices
        kept = {item.owner: (item.start, item.stop) for item in slices}
        holders: dict[tuple[Interval, ...], list[int]] = defaultdict(list)
        for item in self.holders.holdings:
            holders[item.pushes].append(item.global_rank)
        bounds = [bound for rows in sorted(chain.from_iterable(holders)) for bound in rows]
        are_apart = bounds == sorted(bounds) and all(map(lt, bounds[::2], bounds[1::2]))
        if len(kept) < len(slices) or not are_apart or any(len(rows) != 1 for rows in holders):
            return None
        found = {}
        for ((start, stop),), ranks in holders.items():
            members = tuple(sorted(ranks))
            own = [kept.pop(rank, (start, start)) for rank in members]
            if any(first < start or stop < last for first, last in own):
                return None
            pieces = tuple((first - start, last - start) for first, last in own)
            found[members] = SharedRows((start, stop), pieces)
        return None if kept else found

    def overlaps(self, rank: int, *, push: bool) -> Iterator[tuple[int, int, int, int]]:
        """Yield (keeper, holder, first row, last row + 1) of overlaps in which `rank` is either.

        In a push every keeper of the rows is named, in a pull the one that serves the holder.
        """
        slices = self.kept if push else self.slices
        kept = [item for item in slices if rank in item.keepers]
        for holding in self.holders.holdings:
            holder = holding.global_rank
            for item in slices if holder == rank else kept:
                keeper = item.owner if item.standby is None else item.server_of(holder)
                if rank not in (keeper, holder):
                    continue
                # The innermost loop runs once for every piece there is: keep it flat.
                for start, stop in holding.pushes if push else holding.intervals:
                    first = start if start > item.start else item.start
                    last = stop if stop < item.stop else item.stop
                    if first < last:
                        yield keeper, holder, first, last


def _stages_that_use(spec: ParameterSpec, pipeline: PipelinePlan) -> list[int]:
    if spec.layer is not None:
        return [i for i, stage in enumerate(pipeline.stages) if spec.layer in stage.layers]
    stages = set()
    if OuterRole.FIRST in spec.roles:
        stages.add(0)
    # Ranks that run both ends hold it once.
    if OuterRole.LAST in spec.roles and not (
        stages and pipeline.stages[-1].ranks == pipeline.stages[0].ranks
    ):
        stages.add(pipeline.num_stages - 1)
    return sorted(stages)


def _pushes(spec: ParameterSpec, tp_rank: int, tp_degree: int) -> tuple[Interval, ...]:
    """Return the rows whose gradients a rank sends; it holds at least these.

    If all ranks of the group have the same gradient, each sends its share of rows. Summands, such
    as those of heads that several ranks hold, are sent whole, and the owner sums them.
    """
    if spec.tp_dim is None and not spec.tp_partial:
        return (piece_of(spec.cut_length, tp_rank, tp_degree),)
    return spec.rows_of(tp_rank, tp_degree)


def piece_of(length: int, index: int, count: int) -> Interval:
    """Return one of `count` nearly equal pieces of a length.

    Cuts are rounded as those of slices, so that owners among the holders own rows that they hold.
    """
    return round(length * index / count), round(length * (index + 1) / count)
