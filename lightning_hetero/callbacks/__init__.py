"""Callbacks for Lightning's Trainer: checkpoints, restarts, stragglers, logs and metrics."""

from lightning_hetero.callbacks.collect_garbage import CollectGarbage
from lightning_hetero.callbacks.elastic import ElasticRestart
from lightning_hetero.callbacks.layerwise import LayerwiseCheckpoint
from lightning_hetero.callbacks.run_log import RunLog, read_log
from lightning_hetero.callbacks.run_metrics import RunMetrics
from lightning_hetero.callbacks.straggler_monitor import StragglerMonitor
from lightning_hetero.callbacks.trace_operations import TraceOperations

__all__ = [
    "CollectGarbage",
    "ElasticRestart",
    "LayerwiseCheckpoint",
    "RunLog",
    "RunMetrics",
    "StragglerMonitor",
    "TraceOperations",
    "read_log",
]
