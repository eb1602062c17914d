"""What is asked of a plan: how much work an iteration has, and what counts as better."""

from dataclasses import dataclass
from enum import StrEnum

from lightning_hetero.core.errors import PlanningError

__all__ = ["Objective", "PlanningOptions", "Workload"]


class Objective(StrEnum):
    """What the best plan has least of."""

    THROUGHPUT = "throughput"
    """Seconds per token."""
    COST = "cost"
    """Money per token; nodes may stay unused."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration: equal sequences in equal micro-batches.

    Raises:
        PlanningError: A size is not positive, or micro-batches don't divide the batch.
    """

    sequence_length: int
    """Tokens of each sequence."""
    global_batch_size: int
    """Sequences of an iteration, over all pipelines."""
    sequences_per_microbatch: int = 1
    """Sequences that one forward takes together."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch_size", "sequences_per_microbatch"):
            value = getattr(self, name)
            if value < 1:
                raise PlanningError(f"{name} is {value}; it must be 1 or more.")
        if self.global_batch_size % self.sequences_per_microbatch:
            raise PlanningError(
                f"A global batch of {self.global_batch_size} sequences can't be cut into "
                f"micro-batches of {self.sequences_per_microbatch}. Choose a divisor."
            )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of an iteration, over all pipelines."""
        return self.global_batch_size // self.sequences_per_microbatch

    @property
    def microbatch(self) -> tuple[int, ...]:
        """Lengths of the sequences in one micro-batch."""
        return (self.sequence_length,) * self.sequences_per_microbatch

    @property
    def num_tokens(self) -> int:
        """Tokens of an iteration."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How to search."""

    objective: Objective = Objective.THROUGHPUT
    """What to minimise."""
    equal_microbatches: bool = False
    """Give every pipeline the same number of micro-batches, as AutoHet does."""
    tp_degrees: tuple[int, ...] | None = None
    """Tensor-parallel degrees to consider; None means all that the model and nodes allow."""
    num_candidates: int = 5
    """How many of the best plans to return, 1 or more."""

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise PlanningError(f"num_candidates is {self.num_candidates}; it must be 1 or more.")
        if self.tp_degrees is not None and (not self.tp_degrees or min(self.tp_degrees) < 1):
            raise PlanningError(
                f"tp_degrees are {self.tp_degrees}; give one or more whole numbers above 0."
            )
