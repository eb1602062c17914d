"""Exchange bytes of any length between ranks, on a process group of its own.

It fills the seam that `checkpoint.transport` leaves: saving and recovering send each other messages
and parts of files through it, beside training and from another thread. Lengths travel first, since
only the sender knows them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.errors import PeerError

__all__ = ["GroupTransport"]


class GroupTransport:
    """Blocking exchange over gloo, on the CPU; made by all ranks together.

    One thread at a time may use it. A rank that is gone, or silent for longer than `timeout`, is a
    `PeerError`.

    Args:
        timeout: How long one operation waits for another rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give `data` to all ranks; return what each gave, by rank."""
        with self._naming("another rank"):
            lengths = list(torch.zeros(self.world_size, 1, dtype=torch.int64).unbind(0))
            dist.all_gather(lengths, torch.tensor([len(data)]), group=self._group)
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = _as_tensor(data)
            rows = list(torch.empty(self.world_size, longest, dtype=torch.uint8).unbind(0))
            if longest:
                dist.all_gather(rows, padded, group=self._group)
        return [
            row[: int(length)].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)
        ]

    def send(self, data: bytes, destination: int) -> None:
        """Send bytes to a rank that calls `receive`."""
        with self._naming(f"rank {destination}"):
            dist.send(torch.tensor([len(data)]), destination, group=self._group)
            if data:
                dist.send(_as_tensor(data), destination, group=self._group)

    def receive(self, source: int) -> bytes:
        """Return the next bytes that a rank sends here."""
        with self._naming(f"rank {source}"):
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, source, group=self._group)
            data = torch.empty(int(length), dtype=torch.uint8)
            if data.numel():
                dist.recv(data, source, group=self._group)
        return data.numpy().tobytes()

    @contextmanager
    def _naming(self, peer: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"Rank {self.global_rank} lost {peer} while they exchanged checkpoint data: {error}"
            ) from error


def _as_tensor(data: bytes) -> Tensor:
    # By way of a bytearray, because a tensor over bytes could be written to, of which torch warns.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
