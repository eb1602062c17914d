"""Predictions against iterations that were really run; `sailor.py` says what rests on them."""

import json
import statistics

import pytest

from lightning_hetero.core.profile import Profile
from lightning_hetero.simulator import Simulation, simulate
from tests.simulator.sailor import MODELS, ROOT, MeasuredRun, SailorCost, load_profile, load_run

PROFILES = sorted(path for name in MODELS for path in (ROOT / "profiles" / name).glob("*.json"))
RUNS = sorted((ROOT / "measured").glob("*.json"))

pytestmark = pytest.mark.skipif(not RUNS, reason=f"no measured plans under {ROOT}")


def predict(run: MeasuredRun) -> Simulation:
    devices = {node.device for node in run.cluster.nodes}
    cost = SailorCost(run.cluster, run.model_name, load_profile(run.model_name, devices))
    return simulate(run.plan, cost, run.microbatches)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_iteration_time_within_20_percent_and_memory_within_5(path):
    run = load_run(path)
    simulation = predict(run)
    assert simulation.iteration_time_s == pytest.approx(run.iteration_time_s, rel=0.20)
    assert max(simulation.memory_bytes) == pytest.approx(run.peak_bytes, rel=0.05)


def test_mean_absolute_error_of_iteration_times_is_at_most_8_percent():
    runs = [load_run(path) for path in RUNS]
    errors = [abs(predict(run).iteration_time_s / run.iteration_time_s - 1) for run in runs]
    assert statistics.mean(errors) <= 0.08


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_profiles_of_layers_become_profiles_of_ours(path, tmp_path):
    profile = load_profile(path.parent.name, {path.stem})
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    measured = json.loads(path.read_text())
    num_layers = profile.model.num_layers
    for times in profile.device(path.stem).times:
        layers = measured[str(len(times.lengths))][str(times.tp_degree)]
        blocks = [layers[str(layer)] for layer in range(1, num_layers + 1)]
        whole = [sum(block[direction] for block in blocks) for direction in range(2)]
        assert times.layers_s(num_layers) == pytest.approx(tuple(whole))
        assert times.head == tuple(layers[str(num_layers + 1)][:2])
