"""Digests of tensors: integers that depend on every bit.

A digest is the sum of the elements' bits as integers, each times an odd number given by its index.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["digest_of", "digests_of", "is_looked_at"]

_LOOKED_AT = frozenset({1, 100, 10_000, 1_000_000})

_AT_ONCE = 2**22
"""Values that are widened to 8 bytes at a time."""
_SMALL = 2**12
"""Most elements of tensors that are digested together: calls take longer than what they compute."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(rows: Tensor) -> Tensor:
    """Return the digest of a tensor as an int64 scalar on its device."""
    bits = _bits_of(rows)
    digest = torch.zeros((), dtype=torch.int64, device=rows.device)
    for first in range(0, len(bits), _AT_ONCE):
        part = bits[first : first + _AT_ONCE].long()
        factors = torch.arange(2 * first + 1, 2 * (first + len(part)), 2, device=rows.device)
        digest += (part * factors).sum()
    return digest


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of each tensor; the host waits for its device.

    They show changes that increment no version, such as `weight.data.clamp_(...)` in a forward.
    """
    small: dict[tuple[torch.device, int], list[str]] = defaultdict(list)
    names, digests = list[str](), list[Tensor]()
    for name, tensor in tensors.items():
        if tensor.numel() <= _SMALL:
            small[tensor.device, tensor.element_size()].append(name)
        else:
            names.append(name)
            digests.append(digest_of(tensor)[None])
    most = _AT_ONCE // _SMALL
    for alike in small.values():
        for first in range(0, len(alike), most):
            part = alike[first : first + most]
            names += part
            digests.append(_digests_together([tensors[name] for name in part]))
    numbers = torch.cat(digests).tolist() if digests else []
    found = dict(zip(names, numbers, strict=True))
    return {name: found[name] for name in tensors}


def _digests_together(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests of tensors on one device whose elements have one size."""
    device = tensors[0].device
    sizes = torch.tensor([item.numel() for item in tensors])
    owners = torch.repeat_interleave(sizes).to(device)
    starts = (sizes.cumsum(0) - sizes).to(device)
    places = torch.arange(len(owners), device=device) - starts[owners]
    products = torch.cat(list(map(_bits_of, tensors))).long() * (2 * places + 1)
    return torch.zeros(len(tensors), dtype=torch.int64, device=device).index_add_(
        0, owners, products
    )


def _bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()


def is_looked_at(iteration: int) -> bool:
    """Return whether costly checks run in an iteration, counted from 1.

    They run in few, so that steps stay fast; a fault of every iteration is found in the first.
    """
    return iteration in _LOOKED_AT
