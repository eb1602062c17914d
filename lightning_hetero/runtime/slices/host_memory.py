"""Copy tensors from a rank's device to its host and back, for slices that are on the host.

On CUDA the host's tensors are pinned, so copies are enqueued like kernels and run at the link's
rate. If slices live on the device, nothing is copied.

In each iteration, for each owned value, a pull copies 2 or 4 bytes (the compute dtype) to the
device, and a push copies 4 bytes (a sum in fp32) to the host, where the sum is scaled and the
optimizer steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

_HOST = torch.device("cpu")
_ALIGNMENT_BYTES = 64


class PinnedBlocks:
    """Pinned memory for many long-lived tensors, in few blocks.

    torch rounds each pinned allocation up to a power of two, so separate tensors may take twice
    their bytes. Here each block is the largest power of two that the remaining tensors still fill.
    ::

        memory = PinnedBlocks(4 * num_elements)
        masters = [memory.empty(shape, torch.float32) for shape in shapes]

    More than the `expected_bytes` may be asked for.
    """

    def __init__(
        self, expected_bytes: int, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        self._expected_bytes = expected_bytes
        self._allocate = allocate or _pin
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        aligned = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if aligned > self._left.numel():
            filled = max(0, self._expected_bytes.bit_length() - 1)
            self._left = self._allocate(1 << max(filled, (aligned - 1).bit_length()))
        part, self._left = self._left[:num_bytes], self._left[aligned:]
        self._expected_bytes = max(0, self._expected_bytes - aligned)
        return part.view(dtype).view(tuple(shape)).data  # `data` has its own version counter.


def _pin(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def end_to_end(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return tensors concatenated on a device, with one dim; all are there, or all on its host."""
    if tensors[0].device == device:
        if tensors[0].dtype is dtype:
            line: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
            return line.to(dtype)
        lines = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors]
        packed = torch.empty(sum(map(Tensor.numel, lines)), dtype=dtype, device=device)
        return torch.cat(lines, out=packed)
    sizes = [tensor.numel() for tensor in tensors]
    packed = _passing((sum(sizes),), dtype, device)
    for part, tensor in zip(torch.split(packed, sizes), tensors, strict=True):
        part.copy_(tensor.reshape(-1))
    return packed.to(device, non_blocking=True)


def arrive_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Begin to copy tensors to the host; `wait_for_device` waits until they have arrived."""
    arriving = {}
    for name, tensor in tensors.items():
        copy = _passing(tensor.shape, tensor.dtype, tensor.device)
        arriving[name] = copy.copy_(tensor, non_blocking=True)
    return arriving


def wait_for_device(device: torch.device) -> None:
    """Wait for all work that this thread has enqueued on a device; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _passing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a host tensor for a copy from or to a device; torch reuses its memory."""
    is_pinned = device.type == "cuda"
    return torch.empty(tuple(shape), dtype=dtype, device=_HOST, pin_memory=is_pinned)
