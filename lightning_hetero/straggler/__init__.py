"""Find stragglers and decide what to do about them (Greyhound).

`record()` watches any job, and `lightning-hetero stragglers` reads its recordings. `record` is
imported at first use, because it needs torch and the other names don't.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_hetero.straggler.any_job import (
    IterationTimes,
    find_changes,
    read_flight_recorder,
    read_profiler_trace,
    read_times,
)
from lightning_hetero.straggler.bocd import BocdConfig, BocdDetector, ChangeKind, ChangePoint
from lightning_hetero.straggler.events import (
    ActionEvent,
    ChangeEvent,
    DecisionKind,
    Event,
    EventLog,
    Finding,
    FindingEvent,
    FindingKind,
    GenerationEvent,
    IterationEvent,
    Mitigation,
    read_events,
    to_entry,
)
from lightning_hetero.straggler.locate import Probes, Suspicion, diagnose, probe_rounds, suspect
from lightning_hetero.straggler.mitigation import (
    PossibleMitigation,
    WatchedPlans,
    find_mitigations,
    restart_mitigation,
    true_causes,
)
from lightning_hetero.straggler.paces import Observation, RankHistory, RankNote, RankReport
from lightning_hetero.straggler.period import CommunicationOp, Period, infer_period
from lightning_hetero.straggler.policy import Decision, PolicyConfig
from lightning_hetero.straggler.prediction import MeasuredRun, PlaceTimes, RunPrediction, Slowness
from lightning_hetero.straggler.watch import Order, RunWatch, WatchConfig

if TYPE_CHECKING:
    from lightning_hetero.straggler.recording import Recording, record

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
    "RunPrediction",
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
    "true_causes",
]


def __getattr__(name: str) -> Any:
    if name in ("Recording", "record"):
        return getattr(import_module("lightning_hetero.straggler.recording"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
