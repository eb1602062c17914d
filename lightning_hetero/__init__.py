"""Train one transformer across unequal GPUs inside PyTorch Lightning.

Importing the package registers `strategy="hetero"`, which imports torch and Lightning. The command
line plans and simulates without them, so there the names load when they are first used.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hetero.autoplan.facts import AutoPlan
    from lightning_hetero.callbacks.elastic import ElasticRestart
    from lightning_hetero.callbacks.layerwise import LayerwiseCheckpoint
    from lightning_hetero.callbacks.run_log import RunLog
    from lightning_hetero.callbacks.run_metrics import RunMetrics
    from lightning_hetero.callbacks.straggler_monitor import StragglerMonitor
    from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
    from lightning_hetero.data.module import HeteroDataModule
    from lightning_hetero.data.sampler import TwoStageBatchSampler
    from lightning_hetero.strategy.hetero import HeteroStrategy

__all__ = [
    "AutoPlan",
    "ElasticRestart",
    "HeteroDataModule",
    "HeteroStrategy",
    "LayerwiseCheckpoint",
    "ParallelPlan",
    "PipelinePlan",
    "RunLog",
    "RunMetrics",
    "StagePlan",
    "StragglerMonitor",
    "TwoStageBatchSampler",
]

_HOMES = {
    "AutoPlan": "lightning_hetero.autoplan.facts",
    "ElasticRestart": "lightning_hetero.callbacks.elastic",
    "HeteroDataModule": "lightning_hetero.data.module",
    "HeteroStrategy": "lightning_hetero.strategy.hetero",
    "LayerwiseCheckpoint": "lightning_hetero.callbacks.layerwise",
    "ParallelPlan": "lightning_hetero.core.plan",
    "PipelinePlan": "lightning_hetero.core.plan",
    "RunLog": "lightning_hetero.callbacks.run_log",
    "RunMetrics": "lightning_hetero.callbacks.run_metrics",
    "StagePlan": "lightning_hetero.core.plan",
    "StragglerMonitor": "lightning_hetero.callbacks.straggler_monitor",
    "TwoStageBatchSampler": "lightning_hetero.data.sampler",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def _is_command_line() -> bool:
    script = Path(sys.argv[0]).name if sys.argv else ""
    # While Python looks for the module of `python -m`, that is all that stands there.
    as_module = script == "-m" and "lightning_hetero.cli" in sys.orig_argv
    return as_module or script.startswith("lightning-hetero")


if not _is_command_line():
    import_module("lightning_hetero.strategy.hetero")
