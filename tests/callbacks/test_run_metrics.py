"""Every scalar of `RunMetrics` is what it says, computed again from what others have seen."""

import time
from dataclasses import dataclass, field

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import (
    LayerwiseCheckpoint,
    RunMetrics,
    StragglerMonitor,
    run_metrics,
)
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.models.batches import AssignedBatch
from tests.data.dynamic_runs import LENGTHS, Candidates, Module
from tests.data.rows import Rows
from tests.toy import ToyModule, ToyOptions, loader, quiet

DEVICE = KNOWN_DEVICES["T4"]
PLAN = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 3]}]},
        {"stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 3]}]},
    ]
}


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one rank saw of an iteration."""

    wall_s: float
    compute_s: float
    exchange_wait_s: float
    planning_stall_s: float
    lengths: list[int]


@dataclass
class Record(L.Callback):
    """What one rank saw of a run, and what was logged there by step."""

    clock_s: list[float] = field(default_factory=list)
    """All that the metrics have read of the time."""
    iterations: list[Iteration] = field(default_factory=list)
    checkpoint_stall_s: list[float | None] = field(default_factory=list)
    """Of the last checkpoint at each iteration's end."""
    logged: dict[int, dict[str, float]] = field(default_factory=dict)

    def perf_counter(self) -> float:
        """Stand in for the module `time`."""
        self.clock_s.append(time.perf_counter())
        return self.clock_s[-1]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        times, data = trainer.strategy.engine.clock.last, trainer.datamodule
        start_s, end_s = self.clock_s[-2:]
        packed = batch.microbatches if isinstance(batch, AssignedBatch) else []
        self.iterations.append(
            Iteration(
                wall_s=end_s - start_s,
                compute_s=sum(action.compute_s for action in times.actions),
                exchange_wait_s=sum(m.wait_s for m in times.messages if m.is_exchange),
                planning_stall_s=0.0 if data is None else data.planning_stall_s,
                lengths=[n for item in packed for n in item.cu_seqlens.diff().tolist()],
            )
        )
        saved = [c.saved for c in trainer.callbacks if isinstance(c, LayerwiseCheckpoint)]
        self.checkpoint_stall_s.append(saved[0].stall_s if saved and saved[0] else None)


class Kept(DummyLogger):
    """A logger that keeps rows by step."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)


def train_with_all(rank: int, folder: str) -> Record:
    """Train with a data module and every callback that logs, on devices with a data sheet."""
    record = Record()
    data = HeteroDataModule(
        Rows(LENGTHS),
        tokens_per_step=60,
        context_length=31,
        lengths=LENGTHS,
        seed=2,
        num_ahead=0,
    )
    # The record stands behind the metrics, whose clock it has read when it is its turn.
    callbacks = [
        Candidates([PLAN]),
        StragglerMonitor(events=None),
        RunMetrics(),
        record,
        LayerwiseCheckpoint(folder, every_n_train_steps=3, shared_memory=False),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_metrics, "time", record)
        patch.setattr(run_metrics, "describe_device", lambda _: DEVICE)
        trainer = L.Trainer(
            **quiet(devices=3, callbacks=callbacks, logger=Kept(record.logged))
            | {
                "strategy": HeteroStrategy(plan=ParallelPlan.from_dict(PLAN)),
                "max_epochs": 1,
                "log_every_n_steps": 2,
                "enable_checkpointing": True,
            }
        )
        trainer.fit(Module(3), datamodule=data)
    return Record(**{name: getattr(record, name) for name in record.__dataclass_fields__})


def train_with_accumulation(rank: int) -> dict[int, dict[str, float]]:
    """Train on an ordinary loader, two batches a step; return what is logged."""
    record = Record()
    trainer = L.Trainer(
        **quiet(devices=2, callbacks=[RunMetrics()], logger=Kept(record.logged)),
        strategy=HeteroStrategy(num_stages=1),
        max_steps=3,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    trainer.fit(ToyModule(ToyOptions()), loader(24, 2))
    return record.logged


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
def test_every_scalar_is_logged_with_its_value_by_rank_0(pool, tmp_path):
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
        assert rows[step] == pytest.approx(values, rel=1e-6)
        watched = ranks[0].logged[step]
        assert watched["straggler/mitigation"] == 0.0
        assert 0.0 <= watched["straggler/waiting_s"] < watched["straggler/iteration_s"]


@pytest.mark.dist
def test_a_step_of_several_batches_has_one_row_and_ordinary_data_no_stall(pool):
    logged = pool.run(train_with_accumulation, 2)[0]
    rows = {step: {n for n in row if n.startswith("run/")} for step, row in logged.items()}
    names = {"iteration_s", "tokens_per_s", "bubble_share", "imbalance", "exchange_wait_s"}
    assert {step for step, row in rows.items() if row} == {1, 2, 3}
    assert all(row == {f"run/{name}" for name in names} for row in rows.values() if row)


def test_another_strategy_is_refused():
    with pytest.raises(ConfigurationError, match="Leave the callback out"):
        RunMetrics().setup(L.Trainer(**quiet(devices=1)), Module(3), "fit")
