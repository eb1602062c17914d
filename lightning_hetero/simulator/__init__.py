"""Predict what a plan takes: costs from data sheets or profiles, and a discrete-event simulator."""

from lightning_hetero.simulator.cost import (
    CostModel,
    MicroBatchShape,
    StageShape,
    StateLayout,
)
from lightning_hetero.simulator.plot import plot_timeline
from lightning_hetero.simulator.profile_cost import ProfileCost
from lightning_hetero.simulator.roofline import RooflineCost
from lightning_hetero.simulator.simulate import (
    Event,
    Simulation,
    iteration_time_closed_form,
    simulate,
    split_batch,
)
from lightning_hetero.simulator.trace import save_trace, trace_events

__all__ = [
    "CostModel",
    "Event",
    "MicroBatchShape",
    "ProfileCost",
    "RooflineCost",
    "Simulation",
    "StageShape",
    "StateLayout",
    "iteration_time_closed_form",
    "plot_timeline",
    "save_trace",
    "simulate",
    "split_batch",
    "trace_events",
]
