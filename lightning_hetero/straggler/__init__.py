"""Find stragglers and decide what to do about them (Greyhound).

`record()` watches any job, and `lightning-hetero stragglers` reads its recordings. `record` is
imported at first use, because it needs torch and the other names don't.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_hetero.straggler.any_job.job_times import IterationTimes, find_changes, read_times
from lightning_hetero.straggler.any_job.period import CommunicationOp, Period, infer_period
from lightning_hetero.straggler.any_job.traces import read_flight_recorder, read_profiler_trace
from lightning_hetero.straggler.bocd import BocdConfig, BocdDetector, ChangeKind, ChangePoint
from lightning_hetero.straggler.events import (
    ActionEvent,
    ChangeEvent,
    Event,
    EventLog,
    FindingEvent,
    GenerationEvent,
    IterationEvent,
    read_events,
    to_entry,
)
from lightning_hetero.straggler.history import Observation, RankHistory, RankReport
from lightning_hetero.straggler.levels import RankNote
from lightning_hetero.straggler.locate import Finding, FindingKind
from lightning_hetero.straggler.look import Probes, Suspicion, diagnose, probe_rounds, suspect
from lightning_hetero.straggler.mitigation import (
    Mitigation,
    PossibleMitigation,
    WatchedPlans,
    find_mitigations,
    restart_mitigation,
)
from lightning_hetero.straggler.policy import Decision, DecisionKind, PolicyConfig
from lightning_hetero.straggler.run_model import MeasuredRun, PlaceTimes, RunModel, Slowness
from lightning_hetero.straggler.watch import Order, RunWatch, WatchConfig

if TYPE_CHECKING:
    from lightning_hetero.straggler.any_job.recording import Recording, record

__all__ = [
    "ActionEvent",
    "BocdConfig",
    "BocdDetector",
    "ChangeEvent",
    "ChangeKind",
    "ChangePoint",
    "CommunicationOp",
    "Decision",
    "DecisionKind",
    "Event",
    "EventLog",
    "Finding",
    "FindingEvent",
    "FindingKind",
    "GenerationEvent",
    "IterationEvent",
    "IterationTimes",
    "MeasuredRun",
    "Mitigation",
    "Observation",
    "Order",
    "Period",
    "PlaceTimes",
    "PolicyConfig",
    "PossibleMitigation",
    "Probes",
    "RankHistory",
    "RankNote",
    "RankReport",
    "Recording",
    "RunModel",
    "RunWatch",
    "Slowness",
    "Suspicion",
    "WatchConfig",
    "WatchedPlans",
    "diagnose",
    "find_changes",
    "find_mitigations",
    "infer_period",
    "probe_rounds",
    "read_events",
    "read_flight_recorder",
    "read_profiler_trace",
    "read_times",
    "record",
    "restart_mitigation",
    "suspect",
    "to_entry",
]

_RENAMED = {
    "Measure": "PossibleMitigation",
    "Option": "PossibleMitigation",
    "conclude": "diagnose",
    "find_measures": "find_mitigations",
    "restart_measure": "restart_mitigation",
}


def __getattr__(name: str) -> Any:
    if name in ("Recording", "record"):
        return getattr(import_module("lightning_hetero.straggler.any_job.recording"), name)
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = f"{__name__}.{name} is called {_RENAMED[name]} now; the old name goes with this release."
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
