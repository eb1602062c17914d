"""Times of messages by their size: small messages reach only a part of a link's rate."""

from bisect import bisect
from dataclasses import dataclass

from lightning_hetero.core.errors import ClusterError

__all__ = ["MessageCurve"]


@dataclass(frozen=True)
class MessageCurve:
    """Rates of a link by the size of the message, measured at some sizes.

    Between two sizes seconds are interpolated. Smaller messages take as long as the smallest
    measured one, larger ones go at the rate of the largest::

        curve = MessageCurve(((1e4, 1e9), (1e8, 50e9)))
        curve(2e8)  # 4 ms

    Raises:
        ClusterError: Sizes don't rise, or a larger message would take less time.
    """

    points: tuple[tuple[float, float], ...]
    """(bytes, bytes/s) in ascending order of bytes."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        seconds = [size / rate for size, rate in self.points if rate > 0]
        rises = len(seconds) == len(sizes) > 0 < sizes[0] and sizes == sorted(set(sizes))
        if not rises or seconds != sorted(seconds):
            raise ClusterError(
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
