"""Decide which rank of one stage sends which part of a message to which rank of the next stage.

Every rank of a stage's group has the whole activation, and every rank of the next one needs it;
gradients go back the same way. Groups of equal size send rank by rank. If the receiving group is
smaller, some senders have nothing to do. If it is larger, a sender serves several ranks: each gets
a piece, and the group puts the pieces together over its own, faster links. So with a senders and b
receivers, a sender's link carries ⌈b/a⌉/b of an activation instead of ⌈b/a⌉ whole ones, and each
receiver gets the other (b - 1)/b inside the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hetero.core.plan import ParallelPlan

__all__ = ["Neighbour", "SentPiece", "deal_pieces", "find_neighbour", "stage_edges"]


@dataclass(frozen=True, slots=True)
class SentPiece:
    """One of `count` equal pieces of a message's bytes, sent from one rank to another."""

    sender: int
    receiver: int
    index: int = 0
    count: int = 1

    def bounds(self, num_bytes: int) -> tuple[int, int]:
        """Return the piece's bytes [first, last + 1); the last pieces may be short or empty."""
        if self.count == 1:
            return 0, num_bytes
        size = -(-num_bytes // self.count)
        return min(self.index * size, num_bytes), min((self.index + 1) * size, num_bytes)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The stage before or after, as one rank sees it."""

    received: SentPiece
    """The piece that the rank receives from it."""
    sent: tuple[SentPiece, ...]
    """The pieces that the rank sends to it; none if others of its group do that."""


def deal_pieces(senders: Sequence[int], receivers: Sequence[int]) -> tuple[SentPiece, ...]:
    """Return the piece that each receiver gets, in order of the receivers.

    Pieces are numbered by global rank, as communicators order their members.
    """
    count = len(receivers) if len(receivers) > len(senders) else 1
    order = sorted(receivers)
    return tuple(
        SentPiece(
            sender=senders[place * len(senders) // len(receivers)],
            receiver=rank,
            index=order.index(rank) if count > 1 else 0,
            count=count,
        )
        for place, rank in enumerate(receivers)
    )


def find_neighbour(global_rank: int, own: Sequence[int], other: Sequence[int]) -> Neighbour:
    """Return another stage's group as a rank of the group `own` sees it."""
    received = deal_pieces(other, own)[own.index(global_rank)]
    sent = (piece for piece in deal_pieces(own, other) if piece.sender == global_rank)
    return Neighbour(received=received, sent=tuple(sent))


def stage_edges(plan: ParallelPlan) -> tuple[tuple[int, int], ...]:
    """Return each (sender, receiver) of a plan's activations and of their gradients, once."""
    pairs = [
        pair for pipeline in plan.pipelines for pair in pairwise([s.ranks for s in pipeline.stages])
    ]
    pieces = (piece for a, b in pairs for ends in ((a, b), (b, a)) for piece in deal_pieces(*ends))
    return tuple(dict.fromkeys((piece.sender, piece.receiver) for piece in pieces))
