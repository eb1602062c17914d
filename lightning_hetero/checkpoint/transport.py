"""How ranks of one run exchange bytes for checkpoints: the seam that `runtime` fills.

Every call is made by all ranks concerned in one agreed order, so blocking sends can't deadlock.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

__all__ = ["SoloTransport", "Transport", "take_turns"]


class Transport(Protocol):
    """Blocking exchange between the ranks of a run; PeerError if another one is gone."""

    @property
    def global_rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give `data` to all ranks; return what each gave, by rank. All ranks call it."""

    def send(self, data: bytes, destination: int) -> None:
        """Send bytes of any length to a rank that calls `receive`."""

    def receive(self, source: int) -> bytes:
        """Return the next bytes that a rank sends here."""


class SoloTransport:
    """The only rank of a run."""

    global_rank = 0
    world_size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the one contribution."""
        return [data]

    def send(self, data: bytes, destination: int) -> None:
        """Refuse: there is nobody else."""
        raise AssertionError(f"a single rank sends {len(data)} bytes to rank {destination}")

    def receive(self, source: int) -> bytes:
        """Refuse: there is nobody else."""
        raise AssertionError(f"a single rank receives from rank {source}")


def take_turns(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return an order of (sender, receiver) pairs in which many of them run side by side.

    In each round a rank has at most one pair. If every rank works through its own pairs in this
    order, blocking sends can't deadlock: both ends of the first unfinished pair are free.
    """
    free_round: dict[int, int] = defaultdict(int)
    rounds = []
    for sender, receiver in pairs:
        turn = max(free_round[sender], free_round[receiver])
        free_round[sender] = free_round[receiver] = turn + 1
        rounds.append(turn)
    return sorted(range(len(pairs)), key=rounds.__getitem__)
