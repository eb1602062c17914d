"""Which bytes move between which ranks under a plan: the pull and push tables.

Pull carries weights from the owners of slices to the holders, push carries gradients from the
holders to the owners (Hydraulis §5.2; the LNK operators). Both are one table read in two
directions. All pieces of one *unit* (a layer, or what lies before or after the layers) for one peer
travel in one message, so with owners among the holders, D pipelines and k layers in a stage a rank
sends about k·(D-1) messages and one stage's worth of bytes each way.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import (
    Holding,
    OuterRole,
    ParameterSpec,
    Slice,
    holdings_of,
)

__all__ = ["Message", "Piece", "TransferTable", "unit_of"]


def unit_of(spec: ParameterSpec, num_layers: int) -> int:
    """Return the unit a parameter travels with: its layer, -1 before the layers, L after them."""
    if spec.layer is not None:
        return spec.layer
    return -1 if OuterRole.FIRST in spec.roles else num_layers


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a parameter's cut dim."""

    parameter: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Message:
    """All pieces of one unit that go from one rank to another; local copies have equal ends."""

    unit: int
    source: int
    destination: int
    pieces: tuple[Piece, ...]


class TransferTable:
    """The messages of one plan, seen from any rank; computed once per plan.

    Messages are listed in the one global order that all ranks follow: units ascending for pull
    (order of need), descending for push (order in which backward ends), and inside a unit by
    (owner, holder), so that no rank waits for one that waits for it.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        slices: Mapping[str, Sequence[Slice]],
        plan: ParallelPlan,
    ) -> None:
        self._num_layers = plan.num_layers
        self._specs = {spec.name: spec for spec in specs}
        self._slices = {name: tuple(items) for name, items in slices.items()}
        self._holdings: dict[str, tuple[Holding, ...]] = {
            spec.name: tuple(holdings_of(spec, plan)) for spec in specs
        }
        self._row_numels = {spec.name: spec.row_numel for spec in specs}
        self._names_at: dict[int, list[str]] = defaultdict(list)
        for spec in specs:
            ranks = {item.global_rank for item in self._holdings[spec.name]}
            for rank in sorted(ranks | {item.owner for item in self._slices[spec.name]}):
                self._names_at[rank].append(spec.name)

    def holdings(self, parameter: str) -> tuple[Holding, ...]:
        """Return who holds a parameter, in pipeline order."""
        return self._holdings[parameter]

    def holding(self, parameter: str, global_rank: int) -> Holding | None:
        """Return what a rank holds of a parameter, or None."""
        for item in self._holdings[parameter]:
            if item.global_rank == global_rank:
                return item
        return None

    def pull(self, global_rank: int, *, trainable_only: bool = False) -> list[Message]:
        """Return the weight messages that a rank sends, receives or copies, in global order."""
        moves = self._moves(global_rank, push=False, trainable_only=trainable_only)
        return [
            Message(unit, owner, holder, tuple(moves[unit, owner, holder]))
            for unit, owner, holder in sorted(moves)
        ]

    def push(self, global_rank: int) -> list[Message]:
        """Return the gradient messages that a rank sends, receives or copies, in global order."""
        moves = self._moves(global_rank, push=True, trainable_only=True)
        return [
            Message(unit, holder, owner, tuple(moves[unit, owner, holder]))
            for unit, owner, holder in sorted(moves, key=lambda key: (-key[0], key[1], key[2]))
        ]

    def numel(self, message: Message) -> int:
        """Return the number of elements of a message."""
        return sum(
            (piece.stop - piece.start) * self._row_numels[piece.parameter]
            for piece in message.pieces
        )

    def _moves(
        self, rank: int, *, push: bool, trainable_only: bool
    ) -> dict[tuple[int, int, int], list[Piece]]:
        """Return by (unit, owner, holder) the pieces in which `rank` takes part."""
        moves: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
        for name in self._names_at[rank]:
            spec = self._specs[name]
            if trainable_only and not spec.requires_grad:
                continue
            unit = unit_of(spec, self._num_layers)
            slices = self._slices[name]
            owned = [item for item in slices if item.owner == rank]
            for holding in self._holdings[name]:
                holder = holding.global_rank
                intervals = holding.pushes if push else holding.intervals
                for item in slices if holder == rank else owned:
                    # The innermost loop runs once for every piece there is: keep it flat.
                    for start, stop in intervals:
                        first = start if start > item.start else item.start
                        last = stop if stop < item.stop else item.stop
                        if first < last:
                            moves[unit, item.owner, holder].append(Piece(name, first, last))
        return moves
