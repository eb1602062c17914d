"""Times of the collectives of an exchange from those of one message: in a ring or pairwise.

With a `MessageCurve` small messages reach less of a link's rate, as NCCL's do. Counted for n ranks
and S bytes in all: ring and pairwise move S·(n-1)/n out of each rank and as much in. A ring pays
n-1 latencies, one after another, and goes over every link of the ring; pairwise pays one, as its
messages are under way together. NCCL's trees serve all-reduces only, which an exchange has none of.
"""

from collections.abc import Callable, Iterable

__all__ = ["pairwise_s", "ring_s"]

Seconds = Callable[[float], float]
"""Seconds of one message by its bytes."""


def ring_s(num_ranks: int, num_bytes: float, message_s: Seconds) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of these bytes in all.

    An all-reduce is one of each.
    """
    return (num_ranks - 1) * message_s(num_bytes / num_ranks)


def pairwise_s(messages: Iterable[tuple[int, float, float]]) -> float:
    """Return the seconds in which a rank sends each other rank its piece.

    Args:
        messages: (messages of a kind, seconds of each, of which latency).
    """
    found = [item for item in messages if item[0]]
    latency_s = max((latency_s for _, _, latency_s in found), default=0.0)
    return latency_s + sum(count * (seconds - own_s) for count, seconds, own_s in found)
