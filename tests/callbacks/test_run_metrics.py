"""Every scalar of `RunMetrics` is what it says, computed again from what others have seen."""

import time

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_hetero import HeteroStrategy
from lightning_hetero.autoplan.out_of_memory import MemoryWatch
from lightning_hetero.callbacks import (
    LayerwiseCheckpoint,
    RunLog,
    RunMetrics,
    StragglerMonitor,
    run_metrics,
)
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.event_log import read_entries
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.models.batches import AssignedBatch
from tests.data.dynamic_runs import LENGTHS, Candidates, Module
from tests.data.rows import Rows
from tests.plans import UNEQUAL
from tests.toy import ToyModule, ToyOptions, loader, quiet

DEVICE = KNOWN_DEVICES["T4"]


class Record(L.Callback):
    """What one rank sees of a run; stands in for the module `time` of the metrics."""

    def __init__(self):
        self.clock_s, self.iterations = [], []

    def perf_counter(self):
        self.clock_s.append(time.perf_counter())
        return self.clock_s[-1]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        times, data = trainer.strategy.engine.clock.last, trainer.datamodule
        packed = batch.microbatches if isinstance(batch, AssignedBatch) else []
        saved = [c.saved for c in trainer.callbacks if isinstance(c, LayerwiseCheckpoint)]
        self.iterations.append(
            {
                "wall_s": self.clock_s[-1] - self.clock_s[-2],
                "busy_s": sum(action.compute_s for action in times.actions),
                "exchange_s": sum(m.wait_s for m in times.messages if m.is_exchange),
                "planning_s": 0.0 if data is None else data.planning_stall_s,
                "lengths": [n for item in packed for n in item.cu_seqlens.diff().tolist()],
                "stall_s": saved[0].stall_s if saved and saved[0] else None,
            }
        )


class Kept(DummyLogger):
    """Keeps rows by step."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)


def train_with_all(rank, folder):
    """Train with a data module and every callback that logs, on devices with a data sheet."""
    record, logger = Record(), Kept()
    sizes = {"tokens_per_step": 60, "context_length": 31, "lengths": LENGTHS}
    data = HeteroDataModule(Rows(LENGTHS), seed=2, num_ahead=0, **sizes)
    # The record stands behind the metrics, whose clock it has read when it is its turn.
    callbacks = [
        Candidates([UNEQUAL]),
        StragglerMonitor(events=None),
        RunMetrics(),
        record,
        LayerwiseCheckpoint(folder, every_n_train_steps=3, shared_memory=False),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_metrics, "time", record)
        patch.setattr(run_metrics, "describe_device", lambda _: DEVICE)
        options = quiet(devices=3, callbacks=callbacks, logger=logger)
        options |= {"max_epochs": 1, "log_every_n_steps": 2, "enable_checkpointing": True}
        trainer = L.Trainer(**options, strategy=HeteroStrategy(UNEQUAL))
        trainer.fit(Module(3), datamodule=data)
    return record.iterations, logger.rows


def train_with_accumulation(rank, folder):
    """Train on an ordinary loader, two batches a step; return what is logged."""
    logger = Kept()
    callbacks = [RunMetrics(), RunLog(folder / "events.jsonl")]
    options = quiet(devices=2, callbacks=callbacks, logger=logger)
    options |= {"max_steps": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    trainer = L.Trainer(**options, strategy=HeteroStrategy(num_stages=1))
    in_use = iter([(100, 0.0), (105, 0.0), (200, 0.0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryWatch, "in_use", lambda _: next(in_use))
        trainer.fit(ToyModule(ToyOptions()), loader(24, 2))
    return logger.rows


def expected(ranks, first, last):
    """Compute the scalars of the iterations [first, last)."""
    seen = [iterations[first:last] for iterations in ranks]
    sums = {
        name: [sum(item[name] for item in items) for items in seen]
        for name in ("wall_s", "busy_s", "exchange_s", "planning_s")
    }
    wall_s, busy_s, count = max(sums["wall_s"]), sums["busy_s"], last - first
    # Ranks 0 and 1 are the first stages of the two pipelines.
    lengths = [n for items in seen[:2] for item in items for n in item["lengths"]]
    flops = Module(3).model.config.spec.step_flops(lengths)
    return {
        "run/iteration_s": wall_s / count,
        "run/tokens_per_s": sum(lengths) / wall_s,
        "run/mfu": flops / wall_s / (len(ranks) * DEVICE.peak_flops_per_s),
        "run/bubble_share": sum(wall_s - busy for busy in busy_s) / (len(ranks) * wall_s),
        "run/imbalance": 1 - min(busy_s) / max(busy_s),
        "run/exchange_wait_s": max(sums["exchange_s"]) / count,
        "run/planning_stall_s": max(sums["planning_s"]) / count,
    }


def rows_of(logged):
    rows = {step: {n: v for n, v in row.items() if "run/" in n} for step, row in logged.items()}
    return {step: row for step, row in rows.items() if row}


@pytest.mark.dist
def test_every_scalar_is_logged_with_its_value_by_rank_0(pool, tmp_path):
    ranks, logged = zip(*pool.run(train_with_all, 3, str(tmp_path)), strict=True)
    steps = len(ranks[0])
    assert steps >= 5
    assert not rows_of(logged[1])
    rows = rows_of(logged[0])
    assert [*rows] == [*range(2, steps + 1, 2)]
    for step, row in rows.items():
        values = expected(ranks, step - 2, step)
        if step > 3:  # The first checkpoint was saved after step 3.
            stalls = [iterations[step - 1]["stall_s"] for iterations in ranks]
            values["run/checkpoint_stall_s"] = max(s for s in stalls if s is not None)
        assert row == pytest.approx(values, rel=1e-6)
        watched = logged[0][step]
        assert watched["straggler/mitigation"] == 0.0
        assert 0.0 <= watched["straggler/waiting_s"] < watched["straggler/iteration_s"]


@pytest.mark.dist
def test_a_step_of_several_batches_has_one_row_and_ordinary_data_no_stall(pool, tmp_path):
    rows = rows_of(pool.run(train_with_accumulation, 2, tmp_path)[0])
    names = ["iteration_s", "tokens_per_s", "bubble_share", "imbalance", "exchange_wait_s"]
    assert {step: {*row} for step, row in rows.items()} == {
        step: {f"run/{name}" for name in names} for step in (1, 2, 3)
    }
    # The log has the ranks' memory.
    noted = [entry for _, entry in read_entries(tmp_path / "events.jsonl")]
    noted = [entry.get("memory") for entry in noted if entry["event"] == "metrics"]
    assert noted == [[[number, 0]] * 2 for number in (100, 105, 200)]


def test_another_strategy_is_refused():
    with pytest.raises(ConfigurationError, match="or leave them out"):
        RunMetrics().on_train_start(L.Trainer(**quiet(devices=1)), Module(3))
