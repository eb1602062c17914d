"""Copy a step's state to host memory while training goes on.

Slices change only in the optimizer step. So they can be copied while the next iteration's forward
and backward run; code that is about to change them first waits for the copy (`Snapshot.wait`). On
CUDA the copies go into pinned memory on a stream of their own; on the CPU a thread makes them. The
host memory is allocated once and reused.

Each byte is read once and written once, at the bandwidth of memory or PCIe.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from lightning_hetero.checkpoint.content import CheckpointContent, tensors_of
from lightning_hetero.checkpoint.deadlines import BackgroundThread

__all__ = ["HostBuffer", "Snapshot"]


class HostBuffer:
    """Memory for one snapshot at a time, reused between snapshots.

    Args:
        timeout_s: How long a device may take to copy a state to the host.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._copies: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._free = threading.Semaphore(1)
        self._copier = BackgroundThread("checkpoint-snapshot")

    def take(self, content: CheckpointContent) -> "Snapshot":
        """Start a snapshot.

        Raises:
            TimeoutError: A hanging write still reads the memory of the previous snapshot.
        """
        if not self._free.acquire(blocking=False):
            raise TimeoutError("The last checkpoint hasn't been written yet.")
        try:
            return self._start(content)
        except BaseException:
            self._free.release()
            raise

    def close(self) -> None:
        """End the copying thread after its work; doesn't wait for it."""
        self._copier.finish()

    def _start(self, content: CheckpointContent) -> "Snapshot":
        tensors = [tensor.detach() for tensor in tensors_of(content).values()]
        on_device = any(tensor.is_cuda for tensor in tensors)
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if layout != [(copy.shape, copy.dtype) for copy in self._copies]:
            self._copies = [
                torch.empty(shape, dtype=dtype, pin_memory=on_device) for shape, dtype in layout
            ]
        copies = self._copies
        if on_device:
            done = self._copy_from_device(tensors, copies)
            future = self._copier.submit(done.synchronize)
        else:
            future = self._copier.submit(_copy, tensors, copies)
        named = dict(zip(tensors_of(content), copies, strict=True))
        return Snapshot(
            content=content,
            tensors=named,
            timeout_s=self._timeout_s,
            _future=future,
            _free=self._free,
        )

    def _copy_from_device(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
    ) -> torch.cuda.Event:
        """Queue the copies behind the current stream's work; return an event at their end."""
        device = next(tensor.device for tensor in tensors if tensor.is_cuda)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for tensor, copy in zip(tensors, copies, strict=True):
                copy.copy_(tensor, non_blocking=True)
        done: torch.cuda.Event = self._stream.record_event()
        return done


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of one rank's state on the host."""

    content: CheckpointContent
    """The state that was copied; its own tensors may have changed since."""
    tensors: Mapping[tuple[int, str], torch.Tensor]
    """The copies: (index of the slice, key of the tensor) to tensor."""
    timeout_s: float
    """How long the copy may take."""
    _future: "Future[None]"
    _free: threading.Semaphore

    def wait(self) -> None:
        """Wait until the originals may change; raise the copy's error if it failed.

        Raises:
            TimeoutError: The device doesn't answer.
        """
        if not wait([self._future], timeout=self.timeout_s).done:
            raise TimeoutError(f"The state wasn't copied to the host in {self.timeout_s:g} s.")
        self._future.result()

    def release(self) -> None:
        """Free the memory for the next snapshot; the copies mustn't be used any more."""
        self._free.release()


def _copy(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.copy_(tensor)
