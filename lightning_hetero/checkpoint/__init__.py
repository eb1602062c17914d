"""Layer-wise checkpoints in tiers, and recovery onto any other set of ranks (AutoHet §IV).

`saving` brings a rank's state into all tiers, `recovering` brings it back onto any set of ranks:
from files, or from what ranks still hold in memory. All of it builds on the files of a part
(`manifest`, `parts`), on the places where they are kept (`store`, `tiers`, `claims`), on what ranks
tell and send each other (`peers`, `serving`), and on waits that are sure to end (`deadlines`).
"""

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
from lightning_hetero.checkpoint.peers import Peers
from lightning_hetero.checkpoint.recovering.recovery import begin_run, recover
from lightning_hetero.checkpoint.retry import RetryingStore, RetryPolicy, open_store
from lightning_hetero.checkpoint.saving.meeting import WriterOptions
from lightning_hetero.checkpoint.saving.writer import CheckpointWriter, SavedCheckpoint
from lightning_hetero.checkpoint.store import FsspecStore, LocalStore, Store
from lightning_hetero.checkpoint.tiers import Holder, Source, Tier, TierKind

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
    "Peers",
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
    "Source",
    "Store",
    "Tier",
    "TierKind",
    "WriterOptions",
    "begin_run",
    "export_checkpoint",
    "format_bitmap",
    "open_store",
    "recover",
]
