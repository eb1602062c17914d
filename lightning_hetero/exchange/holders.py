"""Find the ranks that compute with a parameter under a plan, its *holders*, and the rows of each.

Ranks exchange the overlaps of the owners' slices and the holders' shards, for any layer splits and
tensor-parallel degrees (Hydraulis §5.2).
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import lt
from typing import NamedTuple

from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.exchange.slices import (
    Interval,
    OuterRole,
    ParameterSpec,
    Slice,
    kept_rows,
    piece_of,
)


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's shard of a parameter."""

    global_rank: int
    pipeline_index: int
    intervals: tuple[Interval, ...]
    """The rows that it holds; the shard is these intervals, concatenated."""
    pushes: tuple[Interval, ...]
    """The rows whose gradients it sends. Ranks of a TP group that have equal gradients of some rows
    divide these among them."""


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
    """The holders of parameters that the same stages use and that are cut in the same way."""

    holdings: tuple[Holding, ...]
    """The holdings in pipeline order."""
    by_rank: dict[int, Holding]
    """The holdings by global rank."""


class PlanHolders:
    """The holders of all parameters under a plan.

    They are computed once for all parameters that are cut in the same way and used by the same
    stages. Those of two consecutive layers are, unless a stage of any pipeline begins between the
    layers. So the work doesn't grow with the number of parameters.
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
        """Return a parameter's holders: the same object for all parameters with equal ones."""
        is_known = spec.layer is None or 0 <= spec.layer < self._plan.num_layers
        segment = None if spec.layer is None else bisect(self._cuts, spec.layer)
        key = segment if is_known else -1, spec.roles if spec.layer is None else (), spec.cut
        if key not in self._known:
            holdings = tuple(holdings_of(spec, self._plan))
            by_rank = {item.global_rank: item for item in holdings}
            self._known[key] = Holders(holdings, by_rank)
        return self._known[key]


class SharedRows(NamedTuple):
    """Rows that several ranks hold, divided among these ranks."""

    held: Interval
    pieces: tuple[Interval, ...]
    """The part that each rank keeps, by ascending rank; rows are counted from the first that is
    held."""


class ParameterPlacement:
    """Which ranks hold and keep which rows; shared by all parameters that are placed alike."""

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
        by_rank = defaultdict(list)
        for item in self.slices:
            for rank in item.ranks:
                by_rank[rank].append(item)
        found = [Slice(rank, *rows) for rank, i in by_rank.items() for rows in kept_rows(i, rank)]
        return sorted(found, key=lambda item: (item.start, item.owner))

    @cached_property
    def members(self) -> frozenset[int]:
        """Ranks that hold or keep any rows."""
        return frozenset(self.holders.by_rank) | {item.owner for item in self.kept}

    def shard_groups(self, *, push: bool) -> dict[tuple[int, ...], SharedRows] | None:
        """Return the groups of ranks that hold the same rows and own exactly these together.

        In a push the rows of standbys count as owned, too. None if a rank keeps rows that it
        doesn't hold, if it keeps several pieces, or if the rows of two groups overlap.
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
        """Yield (owner, holder, first row, last row + 1) for each exchange that `rank` is part of.

        If rows have a standby, a push goes to both owner and standby, and a pull comes from the one
        that serves the holder: "owner" means either of them.
        """
        slices = self.kept if push else self.slices
        kept = [item for item in slices if rank in item.ranks]
        for holding in self.holders.holdings:
            holder = holding.global_rank
            for item in slices if holder == rank else kept:
                owner = item.owner if item.standby is None else item.server_of(holder)
                if rank not in (owner, holder):
                    continue
                # This loop runs once for each piece of each parameter: no calls, for speed.
                for start, stop in holding.pushes if push else holding.intervals:
                    first = start if start > item.start else item.start
                    last = stop if stop < item.stop else item.stop
                    if first < last:
                        yield owner, holder, first, last


def _stages_that_use(spec: ParameterSpec, pipeline: PipelinePlan) -> list[int]:
    if spec.layer is not None:
        return [i for i, stage in enumerate(pipeline.stages) if spec.layer in stage.layers]
    stages = set()
    if OuterRole.FIRST in spec.roles:
        stages.add(0)
    # Ranks that run both the first and the last stage hold it once.
    if OuterRole.LAST in spec.roles and not (
        stages and pipeline.stages[-1].ranks == pipeline.stages[0].ranks
    ):
        stages.add(pipeline.num_stages - 1)
    return sorted(stages)


def _pushes(spec: ParameterSpec, tp_rank: int, tp_degree: int) -> tuple[Interval, ...]:
    """Return the rows whose gradients a rank sends.

    If all ranks of the group have the same gradient, each sends its share of the rows. If each has
    a part of the sum, such as for a head that several ranks hold, each sends all rows that it
    holds, and the owner adds them up.
    """
    if spec.tp_dim is None and not spec.tp_partial:
        return (piece_of(spec.cut_length, tp_rank, tp_degree),)
    return spec.rows_of(tp_rank, tp_degree)
