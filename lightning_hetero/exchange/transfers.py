"""Decide which bytes move between which ranks under a plan: the pull and push tables.

A pull sends weights from the owners of slices to the holders, a push sends gradients from the
holders to the owners (Hydraulis §5.2, "LNK operators"). Both use one table, in opposite directions.
Example: rank 0 owns rows 0 to 4 of a weight of 10 rows, rank 1 the others, and both hold all of it.
In a pull rank 0 sends rows 0 to 4 to rank 1 and gets rows 5 to 9; in a push it sends its gradient
of rows 5 to 9 to rank 1, gets rank 1's of rows 0 to 4, and adds these to its own.

All pieces of one *unit* (a layer, or the parameters before or after the layers) travel together: in
one message to each peer, or in one collective of each `ShardGroup`. Consecutive small layers with
the same holders are merged into one unit, as in DDP's buckets. With redundancy a push goes to both
the owner and the standby of each slice, and a pull comes from one of them.

Units whose parameters have the same owners, holders and row sizes are of one `UnitKind`, and the
table is computed once per kind. Units have no shard groups if owners aren't the holders
(`Ownership.EVEN`), if TP degrees differ, if blocks are sharded one by one, or if each owner has
whole parameters. Then a rank exchanges rows with every rank that keeps or holds any of them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.reading import Choice
from lightning_hetero.exchange.holders import Holding, ParameterPlacement, PlanHolders
from lightning_hetero.exchange.slices import Interval, OuterRole, ParameterSpec, Slice


class ExchangeKind(Choice):
    """How units travel between their owners and their holders."""

    AUTO = "auto"
    """MESSAGES for few ranks on gloo, else COLLECTIVES, or BY_NODE where that is faster."""
    MESSAGES = "messages"
    """One message for each unit and peer."""
    COLLECTIVES = "collectives"
    """One collective for each unit, and gradients summed by their owner in pipeline order."""
    BY_NODE = "by-node"
    """COLLECTIVES, but each node first sums the gradients of its ranks."""
    REDUCE_SCATTER = "reduce-scatter"
    """COLLECTIVES, but the backend sums the gradients of units that all their ranks hold whole, in
    the compute dtype and in the backend's own order."""


MOST_BY_MESSAGES = 8
"""Largest number of ranks that exchange a unit by messages on gloo under `ExchangeKind.AUTO`; more
use a collective."""


def are_collective(kind: ExchangeKind, backend: str, num_members: int) -> bool:
    """Return whether ranks exchange units by a collective rather than by messages.

    The runtime and the simulator both use this rule.

    Args:
        kind: How units travel.
        backend: The ranks' backend: "gloo", "nccl", …
        num_members: Number of ranks of the shard group, or of the unit if it has no shard groups.
    """
    if num_members == 1 or kind is ExchangeKind.MESSAGES:
        return False
    return kind is not ExchangeKind.AUTO or backend != "gloo" or num_members > MOST_BY_MESSAGES


def unit_of(spec: ParameterSpec, num_layers: int) -> int:
    """Return the unit a parameter travels with: its layer, -1 before the layers, L after them."""
    if spec.layer is not None:
        return spec.layer
    return -1 if OuterRole.FIRST in spec.roles else num_layers


@dataclass(frozen=True, slots=True)
class Move:
    """All pieces of a unit that go from one rank to another, or are copied on one rank.

    Moves are the same for all units of a kind, so parameters are named by index.
    """

    source: int
    destination: int
    pieces: tuple[tuple[int, int, int], ...]
    """(index of the parameter in its unit, first row, last row + 1)."""


MOST_PADDING = 1 / 8
"""Largest allowed padding of a shard group's pieces, as a share of the unit's bytes. R rows that
are divided among D ranks need at most D/R of padding, so R = 8·D rows always suffice."""


class ShardGroup(NamedTuple):
    """Ranks that hold the same rows of a unit's parameters, and own exactly these rows together.

    In a pull each rank gathers the pieces of the others, as in FSDP; in a push each gets the
    gradients of its own piece. The group consists of all holders of the unit, or under tensor
    parallelism of those with the same `tp_rank`. Weights that are whole on all ranks of a stage,
    such as a norm's, are divided among the stage's shard groups.
    """

    members: tuple[int, ...]
    """The ranks, ascending."""
    held: tuple[Interval, ...]
    """For each parameter the rows that all members hold."""
    pieces: tuple[tuple[Interval, ...], ...]
    """The rows that each member owns (in a push: keeps), [parameter][member]; counted from the
    first row held."""

    def fits(self, row_numels: Sequence[int]) -> bool:
        """Whether all rows have elements, and equal pieces need at most `MOST_PADDING`."""
        padded = exact = 0
        for pieces, row_numel in zip(self.pieces, row_numels, strict=True):
            sizes = [stop - start for start, stop in pieces]
            padded += max(sizes) * len(sizes) * row_numel
            exact += sum(sizes) * row_numel
        return all(row_numels) and padded <= (1 + MOST_PADDING) * exact


