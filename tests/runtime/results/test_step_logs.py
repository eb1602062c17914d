"""What is logged in micro-batches becomes one value, the same on every rank."""

import math
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import SumMetric

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.hook_logs import HookLogs
from lightning_hetero.runtime.results.log_entries import LogEntry
from lightning_hetero.runtime.results.numbers.kinds import Kind, Reduction
from lightning_hetero.runtime.results.numbers.reductions import Reductions
from lightning_hetero.runtime.results.step_logs import StepLogs
from lightning_hetero.runtime.results.targets import LossWatch
from lightning_hetero.strategy.processes import Processes
from tests.processes import ProcessPool
from tests.runtime.step_cases import PLANS, TinyModule, fit_each, same

pytestmark = pytest.mark.filterwarnings("ignore:What is logged as")


class Module(L.LightningModule):
    """Keeps what reaches Lightning's own log."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[tuple[str, float, dict[str, Any]]] = []

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,  # noqa: FBT001, FBT002
        on_step: bool | None = None,  # noqa: FBT001
        on_epoch: bool | None = None,  # noqa: FBT001
        reduce_fx: Any = "mean",
        sync_dist: bool = False,  # noqa: FBT001, FBT002
        sync_dist_group: Any = None,
        batch_size: int | None = None,
    ) -> None:
        options = {"prog_bar": prog_bar, "on_step": on_step, "on_epoch": on_epoch}
        self.reached.append((name, float(value), {**options, "batch_size": batch_size}))


def weight(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def row_of(logs: StepLogs, module: Module, microbatches: list[tuple[float, dict[str, Any]]]) -> Any:
    """Record micro-batches of (weight, what is logged), each with optional (value, options)."""
    with logs.recording():
        for tokens, logged in microbatches:
            for name, item in logged.items():
                value, options = item if isinstance(item, tuple) else (item, {})
                module.log(name, value, **options)
            logs.keep_microbatch(weight(tokens), Reductions())
    return logs.entries


def replayed(ranks: list[list[tuple[float, dict[str, Any]]]], batch_size: int = 4) -> Any:
    """What Lightning gets to log when ranks have recorded these micro-batches."""
    module = Module()
    logs = [StepLogs(module, torch.device("cpu")) for _ in ranks]
    entries = [
        entry
        for log, microbatches in zip(logs, ranks, strict=True)
        for entry in row_of(log, module, microbatches)
    ]
    unique = tuple(dict.fromkeys(entries))
    rows = torch.stack([log.as_row(unique) for log in logs])
    assert not module.reached
    logs[0].check(unique, rows)
    logs[0].replay(unique, rows, batch_size)
    return {name: (value, options) for name, value, options in module.reached}


def test_means_are_weighted_by_target_tokens_over_microbatches_and_ranks() -> None:
    found = replayed([[(1, {"loss": 2.0}), (3, {"loss": 6.0})], [(4, {"loss": torch.tensor(1.0)})]])
    assert found["loss"][0] == pytest.approx((2 + 18 + 4) / 8)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("sum", 9.0), ("max", 6.0), ("min", 1.0), (max, 6.0), (torch.amin, 1.0), (sum, 9.0)],
)
def test_other_reductions_ignore_weights(reduce_fx: Any, expected: float) -> None:
    options = {"reduce_fx": reduce_fx}
    ranks = [
        [(1, {"x": (2.0, options)}), (3, {"x": (6.0, options)})],
        [(4, {"x": (1.0, options)})],
    ]
    assert replayed(ranks)["x"][0] == expected


def test_a_key_of_some_microbatches_is_averaged_over_those() -> None:
    ranks: list[Any] = [
        [(1, {"loss": 1.0}), (2, {"loss": 1.0, "rare": 5.0})],
        [(7, {"loss": 3.0})],
        [],
    ]
    found = replayed(ranks)
    assert found["rare"][0] == 5.0
    assert found["loss"][0] == pytest.approx((1 + 2 + 21) / 10)


def test_a_microbatch_without_targets_counts_nothing() -> None:
    found = replayed([[(0, {"loss": float("nan")}), (2, {"loss": 4.0})]])
    assert found["loss"][0] == 4.0
    both = replayed([[(0, {"loss": 3.0})], [(2, {"loss": 4.0})]])
    assert both["loss"][0] == pytest.approx(4.0)


def test_a_key_logged_without_any_target_still_is_logged() -> None:
    assert replayed([[(0, {"count": 3.0})]])["count"][0] == 3.0


def test_options_come_through_and_the_iterations_samples_weigh_the_epoch() -> None:
    options = {"prog_bar": True, "on_step": True, "on_epoch": True}
    found = replayed([[(1, {"loss": (1.0, options)})]], batch_size=12)["loss"][1]
    assert options.items() <= found.items()
    assert found["batch_size"] == 12
    assert replayed([[(1, {"loss": 1.0})]], batch_size=0)["loss"][1]["batch_size"] == 1


def test_what_a_step_logged_that_did_not_end_is_forgotten() -> None:
    module = Module()
    logs = StepLogs(module, torch.device("cpu"))
    with logs.recording():
        module.log("before_the_model", 1.0)
        logs.drop_microbatch()
        logs.keep_microbatch(weight(1), Reductions())
    assert logs.entries == ()


def test_outside_of_steps_the_module_logs_as_ever() -> None:
    module = Module()
    logs = StepLogs(module, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="boom"), logs.recording():
        raise RuntimeError("boom")
    module.log("after", 1.0)
    assert [(name, value) for name, value, _ in module.reached] == [("after", 1.0)]


def test_a_logged_value_is_cut_off_from_the_graph() -> None:
    value = torch.ones((), requires_grad=True) * 2
    assert replayed([[(1, {"loss": value})]])["loss"][0] == 2.0


def test_entries_are_the_same_if_their_names_are() -> None:
    one = LogEntry("loss", (("batch_size", 3),))
    assert one == LogEntry("loss", (("batch_size", 4),))
    assert one != LogEntry("loss", (), metric="accuracy")


class InHook(TinyModule):
    """Logs at the end of an epoch what a subclass has."""

    validates = True
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total += float(self.loss(self.model(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("value", self.value(), **self.options)

    def value(self) -> float:
        return self.total


class SameInHook(InHook):
    def value(self) -> float:
        return self.current_epoch + 0.5


class ReducedInHook(InHook):
    options: ClassVar[dict[str, Any]] = {"sync_dist": True, "reduce_fx": "max"}

    def value(self) -> float:
        return float(self.global_rank)


class OfRankZeroInHook(InHook):
    options: ClassVar[dict[str, Any]] = {"rank_zero_only": True}


class OnRankZeroInHook(SameInHook):
    """Logs on one rank alone."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            super().on_validation_epoch_end()


