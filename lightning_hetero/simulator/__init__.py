"""Predict what a plan takes: costs from data sheets or profiles, and a discrete-event simulator."""

from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.device_costs import ProfileCost, RooflineCost, choose_cost
from lightning_hetero.simulator.memory import (
    MemoryCorrection,
    MemoryTerms,
    MicroBatchShape,
    usable_bytes,
)
from lightning_hetero.simulator.pictures import plot_timeline, save_trace, trace_events
from lightning_hetero.simulator.report import (
    TERM_NAMES,
    PlanTable,
    StageFacts,
    bound_line,
    devices_line,
    fitting_lines,
    host_lines,
    memory_tables,
    plan_table,
    precision_notes,
    prediction_lines,
    simulated_facts,
)
from lightning_hetero.simulator.simulate import (
    Event,
    Simulation,
    host_bytes,
    simulate,
    split_batch,
)
from lightning_hetero.simulator.stage import StageShape, StateLayout

__all__ = [
    "TERM_NAMES",
    "CostModel",
    "Event",
    "MemoryCorrection",
    "MemoryTerms",
    "MicroBatchShape",
    "PlanTable",
    "ProfileCost",
    "RooflineCost",
    "Simulation",
    "StageFacts",
    "StageShape",
    "StateLayout",
    "bound_line",
    "choose_cost",
    "devices_line",
    "fitting_lines",
    "host_bytes",
    "host_lines",
    "memory_tables",
    "plan_table",
    "plot_timeline",
    "precision_notes",
    "prediction_lines",
    "save_trace",
    "simulate",
    "simulated_facts",
    "split_batch",
    "trace_events",
    "usable_bytes",
]
