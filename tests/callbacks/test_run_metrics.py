"""Every scalar of `RunMetrics` is what it says, computed again from what others have seen."""

from pathlib import Path

import lightning as L
import pytest

from lightning_hetero.callbacks import RunMetrics
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


def test_another_strategy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Leave the callback out"):
        RunMetrics().setup(L.Trainer(**quiet(devices=1)), Module(3), "fit")