class LoggingCallback(L.Callback):
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log("rank", float(trainer.global_rank))


class InCallback(SameInHook):
    def configure_callbacks(self) -> Any:
        return [LoggingCallback()]


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_what_hooks_log_for_an_epoch_is_the_same_on_all_ranks_or_refused(
    pool: ProcessPool, plan: str
) -> None:
    makes = [SameInHook, ReducedInHook, OfRankZeroInHook, OnRankZeroInHook]
    for alike, reduced, *_ in pool.run(fit_each, 2, makes, PLANS[plan]):
        assert alike["metrics"]["value"] == 1.5
        assert reduced["metrics"]["value"] == 1.0
    for make, name in ((InHook, "value"), (InCallback, "rank")):
        for (told,) in pool.run(fit_each, 2, [make], PLANS[plan]):
            assert f"A hook logs '{name}' with different values: " in str(told)


def test_a_value_of_which_nothing_is_known_is_warned_of_where_it_differs() -> None:
    with pytest.warns(UserWarning, match="What is logged as 'x' isn't known to be a mean"):
        replayed([[(1, {"x": 1.0})], [(1, {"x": 2.0})]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replayed([[(1, {"x": 1.0}), (1, {"x": 1.0})], [(3, {"x": 1.0})]])
        replayed(
            [[(1, {"x": (1.0, {"reduce_fx": "max"})}), (1, {"x": (2.0, {"reduce_fx": "max"})})]]
        )


@pytest.mark.parametrize("ranks", [["mc"], ["cm"], ["m", "c"], ["c", "m"]], ids=str)
def test_a_value_that_is_a_mean_in_some_microbatches_only_is_warned_of(ranks: list[str]) -> None:
    mean, reductions = torch.tensor(2.0), Reductions()
    reductions.keep(mean, Reduction(Kind.MEAN, count=3))
    values: dict[str, Any] = {"m": mean, "c": 3.5}  # As `min(loss.item(), 3.5)` gives.
    logs = [StepLogs(Module(), torch.device("cpu")) for _ in ranks]
    for log, kinds in zip(logs, ranks, strict=True):
        with log.recording():
            for kind in kinds:
                log._module.log("x", values[kind])
                log.keep_microbatch(weight(1), reductions)
    entries = tuple(dict.fromkeys(entry for log in logs for entry in log.entries))
    rows = torch.stack([log.as_row(entries) for log in logs])
    with pytest.warns(UserWarning, match="What is logged as 'x' isn't known to be a mean"):
        logs[0].check(entries, rows)


def test_buffers_are_looked_for_in_each_run() -> None:
    module = Module()
    assert StepLogs(module, torch.device("cpu")).buffers() == []
    module.register_buffer("table", torch.ones(2))
    logs = StepLogs(module, torch.device("cpu"))
    assert logs.buffers() == [module.table]
    module.table = torch.zeros(1)
    assert logs.buffers() == [module.table]


def number_of_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(len(x))


def test_a_count_that_is_made_elsewhere_is_warned_of() -> None:
    log, watch, x = StepLogs(Module(), torch.device("cpu")), LossWatch([], 4), torch.ones(4, 2)
    with log.recording(), watch:
        log._module.log("x", number_of_rows(x))
    log.keep_microbatch(torch.tensor(1.0), watch.reductions)
    with pytest.warns(UserWarning, match="What is logged as 'x' .* if it counts"):
        log.check(log.entries, log.as_row(log.entries)[None])


class LogsAll(TinyModule):
    """What tutorials log: functions of the loss, and whole numbers that may count."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.rows = SumMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"perplexity": loss.exp(), "by_python": math.exp(loss.item())})
        self.log("both", loss * 0.5 + self.model.head.weight.abs().mean() * (ids > 3).sum())
        self.log("rows", len(ids))
        self.log("tokens", torch.tensor(float(ids.numel())))
        self.log("length", ids.shape[1])
        self.log("index", batch_idx, reduce_fx="sum", on_epoch=True)
        self.log("hits", (ids == labels).sum().item())
        self.batches.update(1)
        self.rows.update(ids.size(0))
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen = [float(self.batches.compute()), float(self.rows.compute())]


@pytest.mark.parametrize("plan", PLANS)
def test_functions_and_counts_of_samples_are_the_batchs(pool: ProcessPool, plan: str) -> None:
    (expected,) = pool.run(fit_each, 1, [LogsAll], None)[0]
    for (found,) in pool.run(fit_each, 2, [LogsAll], PLANS[plan]):
        same(found, expected)
        assert found["seen"] == expected["seen"]


class FakeStore:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> None:
        del self.values[key]


def test_hooks_compare_with_rank_0_and_leave_little_in_the_store() -> None:
    store: Any = FakeStore()
    first, second = (HookLogs(store, global_rank=r, timeout=timedelta(0)) for r in range(2))
    for step in range(20):
        value = math.nan if step == 3 else step / 3
        first.compare("x", value)
        found = second.compare("x", value * (1 + 1e-7))
        assert found == value or step == 3
    assert len(store.values) == 8
    first.compare("y", 1.0)
    with pytest.raises(StepError, match="'y' with different values: 1 on rank 0, 2 on rank 1"):
        second.compare("y", 2.0)
    with pytest.raises(StepError, match="Rank 1 logs 'z' in a hook, and rank 0 doesn't"):
        second.compare("z", 2.0)


def test_ranks_of_a_generation_name_what_they_compare_without_a_word_and_never_alike() -> None:
    store, ranks = dist.HashStore(), []
    for rank in range(2):
        processes: Any = Processes(timeout=timedelta(0), start_timeout=timedelta(0), backend=None)
        processes._environment = SimpleNamespace(world_size=lambda: 2)
        processes._comms, processes._store = SimpleNamespace(global_rank=rank), store
        processes._membership = object()  # Nobody answers a broadcast.
        ranks.append(processes)
    for value in (1.0, 2.0):
        for processes in ranks:
            processes.compare_hooks()
        for processes in ranks:
            assert processes._hook_logs.compare("x", value) == value
