"""Plain data that every layer shares: plans, clusters, schedules, errors. No torch in here.

Read in this order: `plan` (who runs what), `actions` (in which order), `slices` and `transfers`
(who keeps and fetches which weights), `operations` and `rendezvous` (what a rank issues, and why it
never blocks), `cluster` and `devices` (what there is), `model_spec` and `profile` (what it costs).
"""

from lightning_hetero.core.actions import (
    Action,
    ActionKind,
    format_schedule,
    schedule_1f1b,
    schedule_forward,
)
from lightning_hetero.core.assignment import Assignment
from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import KNOWN_DEVICES, DeviceSpec, find_device
from lightning_hetero.core.errors import (
    AssignmentError,
    BatchError,
    CheckpointError,
    ClusterError,
    ConfigurationError,
    HeteroError,
    ModelError,
    PeerError,
    PlanError,
    PlanningError,
    ProfileError,
    StepError,
)
from lightning_hetero.core.model_spec import KNOWN_MODELS, ModelSpec
from lightning_hetero.core.operations import (
    Iteration,
    Operation,
    OperationKind,
    Transfer,
    iteration_operations,
)
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, RankPlace, StagePlan
from lightning_hetero.core.profile import (
    BlockTimes,
    DeviceProfile,
    LayerMemory,
    Profile,
    binary_blocks,
)
from lightning_hetero.core.rendezvous import RendezvousError, check_rendezvous
from lightning_hetero.core.slices import (
    Holding,
    Interval,
    OuterRole,
    Ownership,
    ParameterSpec,
    Slice,
    assign_owners,
    holdings_of,
)
from lightning_hetero.core.table import format_table
from lightning_hetero.core.time_fit import TimeFit
from lightning_hetero.core.transfers import Message, Piece, TransferTable, unit_of

__all__ = [
    "KNOWN_DEVICES",
    "KNOWN_MODELS",
    "Action",
    "ActionKind",
    "Assignment",
    "AssignmentError",
    "BatchError",
    "BlockTimes",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "ConfigurationError",
    "DeviceProfile",
    "DeviceSpec",
    "HeteroError",
    "Holding",
    "Interval",
    "Iteration",
    "LayerMemory",
    "Link",
    "Message",
    "ModelError",
    "ModelSpec",
    "Node",
    "Operation",
    "OperationKind",
    "OuterRole",
    "Ownership",
    "ParallelPlan",
    "ParameterSpec",
    "PeerError",
    "Piece",
    "PipelinePlan",
    "PlanError",
    "PlanningError",
    "Profile",
    "ProfileError",
    "RankPlace",
    "RendezvousError",
    "Slice",
    "StagePlan",
    "StepError",
    "TimeFit",
    "Transfer",
    "TransferTable",
    "assign_owners",
    "binary_blocks",
    "check_rendezvous",
    "find_device",
    "format_schedule",
    "format_table",
    "holdings_of",
    "iteration_operations",
    "schedule_1f1b",
    "schedule_forward",
    "unit_of",
]
