"""Every scalar of `RunMetrics` is what it says, computed again from what others have seen."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import lightning as L
import pytest

from lightning_hetero.callbacks import RunMetrics, run_metrics
from lightning_hetero.callbacks.run_metrics import _scalars, _Sums
from lightning_hetero.core.errors import ConfigurationError
from tests.callbacks.metrics_runs import DEVICE, Record, train_with_accumulation, train_with_all
from tests.data.dynamic_runs import Module
from tests.processes import ProcessPool
from tests.toy import quiet

ALL = {
    "iteration_s",
    "tokens_per_s",
    "mfu",
    "bubble_share",
    "imbalance",
    "exchange_wait_s",
    "planning_stall_s",
    "checkpoint_stall_s",
}


def expected(ranks: list[Record], first: int, last: int) -> dict[str, float]:
    """Compute the scalars of the iterations [first, last)."""
    seen = [record.iterations[first:last] for record in ranks]
    count = last - first
    wall_s = max(sum(item.wall_s for item in items) for items in seen)
    busy_s = [sum(item.compute_s for item in items) for items in seen]
    # Ranks 0 and 1 are the first stages of the two pipelines.
    lengths = [n for items in seen[:2] for item in items for n in item.lengths]
    flops = Module(3).model.config.spec.step_flops(lengths)
    return {
        "iteration_s": wall_s / count,
        "tokens_per_s": sum(lengths) / wall_s,
        "mfu": flops / wall_s / (len(ranks) * DEVICE.peak_flops_per_s),
        "bubble_share": sum(wall_s - busy for busy in busy_s) / (len(ranks) * wall_s),
        "imbalance": 1 - min(busy_s) / max(busy_s),
        "exchange_wait_s": max(sum(i.exchange_wait_s for i in items) for items in seen) / count,
        "planning_stall_s": max(sum(i.planning_stall_s for i in items) for items in seen) / count,
    }


@pytest.mark.dist
def test_every_scalar_is_logged_with_its_value_by_rank_0(pool: ProcessPool, tmp_path: Path) -> None:
    ranks = pool.run(train_with_all, 3, str(tmp_path))
    steps = len(ranks[0].iterations)
    assert steps >= 5
    assert not any("run/" in name for row in ranks[1].logged.values() for name in row)
    rows = {
        step: {name.removeprefix("run/"): value for name, value in row.items() if "run/" in name}
        for step, row in ranks[0].logged.items()
    }
    assert [step for step, row in rows.items() if row] == list(range(2, steps + 1, 2))
    for step in range(2, steps + 1, 2):
        stalls = [record.checkpoint_stall_s[step - 1] for record in ranks]
        values = expected(ranks, step - 2, step)
        if step > 3:  # The first checkpoint was saved after step 3.
            values["checkpoint_stall_s"] = max(stall for stall in stalls if stall is not None)
            assert values.keys() == ALL
        assert rows[step] == pytest.approx(values, rel=1e-6)
        watched = ranks[0].logged[step]
        assert watched["straggler/mitigation"] == 0.0
        assert watched["straggler/iteration_s"] > 0.0
        assert 0.0 <= watched["straggler/waiting_s"] < watched["straggler/iteration_s"]


@pytest.mark.dist
def test_a_step_of_several_batches_has_one_row_and_ordinary_data_no_stall(
    pool: ProcessPool,
) -> None:
    logged = pool.run(train_with_accumulation, 2)[0]
    rows = {step: {n for n in row if n.startswith("run/")} for step, row in logged.items()}
    names = {"iteration_s", "tokens_per_s", "bubble_share", "imbalance", "exchange_wait_s"}
    assert {step for step, row in rows.items() if row} == {1, 2, 3}
    assert all(row == {f"run/{name}" for name in names} for row in rows.values() if row)


def test_what_lost_ranks_cost_is_counted_from_the_last_step_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(run_metrics, "monotonic", lambda: now_s)
    metrics, trainer = RunMetrics(), SimpleNamespace(global_step=0)

    def step(number: int, after_s: float) -> None:
        nonlocal now_s
        now_s, trainer.global_step = now_s + after_s, number
        metrics._count_lost(cast("L.Trainer", trainer))

    for number in (1, 2, 3):
        step(number, 1.0)
    assert (metrics._idle_s, metrics._steps_again) == (0.0, 0)
    metrics.on_generation(cast("L.Trainer", trainer), None, SimpleNamespace(number=1))
    step(2, 2.5)  # From a checkpoint of step 1.
    step(3, 1.0)
    metrics.on_generation(cast("L.Trainer", trainer), None, SimpleNamespace(number=2))
    step(4, 0.5)
    assert (metrics._idle_s, metrics._steps_again) == (3.0, 2)
    row = _Sums(wall_s=1.0, num_iterations=1.0, generation=2.0, idle_s=3.0, steps_again=2.0)
    newcomer = _Sums(wall_s=1.0, num_iterations=1.0, generation=2.0)
    scalars = _scalars([newcomer, row])
    names = ("generation", "ranks", "idle_s", "steps_again")
    assert [scalars[f"run/{name}"] for name in names] == [2.0, 2, 3.0, 2.0]


def test_another_strategy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Leave the callback out"):
        RunMetrics().setup(L.Trainer(**quiet(devices=1)), Module(3), "fit")
