"""What a rank gets of an iteration whose samples were assigned (Hydraulis §6)."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

__all__ = ["AssignedBatch"]


@dataclass(frozen=True, kw_only=True)
class AssignedBatch:
    """One rank's micro-batches of one iteration."""

    plan_index: int
    """Index of the plan that runs among the strategy's candidate plans."""
    micro_batches: tuple[Any, ...]
    """The collated micro-batches of the rank's pipeline; empty where it has no work."""
    first_index: int
    """Number of micro-batches that earlier pipelines have."""
    iteration: int
    """Number of the iteration in its epoch."""

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Return the batch on `device`."""
        return replace(
            self, micro_batches=tuple(item.to(device, **kwargs) for item in self.micro_batches)
        )
