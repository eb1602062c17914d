"""Layer-wise checkpoints in tiers, and recovery onto any other set of ranks (AutoHet §IV).

`saving` brings a rank's state into all tiers, `recovering` brings it back onto any set of ranks;
`survivors` recovers what ranks still hold in memory, without a save. All of it builds on the files
of a part (`manifest`, `parts`), on the places where they are kept (`store`, `tiers`, `claims`), and
on waits that are sure to end (`deadlines`, `transport`, `lockstep`).
"""

import importlib
import warnings
from typing import Any

from lightning_hetero.checkpoint.content import (
    CheckpointContent,
    Recovered,
    RecoveryReport,
    RestoredSlice,
    SliceContent,
    SliceNeed,
)
from lightning_hetero.checkpoint.inspection import export_checkpoint, format_bitmap
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.notices import (
    AwsSpotNotice,
    AzureScheduledEvents,
    GcpPreemptionNotice,
    Notice,
    NoticeWatcher,
    PreemptionNotice,
    SigtermNotice,
)
from lightning_hetero.checkpoint.recovering.recovery import begin_run, recover
from lightning_hetero.checkpoint.retry import RetryingStore, RetryPolicy, open_store
from lightning_hetero.checkpoint.saving.meeting import WriterOptions
from lightning_hetero.checkpoint.saving.writer import CheckpointWriter, SavedCheckpoint
from lightning_hetero.checkpoint.store import FsspecStore, LocalStore, Store
from lightning_hetero.checkpoint.tiers import Holder, Source, Tier, TierKind
from lightning_hetero.checkpoint.transport import SoloTransport, Transport

__all__ = [
    "AwsSpotNotice",
    "AzureScheduledEvents",
    "CheckpointContent",
    "CheckpointId",
    "CheckpointWriter",
    "FsspecStore",
    "GcpPreemptionNotice",
    "Holder",
    "LocalStore",
    "Notice",
    "NoticeWatcher",
    "PreemptionNotice",
    "Recovered",
    "RecoveryReport",
    "RestoredSlice",
    "RetryPolicy",
    "RetryingStore",
    "SavedCheckpoint",
    "SigtermNotice",
    "SliceContent",
    "SliceNeed",
    "SoloTransport",
    "Source",
    "Store",
    "Tier",
    "TierKind",
    "Transport",
    "WriterOptions",
    "begin_run",
    "export_checkpoint",
    "format_bitmap",
    "open_store",
    "recover",
]

_MOVED_TO_TESTING = ("FaultyStore", "MemoryStore", "MemoryTransport", "Throttle", "ThrottledStore")


def __getattr__(name: str) -> Any:
    if name not in _MOVED_TO_TESTING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{name} is imported from lightning_hetero.testing now.", DeprecationWarning, stacklevel=2
    )
    return getattr(importlib.import_module("lightning_hetero.testing"), name)
