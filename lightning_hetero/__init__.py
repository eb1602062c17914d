"""Train one transformer across unequal GPUs inside PyTorch Lightning.

Importing the package imports neither torch nor Lightning: its names load when they are first used.
`strategy="hetero"` is registered as soon as both Lightning and this package, or a name of it, have
been imported: write `import lightning` first.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hetero.autoplan import AutoPlan
    from lightning_hetero.callbacks import (
        CollectGarbage,
        ElasticRestart,
        LayerwiseCheckpoint,
        RunLog,
        RunMetrics,
        StragglerMonitor,
        TraceOperations,
    )
    from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
    from lightning_hetero.data import HeteroDataModule, TwoStageBatchSampler
    from lightning_hetero.runtime.slices.rows import own_rows
    from lightning_hetero.strategy import HeteroStrategy

__all__ = [
    "AutoPlan",
    "CollectGarbage",
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
    "TraceOperations",
    "TwoStageBatchSampler",
    "own_rows",
]

_HOMES = {
    "AutoPlan": "autoplan",
    "CollectGarbage": "callbacks",
    "ElasticRestart": "callbacks",
    "HeteroDataModule": "data",
    "HeteroStrategy": "strategy",
    "LayerwiseCheckpoint": "callbacks",
    "ParallelPlan": "core.plan",
    "PipelinePlan": "core.plan",
    "RunLog": "callbacks",
    "RunMetrics": "callbacks",
    "StagePlan": "core.plan",
    "StragglerMonitor": "callbacks",
    "TraceOperations": "callbacks",
    "TwoStageBatchSampler": "data",
    "own_rows": "runtime.slices.rows",
}


def _register_strategy() -> None:
    """Register `strategy="hetero"`, which only somebody who has imported Lightning can ask for."""
    if "lightning.pytorch.strategies" in sys.modules:
        import_module("lightning_hetero.strategy")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    _register_strategy()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register_strategy()
