"""Layer-wise checkpoints in tiers, and recovery onto any other set of ranks (AutoHet §IV).

In the order of a checkpoint's journey: `format` (the files of a part), `places` (stores, tiers,
leases), `peers` (what ranks tell and send each other, and waits that end), `saver` (from a rank's
state into all tiers), `recovery` (onto any set of ranks: from files, or from what ranks still hold
in memory), `inspection` (outside of training), `notices` (a machine is about to go).
"""

from lightning_hetero.checkpoint.format.content import (
    CheckpointContent,
    RestoredSlice,
    SliceContent,
    SliceNeed,
)
from lightning_hetero.checkpoint.format.manifest import CheckpointId
from lightning_hetero.checkpoint.inspection import export_checkpoint
from lightning_hetero.checkpoint.notices import (
    AwsSpotNotice,
    AzureScheduledEvents,
    GcpPreemptionNotice,
    Notice,
    NoticeWatcher,
    PreemptionNotice,
    SigtermNotice,
)
from lightning_hetero.checkpoint.peers.statuses import Peers
from lightning_hetero.checkpoint.places.store import (
    FsspecStore,
    LocalStore,
    RetryingStore,
    Store,
    open_store,
)
from lightning_hetero.checkpoint.places.tiers import Location, Source, Tier, TierKind
from lightning_hetero.checkpoint.recovery.from_files import (
    Recovered,
    RecoveryReport,
    begin_run,
    recover,
)
from lightning_hetero.checkpoint.saver.commit import WriterOptions
from lightning_hetero.checkpoint.saver.writer import CheckpointWriter, SavedCheckpoint

__all__ = [
    "AwsSpotNotice",
    "AzureScheduledEvents",
    "CheckpointContent",
    "CheckpointId",
    "CheckpointWriter",
    "FsspecStore",
    "GcpPreemptionNotice",
    "LocalStore",
    "Location",
    "Notice",
    "NoticeWatcher",
    "Peers",
    "PreemptionNotice",
    "Recovered",
    "RecoveryReport",
    "RestoredSlice",
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
    "open_store",
    "recover",
]
