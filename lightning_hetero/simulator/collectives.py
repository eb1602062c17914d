"""What the collectives of an exchange take, from what one message takes: in a ring or pairwise.

With a `MessageCurve` small messages reach less of a link's rate, as NCCL's do. Counted for n ranks
and S bytes in all: ring and pairwise move S·(n-1)/n out of each rank and as much in. A ring pays
n-1 latencies, one behind another, and goes over every link of the ring; pairwise pays one, as its
messages are under way together. NCCL's trees serve all-reduces only, which an exchange has none of.
"""

from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["MessageCurve", "pairwise_s", "ring_s"]

Seconds = Callable[[float], float]
"""Seconds of one message by its bytes."""


@dataclass(frozen=True)
class MessageCurve:
    """The rate that a link reaches by the size of a message, measured at some sizes.

    Between two sizes seconds are interpolated; a smaller message takes as long as the smallest, and
    a larger one goes at the largest one's rate::

        curve = MessageCurve(((1e4, 1e9), (1e8, 50e9)))
        curve(2e8)  # 4 ms

    Raises:
        ConfigurationError: Sizes don't rise, or a larger message would take less time.
    """

    points: tuple[tuple[float, float], ...]
    """(bytes, bytes/s) in ascending order of bytes."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        seconds = [size / rate for size, rate in self.points if rate > 0]
        rises = len(seconds) == len(sizes) > 0 < sizes[0] and sizes == sorted(set(sizes))
        if not rises or seconds != sorted(seconds):
            raise ConfigurationError(
                f"A link's curve {self.points} must name rates above 0 for rising sizes, at which "
                "a larger message takes no less time. Leave out what was measured while the link "
                "was busy."
            )

    def __call__(self, num_bytes: float) -> float:
        """Return the seconds of a message."""
        sizes = [size for size, _ in self.points]
        place = bisect(sizes, num_bytes)
        if place == 0:
            return sizes[0] / self.points[0][1]
        size, rate = self.points[place - 1]
        if place == len(sizes):
            return num_bytes / rate
        following, its_rate = self.points[place]
        share = (num_bytes - size) / (following - size)
        return (1 - share) * size / rate + share * following / its_rate


def ring_s(num_ranks: int, num_bytes: float, message_s: Seconds) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of so many bytes in all.

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
