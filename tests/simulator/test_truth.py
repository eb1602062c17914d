"""Predictions against iterations that were really run; nothing is fitted to their times."""

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


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_iteration_time_within_20_percent_and_memory_within_15(path):
    run = load_run(path)
    simulation = predict(run)
    assert simulation.iteration_time_s == pytest.approx(run.iteration_time_s, rel=0.20)
    assert max(simulation.memory_bytes) == pytest.approx(run.peak_bytes, rel=0.15)


def test_mean_absolute_error_of_iteration_times_is_at_most_8_percent():
    runs = [load_run(path) for path in RUNS]
    errors = [abs(predict(run).iteration_time_s / run.iteration_time_s - 1) for run in runs]
    assert statistics.mean(errors) <= 0.08
