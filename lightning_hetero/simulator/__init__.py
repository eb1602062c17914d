"""Predict what a plan takes: costs from data sheets or profiles, and a discrete-event simulator.

The planner, the summary at start, `compare` and contingency plans all call `simulate` for an
iteration's seconds and bytes. Read in this order:

- `stage`, `memory`, `links`: what costs depend on; the terms of a device's memory; messages.
- `cost`, `device_costs`: the seconds of a stage's actions, and the bytes of its ranks.
- `work`: the actions of one pipeline. `propagate`: when they end, under any schedule.
- `unit_times`, `exchange`: when weights have been pulled and gradients pushed.
- `simulate`: all of it; `Simulation.lacking_bytes` tells whether the plan fits.
- `report`, `pictures`: predictions as text and as pictures. `operations` replays recorded runs.
"""

from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.device_costs import ProfileCost, RooflineCost, choose_cost
from lightning_hetero.simulator.memory import (
    MemoryCorrection,
    MemoryTerms,
    MicroBatchShape,
    StageFacts,
    usable_bytes,
)
from lightning_hetero.simulator.pictures import plot_timeline
from lightning_hetero.simulator.report import (
    TERM_NAMES,
    PlanTable,
    bound_line,
    devices_line,
    fitting_lines,
    host_lines,
    memory_terms,
    model_lines,
    plan_table,
    precision_notes,
    prediction_lines,
    tuning_notes,
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
    "memory_terms",
    "model_lines",
    "plan_table",
    "plot_timeline",
    "precision_notes",
    "prediction_lines",
    "simulate",
    "split_batch",
    "tuning_notes",
    "usable_bytes",
]
