"""What a recovery gives back to a rank, and what it says about itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_hetero.checkpoint.content import RestoredSlice
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.recovery_plan import Source
from lightning_hetero.core.plan import ParallelPlan

__all__ = ["Recovered", "RecoveryReport"]


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """What a recovery did, for the log line after a restart."""

    id: CheckpointId
    """The checkpoint that was taken."""
    bytes_by_source: Mapping[Source, int]
    """Bytes that this rank got from each kind of source, whole blocks counted."""
    seconds: Mapping[str, float]
    """Wall time of the phases "inventory", "manifests", "fetch"."""
    failures: tuple[str, ...]
    """Sources that were struck off, and why."""
    skipped: tuple[str, ...]
    """Newer checkpoints that couldn't be used, and why."""
    attempt: int
    """Attempt number for the checkpoints that this run saves."""
    place: str = ""
    """The fastest tier that has any of it, on any node."""
    is_last: bool = False
    """Whether the run has nothing else to go on from than what is in that tier."""

    def __str__(self) -> str:
        sources = ", ".join(
            f"{count / 1e6:.1f} MB from {source.name.lower().replace('_', ' ')}"
            for source, count in sorted(self.bytes_by_source.items())
        )
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        text = f"recovered {self.id}: {sources or 'nothing needed'}; {phases}"
        if self.failures:
            text += f"; {len(self.failures)} sources failed"
        if self.skipped:
            text += f"; {len(self.skipped)} newer checkpoints couldn't be used"
        return text


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """One rank's state."""

    id: CheckpointId
    """The checkpoint that it is of."""
    world_size: int
    """Number of ranks that saved it."""
    plan: ParallelPlan | None
    """The plan under which it was saved."""
    slices: tuple[RestoredSlice, ...]
    """What was asked for, in that order."""
    metadata: Mapping[str, Any]
    """Rank 0's shared metadata."""
    rank_metadata: Mapping[str, Any] | None
    """What this rank saved for itself; None if another number of ranks saved the checkpoint."""
    report: RecoveryReport
