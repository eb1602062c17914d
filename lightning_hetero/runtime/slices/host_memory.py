"""Bring tensors from a rank's device to its host and back, for slices that live on the host.

On CUDA the host's ends are pinned, so copies are enqueued like kernels and run at the link's rate.
Where device and host are one, nothing is copied.

Per iteration and owned parameter: a pull takes the compute dtype's bytes to the device, a push
4 bytes (fp32 sums) to the host, where they are scaled and the optimizer's step reads and writes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["arrive_on_host", "empty_at", "end_to_end", "wait_for_device"]


def empty_at(
    place: torch.device, shape: Sequence[int], dtype: torch.dtype, *, reached_from: torch.device
) -> Tensor:
    """Return memory at a place, pinned if it is the host of a CUDA device that reaches for it."""
    is_pinned = place.type == "cpu" and reached_from.type == "cuda"
    return torch.empty(tuple(shape), dtype=dtype, device=place, pin_memory=is_pinned)


def end_to_end(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return tensors in one dim on a device, (elements,), from there or from its host."""
    if {tensor.device for tensor in tensors} == {device}:
        lines = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors]
        packed = torch.empty(sum(map(Tensor.numel, lines)), dtype=dtype, device=device)
        return torch.cat(lines, out=packed)
    host, sizes = torch.device("cpu"), [tensor.numel() for tensor in tensors]
    packed = empty_at(host, (sum(sizes),), dtype, reached_from=device)
    for part, tensor in zip(torch.split(packed, sizes), tensors, strict=True):
        part.copy_(tensor.reshape(-1))
    return packed.to(device, non_blocking=True)


def arrive_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Begin to copy tensors to the host; they have arrived after `wait_for_device`."""
    arriving = {}
    for name, tensor in tensors.items():
        host = torch.device("cpu")
        copy = empty_at(host, tensor.shape, tensor.dtype, reached_from=tensor.device)
        arriving[name] = copy.copy_(tensor, non_blocking=True)
    return arriving


def wait_for_device(device: torch.device) -> None:
    """Wait until what this thread has enqueued on a device is done; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
