"""Layer-wise checkpoints in tiers, and recovery onto any other set of ranks (AutoHet §IV)."""

from lightning_hetero.checkpoint.content import CheckpointContent, RestoredSlice, SliceContent
from lightning_hetero.checkpoint.export import export_checkpoint
from lightning_hetero.checkpoint.fakes import (
    FaultyStore,
    MemoryStore,
    MemoryTransport,
    Throttle,
    ThrottledStore,
)
from lightning_hetero.checkpoint.inventory import (
    Holder,
    Inventory,
    complete_checkpoints,
    format_bitmap,
    take_inventory,
)
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.meeting import WriterOptions
from lightning_hetero.checkpoint.notices import (
    AwsSpotNotice,
    AzureScheduledEvents,
    GcpPreemptionNotice,
    Notice,
    NoticeWatcher,
    PreemptionNotice,
    SigtermNotice,
)
from lightning_hetero.checkpoint.recovered import Recovered, RecoveryReport
from lightning_hetero.checkpoint.recovery import begin_run, recover
from lightning_hetero.checkpoint.recovery_plan import Source
from lightning_hetero.checkpoint.replicas import place_replicas
from lightning_hetero.checkpoint.resharding import SliceNeed
from lightning_hetero.checkpoint.retry import RetryingStore, RetryPolicy, open_store
from lightning_hetero.checkpoint.store import FsspecStore, LocalStore, Store
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.checkpoint.transport import SoloTransport, Transport
from lightning_hetero.checkpoint.writer import CheckpointWriter, SavedCheckpoint

__all__ = [
    "AwsSpotNotice",
    "AzureScheduledEvents",
    "CheckpointContent",
    "CheckpointId",
    "CheckpointWriter",
    "FaultyStore",
    "FsspecStore",
    "GcpPreemptionNotice",
    "Holder",
    "Inventory",
    "LocalStore",
    "MemoryStore",
    "MemoryTransport",
    "Notice",
    "NoticeWatcher",
    "PartManifest",
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
    "Throttle",
    "ThrottledStore",
    "Tier",
    "TierKind",
    "Transport",
    "WriterOptions",
    "begin_run",
    "complete_checkpoints",
    "export_checkpoint",
    "format_bitmap",
    "open_store",
    "place_replicas",
    "recover",
    "take_inventory",
]
