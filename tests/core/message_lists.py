"""The messages of a plan: by its table, and found parameter by parameter and pair by pair."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Interval, ParameterSpec, Slice, holdings_of
from lightning_hetero.core.transfers import TransferTable, Unit, unit_of


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a parameter's cut dim."""

    parameter: str
    start: int
    stop: int


@dataclass(frozen=True)
class Message:
    """All pieces of a unit that go from one rank to another; in a local copy both are the same."""

    unit: int
    source: int
    destination: int
    pieces: tuple[Piece, ...]
    numel: int


def messages_of(unit: Unit, rank: int, *, push: bool) -> list[Message]:
    """Return the messages of a unit that a rank sends, receives or copies, by (owner, holder)."""
    return [
        Message(
            unit.index,
            move.source,
            move.destination,
            tuple(Piece(unit.specs[index].name, *rows) for index, *rows in move.pieces),
            unit.kind.numel(move),
        )
        for move in unit.kind.moves(rank, push=push)
    ]


def pulls_of(table: TransferTable, rank: int, *, trainable_only: bool = False) -> list[Message]:
    """Return the weight messages that a rank sends, receives or copies, in global order."""
    units = table.trainable_units if trainable_only else table.units
    return [item for unit in units for item in messages_of(unit, rank, push=False)]


def pushes_of(table: TransferTable, rank: int) -> list[Message]:
    """Return the gradient messages that a rank sends, receives or copies, in global order."""
    units = reversed(table.trainable_units)
    return [item for unit in units for item in messages_of(unit, rank, push=True)]


def list_messages(
    specs: Sequence[ParameterSpec],
    slices: Mapping[str, Sequence[Slice]],
    plan: ParallelPlan,
    rank: int,
    *,
    push: bool,
    trainable_only: bool,
) -> list[Message]:
    """Return what a rank sends, receives or copies in a pull or a push, in the global order."""
    moves: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    numels: dict[tuple[int, int, int], int] = defaultdict(int)
    for spec in specs:
        if trainable_only and not spec.requires_grad:
            continue
        for holding in holdings_of(spec, plan):
            for item in slices[spec.name]:
                if rank not in (item.owner, holding.global_rank):
                    continue
                for interval in holding.pushes if push else holding.intervals:
                    first, last = _overlap(interval, (item.start, item.stop))
                    if first < last:
                        key = unit_of(spec, plan.num_layers), item.owner, holding.global_rank
                        moves[key].append(Piece(spec.name, first, last))
                        numels[key] += (last - first) * spec.row_numel
    order = sorted(moves, key=lambda key: (-key[0] if push else key[0], key[1], key[2]))
    return [
        Message(
            unit,
            *((holder, owner) if push else (owner, holder)),
            tuple(moves[unit, owner, holder]),
            numels[unit, owner, holder],
        )
        for unit, owner, holder in order
    ]


def _overlap(a: Interval, b: Interval) -> Interval:
    return max(a[0], b[0]), min(a[1], b[1])
