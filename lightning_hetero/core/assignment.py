"""One iteration's work as data: which plan runs, and which samples make up which micro-batch.

Planning processes make assignments ahead of time and pass them on as JSON. Each rank looks up the
plan by its index and runs its own pipeline's micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from lightning_hetero.core.errors import AssignmentError

__all__ = ["Assignment"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The plan and the micro-batches of one iteration.

    Raises:
        AssignmentError: A sample is in two micro-batches, or a micro-batch is empty.
    """

    plan_index: int
    """Index of the plan among the candidates."""
    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """For each pipeline its micro-batches, each as the indices of its samples."""
    latency_s: float
    """Estimated seconds of the iteration's forward and backward passes."""

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for pipeline_index, batches in enumerate(self.microbatches):
            for batch_index, batch in enumerate(batches):
                if not batch:
                    raise AssignmentError(
                        f"Micro-batch {batch_index} of pipeline {pipeline_index} is empty; leave "
                        "it out."
                    )
                for sample in batch:
                    if sample in seen:
                        raise AssignmentError(
                            f"Sample {sample} is assigned twice, the second time to micro-batch "
                            f"{batch_index} of pipeline {pipeline_index}. Name each sample once."
                        )
                    seen.add(sample)

    @property
    def num_samples(self) -> int:
        """Number of samples in all micro-batches."""
        return sum(len(batch) for batches in self.microbatches for batch in batches)

    def to_dict(self) -> dict[str, Any]:
        """Return the assignment as JSON-ready dicts and lists."""
        return {
            "plan_index": self.plan_index,
            "microbatches": [[list(batch) for batch in item] for item in self.microbatches],
            "latency_s": self.latency_s,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build an assignment from the data of `to_dict`; AssignmentError if it is no such data."""
        try:
            return cls(
                plan_index=int(data["plan_index"]),
                microbatches=tuple(
                    tuple(tuple(int(i) for i in batch) for batch in item)
                    for item in data["microbatches"]
                ),
                latency_s=float(data["latency_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise AssignmentError(
                f"The data is no assignment: {error!r}. Give what `to_dict` returns."
            ) from error
