"""Decide which rank of one stage sends which part of a message to which rank of the next stage.

Every rank of a stage's group has the whole activation, and every rank of the next group needs it;
gradients go back in the same way. If the groups have equal size, each rank sends to one rank. If
the receiving group is smaller, some senders have nothing to do. If it is larger, a sender serves
several ranks: each gets one piece, and the group gathers the pieces over its own, faster links. So
with a senders and b receivers, a sender's link carries ⌈b/a⌉/b of an activation instead of ⌈b/a⌉
whole ones, and each receiver gets the other (b - 1)/b inside the group.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_hetero.core.plan import ParallelPlan, PipelinePlan

Edge = tuple[int, int, int]
"""A queue of messages, as (sender, receiver, channel). Messages of one edge keep their order."""


@dataclass(frozen=True, slots=True)
class SentPiece:
    """One of `count` equal pieces of a message's bytes, sent from one rank to another."""

    sender: int
    receiver: int
    index: int = 0
    count: int = 1
    channel: int = 0
    """Distinguishes messages from one rank to another that belong to different pairs of stages."""

    @property
    def edge(self) -> "Edge":
        """The queue in which the piece travels."""
        return self.sender, self.receiver, self.channel

    def bounds(self, num_bytes: int) -> tuple[int, int]:
        """Return the piece's bytes [first, last + 1); last pieces may be shorter or empty."""
        if self.count == 1:
            return 0, num_bytes
        size = -(-num_bytes // self.count)
        return min(self.index * size, num_bytes), min((self.index + 1) * size, num_bytes)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The previous or next stage, as one rank sees it."""

    received: SentPiece
    """The piece that the rank receives from it."""
    sent: tuple[SentPiece, ...]
    """The pieces that the rank sends to it; none if other ranks of its group send all."""


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


def find_neighbours(
    global_rank: int, pipeline: PipelinePlan
) -> dict[int, tuple[Neighbour | None, Neighbour | None]]:
    """Return the stages before and after each of a rank's stages, as the rank sees them."""
    pieces = _pieces_between(pipeline)

    def seen(boundary: int, *, is_next: bool) -> Neighbour | None:
        if not 0 <= boundary < len(pieces):
            return None
        sent, received = pieces[boundary] if is_next else pieces[boundary][::-1]
        return Neighbour(
            received=next(piece for piece in received if piece.receiver == global_rank),
            sent=tuple(piece for piece in sent if piece.sender == global_rank),
        )

    return {
        index: (seen(index - 1, is_next=False), seen(index, is_next=True))
        for index, stage in enumerate(pipeline.stages)
        if global_rank in stage.ranks
    }


def stage_edges(plan: ParallelPlan) -> tuple[Edge, ...]:
    """Return each queue of a plan's activations and of their gradients, once."""
    ways = (
        way for pipeline in plan.pipelines for both in _pieces_between(pipeline) for way in both
    )
    pieces = (piece for way in ways for piece in way)
    # Pieces between two stages of one rank stay there.
    return tuple(dict.fromkeys(i.edge for i in pieces if i.sender != i.receiver))


_Pieces = tuple[SentPiece, ...]


def _pieces_between(pipeline: PipelinePlan) -> list[tuple[_Pieces, _Pieces]]:
    """Return the pieces sent to the next stage and back, for each stage but the last."""
    used: Counter[tuple[int, int]] = Counter()

    def dealt(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[SentPiece]:
        for piece in deal_pieces(senders, receivers):
            yield replace(piece, channel=used[piece.sender, piece.receiver])
            used[piece.sender, piece.receiver] += 1

    pairs = pairwise([stage.ranks for stage in pipeline.stages])
    return [(tuple(dealt(one, other)), tuple(dealt(other, one))) for one, other in pairs]
