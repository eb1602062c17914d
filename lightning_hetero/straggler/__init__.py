"""Find stragglers and decide what to do about them (Greyhound)."""

from lightning_hetero.straggler.balance import balance_microbatches
from lightning_hetero.straggler.bocd import BocdDetector
from lightning_hetero.straggler.change import BocdConfig, ChangeKind, ChangePoint
from lightning_hetero.straggler.events import (
    ActionEvent,
    ChangeEvent,
    Event,
    EventLog,
    FindingEvent,
    IterationEvent,
    format_message,
    read_events,
)
from lightning_hetero.straggler.history import Observation, RankHistory, RankReport
from lightning_hetero.straggler.levels import LevelWatch, RankNote
from lightning_hetero.straggler.locate import (
    Finding,
    FindingKind,
    Suspect,
    diagnose_links,
    find_suspects,
    ring_rounds,
    tree_rounds,
)
from lightning_hetero.straggler.look import Probes, Suspicion, conclude, probe_rounds, suspect
from lightning_hetero.straggler.measures import (
    Act,
    Measure,
    WatchedPlans,
    find_measures,
    restart_measure,
)
from lightning_hetero.straggler.mitigation import (
    Decision,
    DecisionKind,
    Mitigation,
    MitigationPolicy,
    Option,
    PolicyConfig,
    PolicyState,
)
from lightning_hetero.straggler.period import CommunicationOp, Period, infer_period
from lightning_hetero.straggler.run_model import MeasuredRun, PlaceTimes, RunModel, Slowness
from lightning_hetero.straggler.swap import (
    SwapConfig,
    SwapProposal,
    gradient_links,
    move_ranks,
    propose_swap,
    swap_ranks,
)
from lightning_hetero.straggler.traces import read_flight_recorder, read_profiler_trace
from lightning_hetero.straggler.watch import Order, RunWatch, WatchConfig

__all__ = [
    "Act",
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
    "IterationEvent",
    "LevelWatch",
    "Measure",
    "MeasuredRun",
    "Mitigation",
    "MitigationPolicy",
    "Observation",
    "Option",
    "Order",
    "Period",
    "PlaceTimes",
    "PolicyConfig",
    "PolicyState",
    "Probes",
    "RankHistory",
    "RankNote",
    "RankReport",
    "RunModel",
    "RunWatch",
    "Slowness",
    "Suspect",
    "Suspicion",
    "SwapConfig",
    "SwapProposal",
    "WatchConfig",
    "WatchedPlans",
    "balance_microbatches",
    "conclude",
    "diagnose_links",
    "find_measures",
    "find_suspects",
    "format_message",
    "gradient_links",
    "infer_period",
    "move_ranks",
    "probe_rounds",
    "propose_swap",
    "read_events",
    "read_flight_recorder",
    "read_profiler_trace",
    "restart_measure",
    "ring_rounds",
    "suspect",
    "swap_ranks",
    "tree_rounds",
]
