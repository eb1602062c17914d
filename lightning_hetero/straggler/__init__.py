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
from lightning_hetero.straggler.locate import (
    Finding,
    FindingKind,
    RankTimes,
    Suspect,
    diagnose,
    find_suspects,
    ring_rounds,
    suspect_ranks,
    tree_rounds,
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
from lightning_hetero.straggler.swap import (
    SwapConfig,
    SwapProposal,
    gradient_links,
    propose_swap,
    swap_ranks,
)
from lightning_hetero.straggler.traces import read_flight_recorder, read_profiler_trace

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
    "IterationEvent",
    "Mitigation",
    "MitigationPolicy",
    "Option",
    "Period",
    "PolicyConfig",
    "PolicyState",
    "RankTimes",
    "Suspect",
    "SwapConfig",
    "SwapProposal",
    "balance_microbatches",
    "diagnose",
    "find_suspects",
    "format_message",
    "gradient_links",
    "infer_period",
    "propose_swap",
    "read_events",
    "read_flight_recorder",
    "read_profiler_trace",
    "ring_rounds",
    "suspect_ranks",
    "swap_ranks",
    "tree_rounds",
]
