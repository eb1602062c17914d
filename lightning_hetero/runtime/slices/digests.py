"""A number that stands for all bits of a tensor.

It is a sum of the bits as integers, each times an odd number that follows from its place.
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
    """Return a number, int64 on the rows' device, that depends on each of their bits."""
    bits = rows.detach().contiguous().view(_BITS[rows.element_size()]).flatten()
    digest = torch.zeros((), dtype=torch.int64, device=rows.device)
    for first in range(0, len(bits), _AT_ONCE):
        part = bits[first : first + _AT_ONCE].long()
        factors = torch.arange(2 * first + 1, 2 * (first + len(part)), 2, device=rows.device)
        digest += (part * factors).sum()
    return digest


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number for each tensor's bits; the host waits for them.

    So changes are found that bump no version, such as `weight.data.clamp_(...)` in a forward pass.
    """
    digests = list(map(digest_of, tensors.values()))
    numbers = torch.stack(digests).tolist() if digests else []
    return dict(zip(tensors, numbers, strict=True))


def is_looked_at(iteration: int) -> bool:
    """Return whether what seldom differs is compared in an iteration, counted from 1.

    Few are, so that a step costs nothing: a change that comes with each is found in the first.
    """
    return iteration in _LOOKED_AT
