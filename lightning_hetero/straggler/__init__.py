"""Find stragglers (slow devices, hosts and links) and decide what to do about them (Greyhound).

`record()` watches any job, and `lightning-hetero stragglers` reads its recordings. `record` is
imported at first use, because it needs torch and the other names don't.
"""

from typing import TYPE_CHECKING, Any

from lightning_hetero.straggler.any_job import IterationTimes, find_changes, read_times
from lightning_hetero.straggler.bocd import BocdDetector
from lightning_hetero.straggler.events import (
    ActionEvent,
    ChangeEvent,
    ChangeKind,
    DecisionKind,
    Event,
    Finding,
    FindingKind,
    IterationEvent,
    Mitigation,
    read_events,
)
from lightning_hetero.straggler.mitigation import PolicyConfig

if TYPE_CHECKING:
    from lightning_hetero.straggler.recording import Recording, record

__all__ = [
    "ActionEvent",
    "BocdDetector",
    "ChangeEvent",
    "ChangeKind",
    "DecisionKind",
    "Event",
    "Finding",
    "FindingKind",
    "IterationEvent",
    "IterationTimes",
    "Mitigation",
    "PolicyConfig",
    "Recording",
    "find_changes",
    "read_events",
    "read_times",
    "record",
]


def __getattr__(name: str) -> Any:
    if name in ("Recording", "record"):
        from lightning_hetero.straggler import recording

        return getattr(recording, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
