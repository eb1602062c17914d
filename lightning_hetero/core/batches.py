"""What stands for a batch: none where a rank has no samples, or an iteration assigned ahead."""

from dataclasses import dataclass
from typing import Any

from lightning_hetero.core.plan import ParallelPlan

__all__ = ["AssignedBatch", "EmptyBatch"]


class EmptyBatch:
    """The batch of a rank without samples in an iteration; it still takes part in it."""

    def __repr__(self) -> str:
        return "EmptyBatch()"


@dataclass(frozen=True, kw_only=True)
class AssignedBatch:
    """One rank's part of an iteration whose samples were assigned ahead of time.

    The plan travels with the batch, so that whoever assigns may change plans at any time.
    """

    plan: ParallelPlan
    """The plan that runs the iteration; the same on every rank."""
    micro_batches: tuple[Any, ...]
    """Batches of the rank's pipeline, each one micro-batch; none if it has no work or is idle."""
    first_index: int
    """Micro-batches of the pipelines before this one; micro-batches draw random numbers by it."""
