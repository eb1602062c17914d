"""Changes of weights that bump no version, such as `weight.data.clamp_(...)` in a forward pass.

torch counts changes in place, but not those that go through `.data`. Bits tell: weights are read
once, and the host waits for one number of each. That is done in few iterations, so that a step
costs nothing: a change that comes with each step is found in the first, a rarer one later or never.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_hetero.runtime.slices.digests import digest_of

__all__ = ["digests_of"]


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number for each tensor's bits."""
    digests = list(map(digest_of, tensors.values()))
    numbers = torch.stack(digests).tolist() if digests else []
    return dict(zip(tensors, numbers, strict=True))
