from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hetero.autoplan.facts import AutoPlan, RunFacts
from lightning_hetero.autoplan.jobs import Contingencies
from lightning_hetero.autoplan.planning import make_plan
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import Seat
from lightning_hetero.runtime.setup.layout import ModelLayout
from tests.autoplan.autoplan_runs import Planned, train
from tests.processes import ProcessFailed, ProcessPool

UNEQUAL = (6.0, 6.0, 2.0, 2.0)


def run(pool: ProcessPool, plan: Any, slowdowns: tuple[float, ...], cache: Path) -> list[Planned]:
    return pool.run(train, len(slowdowns), plan, slowdowns, 6, str(cache))


@pytest.mark.dist
def test_equal_devices_train_data_parallel_as_an_even_split_does(
    pool: ProcessPool, tmp_path: Path
) -> None:
    auto = run(pool, "auto", (1.0, 1.0), tmp_path)
    even = run(pool, None, (1.0, 1.0), tmp_path)
    assert auto[0].plan == even[0].plan
    assert auto[0].losses == even[0].losses
    assert auto[0].predicted_s is None
    assert not list(tmp_path.iterdir()), "equal devices were profiled for nothing"


@pytest.mark.dist
def test_a_planned_run_of_unequal_devices_has_the_losses_of_the_even_split_and_says_its_plan(
    pool: ProcessPool, tmp_path: Path
) -> None:
    options = AutoPlan(microbatch_sizes=(1,))
    auto = run(pool, options, UNEQUAL, tmp_path)
    even = run(pool, None, UNEQUAL, tmp_path)
    assert auto[0].plan != even[0].plan
    assert len(auto[0].losses) == len(even[0].losses) > 1
    np.testing.assert_allclose(auto[0].losses, even[0].losses, rtol=1e-5)
    assert len({str(outcome.plan) for outcome in auto}) == 1
    assert all(outcome.losses == auto[0].losses for outcome in auto)
    assert [outcome.slowdown for outcome in auto] == list(UNEQUAL)
    assert all(outcome.has_times for outcome in auto)
    pipelines = auto[0].plan["pipelines"]
    if all(len(pipeline["stages"]) == 1 for pipeline in pipelines):
        counts = {p["stages"][0]["ranks"][0]: p["num_microbatches"] for p in pipelines}
        slow = max(counts.get(0, 0), counts.get(1, 0))
        assert slow < min(counts.get(2, 0), counts.get(3, 0))
    assert auto[0].predicted_s is not None
    for word in ("24 samples of 8 tokens", "iteration time", "no plan can be faster than"):
        assert word in (auto[0].summary or "")


@pytest.mark.dist
def test_a_profile_is_measured_once_and_a_broken_one_again(
    pool: ProcessPool, tmp_path: Path
) -> None:
    options = AutoPlan(microbatch_sizes=(1,))
    run(pool, options, (2.0, 1.0), tmp_path)
    (path,) = tmp_path.iterdir()
    first = path.read_bytes()
    run(pool, options, (3.0, 1.0), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == first
    path.write_bytes(first[: len(first) // 2])
    run(pool, options, (2.0, 1.0), tmp_path)
    assert len(path.read_bytes()) > len(first) // 2


@pytest.mark.dist
def test_a_cluster_of_another_size_is_refused_on_every_rank(
    pool: ProcessPool, tmp_path: Path
) -> None:
    cluster = Cluster(nodes=(Node(device="T4", count=3),))
    with pytest.raises(ProcessFailed) as failed:
        run(pool, AutoPlan(cluster=cluster), (1.0, 1.0), tmp_path)
    assert any("3 devices but 2 processes" in text for text in failed.value.failures.values())


@pytest.mark.parametrize(
    ("devices", "cluster", "warns"),
    [
        ("AA", None, False),
        ("AB", None, True),
        ("AA", Cluster(nodes=(Node(device="T4", count=2),)), True),
    ],
)
def test_a_module_of_unknown_sizes_is_trained_data_parallel_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, devices: str, cluster: Cluster | None, *, warns: bool
) -> None:
    seats = tuple(
        Seat(host="host", device=replace(KNOWN_DEVICES["T4"], name=name), base=name)
        for name in devices
    )
    monkeypatch.setattr(RunFacts, "detect_seats", lambda _: seats)
    module = torch.nn.Linear(2, 2)
    facts = RunFacts(
        module=module,
        layout=ModelLayout.of(module),
        comms=Communicators(global_rank=0, world_size=2),
        device=torch.device("cpu"),
        sizes=lambda: pytest.fail("there is nothing to plan"),
    )
    planned = make_plan(AutoPlan(cluster=cluster), facts, Contingencies())
    assert planned.plan.num_pipelines == 2
    assert planned.predicted_s is None
    assert (planned.warning is not None) == warns


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence_length": 0},
        {"batch_size": -1},
        {"microbatch_sizes": ()},
        {"tp_degrees": (0,)},
    ],
)
def test_options_below_one_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        AutoPlan(**wrong)
