"""Digests of tensors: integers that depend on every bit.

A digest is the sum of the elements' bits as integers, each times an odd number given by its index.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["digest_of", "digests_of", "is_looked_at"]

_LOOKED_AT = frozenset({1, 100, 10_000, 1_000_000})

_AT_ONCE = 2**22
"""Values that are widened to 8 bytes at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(rows: Tensor) -> Tensor:
    """Return the digest of a tensor as an int64 scalar on its device."""
    bits = rows.detach().contiguous().view(_BITS[rows.element_size()]).flatten()
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
    digests = list(map(digest_of, tensors.values()))
    numbers = torch.stack(digests).tolist() if digests else []
    return dict(zip(tensors, numbers, strict=True))


def is_looked_at(iteration: int) -> bool:
    """Return whether costly checks run in an iteration, counted from 1.

    They run in few, so that steps stay fast; a fault of every iteration is found in the first.
    """
    return iteration in _LOOKED_AT