class UnitKind:
    """What units have in common whose parameters have the same owners, holders and row sizes.

    Args:
        placements: Owners and holders of each parameter.
        row_numels: Elements in a row of each parameter.
    """

    def __init__(self, placements: Sequence[ParameterPlacement], row_numels: Sequence[int]) -> None:
        self.placements = tuple(placements)
        self.row_numels = tuple(row_numels)
        self._shard_groups: dict[bool, tuple[ShardGroup, ...] | None] = {}

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Ranks that hold or keep any rows of a unit, ascending."""
        return tuple(sorted(frozenset().union(*(item.members for item in {*self.placements}))))

    @cached_property
    def holders(self) -> frozenset[int]:
        """Ranks that hold any rows of a unit."""
        return frozenset().union(*(item.holders.by_rank for item in {*self.placements}))

    @cached_property
    def has_standbys(self) -> bool:
        """Whether any row is kept by two ranks."""
        return any(item.has_standbys for item in self.placements)

    def shard_groups(self, *, push: bool) -> tuple[ShardGroup, ...] | None:
        """Return the shard groups in which units are pulled or pushed; each member is in one.

        None unless all parameters have the same groups, with pieces of about one size in each.
        """
        key = push and self.has_standbys
        if key not in self._shard_groups:
            self._shard_groups[key] = self._find_shard_groups(push=key)
        return self._shard_groups[key]

    def _find_shard_groups(self, *, push: bool) -> tuple[ShardGroup, ...] | None:
        by_placement = {item: item.shard_groups(push=push) for item in {*self.placements}}
        rows = [found for item in self.placements if (found := by_placement[item]) is not None]
        if len(rows) < len(self.placements) or any(i.keys() != rows[0].keys() for i in rows):
            return None
        groups = tuple(
            ShardGroup(members, *zip(*(item[members] for item in rows), strict=True))
            for members in rows[0]
        )
        return groups if all(item.fits(self.row_numels) for item in groups) else None

    @cached_property
    def groups(self) -> frozenset[tuple[int, ...]]:
        """The sets of ranks that need a communicator to exchange units by collectives."""
        found: set[tuple[int, ...]] = set()
        for groups in (self.shard_groups(push=False), self.shard_groups(push=True)):
            found |= {self.members} if groups is None else {item.members for item in groups}
        return frozenset(found)

    def moves(self, global_rank: int, *, push: bool) -> list[Move]:
        """Return the moves that a rank sends, receives or makes locally, by (owner, holder)."""
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        by_placement = {i: [*i.overlaps(global_rank, push=push)] for i in {*self.placements}}
        for index, placement in enumerate(self.placements):
            for owner, holder, start, stop in by_placement[placement]:
                pieces = found[owner, holder]
                if pieces and pieces[-1][0] == index and pieces[-1][2] == start:
                    start = pieces.pop()[1]
                pieces.append((index, start, stop))
        return [
            Move(holder, owner, tuple(pieces)) if push else Move(owner, holder, tuple(pieces))
            for (owner, holder), pieces in sorted(found.items())
        ]

    def numel(self, move: Move) -> int:
        """Return the number of elements of a move."""
        return sum((stop - start) * self.row_numels[index] for index, start, stop in move.pieces)


@dataclass(frozen=True)
class Unit:
    """Parameters that travel together."""

    indices: tuple[int, ...]
    """Indices by `unit_of`, ascending; several if small neighbours travel together."""
    specs: tuple[ParameterSpec, ...]
    kind: UnitKind

    @property
    def index(self) -> int:
        """The first of `indices`, by which the unit is named."""
        return self.indices[0]

    @cached_property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(spec.numel for spec in self.specs)

    def is_joined_by(self, following: "Unit", most_numel: int) -> bool:
        """Whether the following unit should travel with this one."""
        one, other = self.kind, following.kind
        is_small = self.numel + following.numel <= most_numel
        return is_small and one.members == other.members and one.holders == other.holders


class TransferTable:
    """The units of one plan, and who holds what; computed once per plan.

    All ranks follow one global order, so that no two ranks wait for each other: units ascend in a
    pull (the order in which forward needs them) and descend in a push (the order in which backward
    finishes them); inside a unit the order is by (owner, holder).

    Args:
        specs: The parameters; names are unique.
        slices: Owners of every parameter.
        plan: The plan.
        merged_numel: Neighbours with the same holders and members become one unit if they have at
            most this many elements together.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        slices: Mapping[str, Sequence[Slice]],
        plan: ParallelPlan,
        *,
        merged_numel: int = 0,
    ) -> None:
        self._merged_numel = merged_numel
        self._specs = {spec.name: spec for spec in specs}
        holders = PlanHolders(plan)
        self._holders = {spec.name: holders.of(spec) for spec in specs}
        self._slices = slices
        self._placements: dict[Hashable, ParameterPlacement] = {}
        self._kinds: dict[Hashable, UnitKind] = {}
        members: dict[int, list[ParameterSpec]] = defaultdict(list)
        for spec in specs:
            if slices[spec.name]:  # Else nobody owns it, and nothing of it moves.
                members[unit_of(spec, plan.num_layers)].append(spec)
        self._members = {index: members[index] for index in sorted(members)}

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """All units, ascending."""
        return self._units_of(lambda _: True)

    @cached_property
    def trainable_units(self) -> tuple[Unit, ...]:
        """All units, ascending, with those of their parameters that require gradients."""
        return self._units_of(lambda spec: spec.requires_grad)

    def _units_of(self, is_taken: Callable[[ParameterSpec], bool]) -> tuple[Unit, ...]:
        units: list[Unit] = []
        for index, found in self._members.items():
            specs = tuple(spec for spec in found if is_taken(spec))
            if not specs:
                continue
            unit = Unit((index,), specs, self._kind_of(specs))
            if units and units[-1].is_joined_by(unit, self._merged_numel):
                before = units.pop()
                specs = before.specs + specs
                unit = Unit((*before.indices, index), specs, self._kind_of(specs))
            units.append(unit)
        return tuple(units)

    def _kind_of(self, specs: Sequence[ParameterSpec]) -> UnitKind:
        placements = tuple(self._placement_of(spec.name) for spec in specs)
        row_numels = tuple(spec.row_numel for spec in specs)
        return self._kinds.setdefault((placements, row_numels), UnitKind(placements, row_numels))

    def _placement_of(self, parameter: str) -> ParameterPlacement:
        holders, slices = self._holders[parameter], self._slices[parameter]
        # By identity, as `assign_owners` gives one object to all parameters that are cut alike.
        return self._placements.setdefault(
            (holders, id(slices)), ParameterPlacement(holders, slices)
        )

    def holdings(self, parameter: str) -> tuple[Holding, ...]:
        """Return a parameter's holdings, in pipeline order."""
        return self._holders[parameter].holdings

    def holders(self, parameter: str) -> Mapping[int, Holding]:
        """Return a parameter's holdings, by global rank."""
        return self._holders[parameter].by_rank

    def holding(self, parameter: str, global_rank: int) -> Holding | None:
        """Return a rank's holding of a parameter; None if it holds nothing."""
        return self._holders[parameter].by_rank.get(global_rank)

    def traffic(self, global_rank: int, *, push: bool) -> Counter[tuple[int, int]]:
        """Return the trainable elements that a rank sends and receives, by (source, destination).

        Local copies are included, under (rank, rank).
        """
        numels: Counter[tuple[int, int]] = Counter()
        for kind, count in self._trainable_kinds().items():
            if global_rank in kind.members:
                for move in kind.moves(global_rank, push=push):
                    numels[move.source, move.destination] += count * kind.numel(move)
        return numels

    def largest_push(self, global_rank: int) -> int:
        """Return the elements of the largest message that a rank sends or receives in a push."""
        kinds = (kind for kind in self._trainable_kinds() if global_rank in kind.members)
        moves = ((kind, kind.moves(global_rank, push=True)) for kind in kinds)
        return max((kind.numel(move) for kind, found in moves for move in found), default=0)

    def _trainable_kinds(self) -> Counter[UnitKind]:
        return Counter(unit.kind for unit in self.trainable_units)
