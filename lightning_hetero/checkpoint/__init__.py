"""Layer-wise checkpoints in tiers, and recovery onto any other set of ranks (AutoHet §IV).

In the order of a checkpoint's journey: `content`, `encoding`, `manifest` (the files of a part);
`store`, `tiers`, `claims` (where they are kept, and who may write there); `serving`, `statuses`,
`deadlines` (what ranks send and tell each other, and waits that end); `writer`, `snapshot`,
`commit` (from a rank's state into all tiers); `inventory`, `fetching`, `assembly` (onto
any set of ranks: `from_files`, or `live` from what ranks still hold in memory); `inspection`
(outside of training); `notices` (a machine is about to go).
"""

from lightning_hetero.checkpoint.commit import WriterOptions
from lightning_hetero.checkpoint.content import (
    CheckpointContent,
    RestoredSlice,
    SliceContent,
    SliceNeed,
)
from lightning_hetero.checkpoint.fetching import Recovered
from lightning_hetero.checkpoint.from_files import Recovery
from lightning_hetero.checkpoint.inspection import export_checkpoint
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
from lightning_hetero.checkpoint.snapshot import SavedCheckpoint
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.store import (
    FsspecStore,
    LocalStore,
    RetryingStore,
    Store,
    open_store,
)
from lightning_hetero.checkpoint.tiers import Location, Source, Tier, TierKind
from lightning_hetero.checkpoint.writer import CheckpointWriter

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
    "Recovery",
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
    "export_checkpoint",
    "open_store",
]
