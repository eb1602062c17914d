"""Prepare transfers beside the computation: on CUDA, on a stream of its own.

Packing and local copies are kernels too. On the stream of the computation they would stand between
its kernels, and a transfer would begin only where the computation has got to. On other devices they
run in the calling thread, and only the transfers themselves go on beside it.

Memory is safe without recording tensors on streams. Whatever is enqueued here waits for all that
the computation was given before, so a block that was allocated here and let go there is reused
behind its last use; and the computation joins before it lets go of what is read here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SideStream"]


class SideStream:
    """A stream beside the computation's on CUDA; the calling thread elsewhere.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Enqueue here, behind what the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return the end of what has been enqueued here so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None) -> None:
        """Let the current stream wait for a mark; the host doesn't wait."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)
