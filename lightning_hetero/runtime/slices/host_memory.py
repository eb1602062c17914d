"""Bring tensors from a rank's device to its host and back, for slices that live on the host.

On CUDA the host's ends are pinned, so copies are enqueued like kernels and run at the link's rate.
Where device and host are one, nothing is copied.

Per iteration and owned parameter: a pull takes the compute dtype's bytes to the device, a push
4 bytes (fp32 sums) to the host, where they are scaled and the optimizer's step reads and writes.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["PinnedBlocks", "arrive_on_host", "end_to_end", "wait_for_device"]

_HOST = torch.device("cpu")
_ALIGNMENT_BYTES = 64


class PinnedBlocks:
    """Pinned memory for many tensors that stay, in few blocks.

    torch rounds each pinned allocation up to a power of two, so tensors one by one may take twice
    their bytes. Each block is the largest power of two that the tensors to come still fill. ::

        memory = PinnedBlocks(4 * num_elements)
        masters = [memory.empty(shape, torch.float32) for shape in shapes]

    Args:
        expected_bytes: Of all tensors together; there may be more.
        allocate: Returns a number of bytes, (bytes,), for tests without CUDA.
    """

    def __init__(
        self, expected_bytes: int, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        self._expected_bytes = expected_bytes
        self._allocate = allocate or _pin
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of any values."""
        num_bytes = math.prod(shape) * dtype.itemsize
        aligned = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if aligned > self._left.numel():
            filled = max(0, self._expected_bytes.bit_length() - 1)
            self._left = self._allocate(1 << max(filled, (aligned - 1).bit_length()))
        part, self._left = self._left[:num_bytes], self._left[aligned:]
        self._expected_bytes = max(0, self._expected_bytes - aligned)
        return part.view(dtype).view(tuple(shape)).data  # Each counts its own changes in place.


def _pin(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def end_to_end(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return tensors in one dim on a device, (elements,); all come from there or from its host."""
    if tensors[0].device == device:
        lines = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors]
        packed = torch.empty(sum(map(Tensor.numel, lines)), dtype=dtype, device=device)
        return torch.cat(lines, out=packed)
    sizes = [tensor.numel() for tensor in tensors]
    packed = _passing((sum(sizes),), dtype, device)
    for part, tensor in zip(torch.split(packed, sizes), tensors, strict=True):
        part.copy_(tensor.reshape(-1))
    return packed.to(device, non_blocking=True)


def arrive_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Begin to copy tensors to the host; they have arrived after `wait_for_device`."""
    arriving = {}
    for name, tensor in tensors.items():
        copy = _passing(tensor.shape, tensor.dtype, tensor.device)
        arriving[name] = copy.copy_(tensor, non_blocking=True)
    return arriving


def wait_for_device(device: torch.device) -> None:
    """Wait until what this thread has enqueued on a device is done; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _passing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of the host for what comes from a device or goes there; torch reuses it."""
    is_pinned = device.type == "cuda"
    return torch.empty(tuple(shape), dtype=dtype, device=_HOST, pin_memory=is_pinned)
