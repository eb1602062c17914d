"""The messages of a plan, by its table of transfers."""

from dataclasses import dataclass

from lightning_hetero.exchange.transfers import TransferTable, Unit


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
