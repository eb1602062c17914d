"""What a rank gets of an iteration whose samples were assigned (Hydraulis §6)."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

__all__ = ["AssignedBatch"]


@dataclass(frozen=True, kw_only=True)
class AssignedBatch:
    """One rank's micro-batches of one iteration."""

    plan_index: int
    micro_batches: tuple[Any, ...]
    first_index: int
    iteration: int

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Return the batch on `device`."""
        return replace(
            self, micro_batches=tuple(item.to(device, **kwargs) for item in self.micro_batches)
        )
