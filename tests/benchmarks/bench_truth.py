"""Predicted against measured iterations: Sailor's plans on GH200 and mixed RTX nodes.

The peer of every row is the measurement. The profiles of single layers and the networks' measured
curves go in; no iteration time does.
"""

import statistics

from lightning_hetero.simulator import simulate
from tests.benchmarks.harness import Row
from tests.simulator.sailor import ROOT, SailorCost, load_profile, load_run


def run() -> list[Row]:
    """Return one row per measured plan, and the mean and worst errors."""
    rows, time_errors, memory_errors = [], [], []
    for path in sorted((ROOT / "measured").glob("*.json")):
        measured = load_run(path)
        devices = {node.device for node in measured.cluster.nodes}
        profile = load_profile(measured.model_name, devices)
        cost = SailorCost(measured.cluster, measured.model_name, profile)
        predicted = simulate(measured.plan, cost, measured.microbatches)
        error = abs(predicted.iteration_time_s / measured.iteration_time_s - 1)
        time_errors.append(error)
        memory_errors.append(abs(max(predicted.memory_bytes) / measured.peak_bytes - 1))
        rows.append(
            Row(
                name=f"predicted iteration, {path.stem}",
                ours=predicted.iteration_time_s,
                peer=measured.iteration_time_s,
                unit="s",
                target=0.20,
                better="lower",
                kind="simulated",
                value=error,
                note=f"peer: measured; memory off by {memory_errors[-1]:.1%}",
            )
        )
    if not rows:
        return []
    return [
        *rows,
        _bound("mean error of iteration time", statistics.mean(time_errors), 0.08),
        _bound("worst error of iteration time", max(time_errors), 0.20),
        _bound("worst error of peak memory", max(memory_errors), 0.15),
    ]


def _bound(name: str, value: float, target: float) -> Row:
    return Row(
        name=name,
        ours=value,
        peer=None,
        unit="share",
        target=target,
        better="lower",
        kind="simulated",
        value=value,
        note="fitted to none of the times",
    )
