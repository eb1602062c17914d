"""What is logged in micro-batches becomes one value, the same on every rank."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero.runtime.results.step_logs import LogEntry, StepLogs
from tests.processes import ProcessPool
from tests.runtime.step_cases import COPIES, STAGES, TinyModule, check


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
            logs.keep_microbatch(weight(tokens))
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
        logs.keep_microbatch(weight(1))
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


class LogsAll(TinyModule):
    """Logs losses, which all are means over targets, with and without a batch size."""

    validates = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, labels = batch
        logits = self.model(ids)
        loss = self.loss(logits, labels)
        self.log_dict({"loss": loss, "number": loss.item(), "twice": 2 * loss})
        options = {"on_step": False, "on_epoch": True}
        self.log("hits", (logits.argmax(-1) == labels).sum(), reduce_fx="sum", **options)
        self.log("highest", logits.max(), reduce_fx="max", **options)
        self.log("of samples", logits.square().mean(), batch_size=len(ids))


class Summed(TinyModule):
    """Logs the loss as it is, a sum."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 0.01 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.dist
def test_what_steps_log_is_what_one_device_logs(pool: ProcessPool) -> None:
    check(pool, [LogsAll, Summed], STAGES, COPIES)
