"""Copy a step's state to host memory while training goes on.

Slices change only in the optimizer step. So they can be copied while the next iteration's forward
and backward run; code that is about to change them first waits for the copy (`Snapshot.wait`). On
CUDA the copies go into pinned memory on a stream of their own; on the CPU a thread makes them. The
host memory is allocated once and reused.

Each byte is read once and written once, at the bandwidth of memory or PCIe.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import torch

from lightning_hetero.checkpoint.content import CheckpointContent
from lightning_hetero.checkpoint.deadlines import BackgroundThread
from lightning_hetero.checkpoint.manifest import CheckpointId


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of one rank's state on the host."""

    content: CheckpointContent
    """The state, with copies of its tensors."""
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


@dataclass(kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is being written; if that fails, each of its waits raises the reason."""

    id: CheckpointId
    snapshot: Snapshot | None
    """The copy in host memory; None if storage still reads the memory of an earlier one."""
    stall_s: float
    """Seconds for which `save` held up training, including the wait for the checkpoint before."""
    metadata: Mapping[str, bytes]
    leaving: Collection[str]
    local: "Future[None]" = field(default_factory=Future)
    remote: "Future[bool]" = field(default_factory=Future)

    def wait_for_snapshot(self) -> None:
        """Wait until the tensors may change; to be called before the next optimizer step."""
        if self.snapshot is not None:
            self.snapshot.wait()

    def wait_until_confirmed(self, timeout_s: float | None = None) -> None:
        """Wait until the parts of all ranks, and their copies, are in the nodes' own tiers.

        Raises:
            CheckpointError: Some part or copy couldn't be written.
        """
        self.local.result(timeout_s)

    def wait_until_uploaded(self, timeout_s: float | None = None) -> bool:
        """Wait until all ranks' parts are in the remote tier; return False if it was skipped.

        While another upload runs, the part waits for the next save or for `upload_newest`.
        """
        return bool(self.remote.result(timeout_s))


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

    def take(self, content: CheckpointContent) -> Snapshot:
        """Start a snapshot.

        Raises:
            TimeoutError: A hanging write still reads the memory of the previous snapshot.
        """
        if not self._free.acquire(blocking=False):
            raise TimeoutError("The last checkpoint hasn't been written yet.")
        try:
            # In the layout of files, which are written from this memory.
            dims = [item.first_dim(key) for item in content.slices for key in item.tensors]
            tensors = [t.detach() for item in content.slices for t in item.tensors.values()]
            future = self._start([t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)])
        except BaseException:
            self._free.release()
            raise
        copies = (copy.movedim(0, dim) for copy, dim in zip(self._copies, dims, strict=True))
        slices = tuple(item.map(lambda _: next(copies)) for item in content.slices)
        return Snapshot(
            content=replace(content, slices=slices),
            timeout_s=self._timeout_s,
            _future=future,
            _free=self._free,
        )

    def close(self) -> None:
        """End the copying thread after its work; doesn't wait for it."""
        self._copier.finish()

    def _start(self, tensors: Sequence[torch.Tensor]) -> "Future[None]":
        on_device = any(tensor.is_cuda for tensor in tensors)
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if layout != [(copy.shape, copy.dtype) for copy in self._copies]:
            self._copies = [
                torch.empty(shape, dtype=dtype, pin_memory=on_device) for shape, dtype in layout
            ]
        if not on_device:
            return self._copier.submit(_copy, tensors, self._copies)
        device = next(tensor.device for tensor in tensors if tensor.is_cuda)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # After the work that is queued already.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy(tensors, self._copies)
        return self._copier.submit(self._stream.record_event().synchronize)


def _copy(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.copy_(tensor, non_blocking=True)
