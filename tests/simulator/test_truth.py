"""Predictions against iterations that were really run; `sailor.py` says what rests on them."""

import statistics

import pytest

from lightning_hetero.simulator import Simulation, simulate
from tests.simulator.sailor import ROOT, MeasuredRun, SailorCost, load_profile, load_run

RUNS = sorted((ROOT / "measured").glob("*.json"))

pytestmark = pytest.mark.skipif(not RUNS, reason=f"no measured plans under {ROOT}")


def predict(run: MeasuredRun) -> Simulation:
    devices = {node.device for node in run.cluster.nodes}
    cost = SailorCost(run.cluster, run.model_name, load_profile(run.model_name, devices))
    return simulate(run.plan, cost, run.microbatches)


def test_iteration_times_are_within_20_percent_and_8_on_average_and_memory_within_5():
    errors = []
    for run in map(load_run, RUNS):
        simulation = predict(run)
        errors.append(abs(simulation.iteration_time_s / run.iteration_time_s - 1))
        assert max(simulation.memory_bytes) == pytest.approx(run.peak_bytes, rel=0.05), run.name
    assert max(errors) <= 0.20
    assert statistics.mean(errors) <= 0.08
