import itertools
import json

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import (
    RooflineCost,
    plot_timeline,
    save_trace,
    simulate,
    split_batch,
    trace_events,
)

PLAN = ParallelPlan.even(world_size=4, num_layers=24, num_stages=2)


def run(*, record: bool = True):
    cost = RooflineCost(
        Cluster(nodes=(Node(device="A100-80GB", count=4),)), ModelSpec.load("bert-large")
    )
    batches = split_batch(PLAN, global_batch_size=6, sequence_length=512)
    return simulate(PLAN, cost, batches, record_events=record)


def test_trace_holds_every_action_once_on_its_lane(tmp_path):
    simulation = run()
    save_trace(tmp_path / "t.json", PLAN, simulation)
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    actions = [row for row in rows if row.get("cat") in ("F", "B")]
    assert len(actions) == 6 * 2 * 2
    assert {(row["pid"], row["tid"]) for row in actions} == {(0, 0), (0, 2), (1, 0), (1, 2)}
    end_us = max(row["ts"] + row["dur"] for row in rows if row["ph"] == "X")
    assert end_us == pytest.approx(simulation.iteration_time_s * 1e6)


def test_no_lane_of_a_trace_overlaps_itself():
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in trace_events(PLAN, run()):
        if row["ph"] == "X" and row["cat"] in ("F", "B", "step"):
            lanes.setdefault((row["pid"], row["tid"]), []).append((row["ts"], row["dur"]))
    for spans in lanes.values():
        spans.sort()
        for (start, length), (following, _) in itertools.pairwise(spans):
            assert start + length <= following * (1 + 1e-9)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{suffix}"
    plot_timeline(path, PLAN, run())
    assert path.stat().st_size > 5_000


def test_unrecorded_simulations_and_unwritable_files_are_refused(tmp_path):
    pytest.importorskip("matplotlib")
    for write in (save_trace, plot_timeline):
        with pytest.raises(ConfigurationError, match="record_events"):
            write(tmp_path / "x.svg", PLAN, run(record=False))
        with pytest.raises(ConfigurationError, match="Can't write"):
            write(tmp_path / "missing" / "x.svg", PLAN, run())
    with pytest.raises(ConfigurationError, match="Can't draw"):
        plot_timeline(tmp_path / "x.nothing", PLAN, run())
