"""The tree of errors, whose messages say what is wrong, with which values, and what to do.

::

    HeteroError
    ├── PlanError           a plan that contradicts itself, the model or the processes that run
    ├── ClusterError        a cluster description that can't be right
    ├── ModelError          a module that can't be cut into stages or shards
    ├── BatchError          a batch that can't be cut into micro-batches
    ├── StepError           a training_step (or other step) that breaks the contract
    ├── ConfigurationError  Trainer or strategy options that contradict each other
    ├── ProfileError        a profile that is broken, stale or for something else
    ├── PlanningError       no plan satisfies the constraints
    ├── AssignmentError     samples that fit into no micro-batch of any plan
    ├── CheckpointError     a checkpoint that is missing, torn or corrupt
    └── PeerError           another rank failed, died or stopped answering
"""

__all__ = [
    "AssignmentError",
    "BatchError",
    "CheckpointError",
    "ClusterError",
    "ConfigurationError",
    "HeteroError",
    "ModelError",
    "PeerError",
    "PlanError",
    "PlanningError",
    "ProfileError",
    "StepError",
]


class HeteroError(Exception):
    """Base of every error that lightning_hetero raises on purpose."""


class PlanError(HeteroError, ValueError):
    """A parallel plan contradicts itself, the model or the processes that run."""


class ClusterError(HeteroError, ValueError):
    """A cluster description can't be right."""


class ModelError(HeteroError, ValueError):
    """A module can't be cut into stages or shards as the plan asks."""


class BatchError(HeteroError, ValueError):
    """A batch can't be cut into micro-batches."""


class StepError(HeteroError, RuntimeError):
    """A `training_step` (or another step) breaks the contract of pipelined execution."""


class ConfigurationError(HeteroError, ValueError):
    """Trainer or strategy options that contradict each other."""


class ProfileError(HeteroError, ValueError):
    """A profile is broken, stale or belongs to another model or device."""


class PlanningError(HeteroError, ValueError):
    """No plan satisfies the constraints."""


class AssignmentError(HeteroError, ValueError):
    """Samples fit into no micro-batch of any plan."""


class CheckpointError(HeteroError, RuntimeError):
    """A checkpoint is missing, torn or corrupt."""


class PeerError(HeteroError, RuntimeError):
    """Another rank failed, died or stopped answering."""
