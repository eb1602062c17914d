"""Changes of weights that bump no version, such as `weight.data.clamp_(...)` in a forward pass.

torch counts changes in place, but not those that go through `.data`. Bits tell: weights are read
once as whole numbers and summed, which moves each byte once and waits for one copy to the host.
That is done in few iterations, so that a step costs nothing: a change that comes with each step is
found in the first, a rarer one later or never.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["digests_of", "is_looked_at"]

_LOOKED_AT = frozenset({1, 100, 10_000, 1_000_000})
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_looked_at(iteration: int) -> bool:
    """Return whether weights are compared in an iteration, counted from 1."""
    return iteration in _LOOKED_AT


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number for each tensor's bits, which nearly any change of values changes."""
    with torch.no_grad():
        sums = [_sum_of_bits(tensor) for tensor in tensors.values()]
        numbers = torch.stack(sums).tolist() if sums else []
    return dict(zip(tensors, numbers, strict=True))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = values.detach().view(_WHOLE_NUMBERS[values.element_size()])
    return bits.sum(dtype=torch.int64)
