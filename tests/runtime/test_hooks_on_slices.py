"""What hooks do to weights and gradients, which are slices there, is right or refused."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.processes import ProcessPool
from tests.runtime.hook_modules import (
    Averages,
    AveragesData,
    AveragesWhatTravels,
    ByElements,
    ClipsByHand,
    ClipsByStrategy,
    ClipsEach,
    ClipsGreatest,
    CopiesModel,
    Counts,
    Gathers,
    LeavesOut,
    LogsChangedNorms,
    LogsEachNorm,
    LogsNorms,
    LooksBeforeBackward,
    MeasuresFrozen,
    SavesWeights,
    StepsByRatio,
    SwapsAverages,
    TellsWeights,
    TrainsNewRows,
    ZeroesOldRows,
    ZeroesRow,
)
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.step_cases import COPIES, STAGES, Rows, TinyModule, fit, fit_each, same
from tests.toy import quiet

pytestmark = pytest.mark.dist


RIGHT: list[Callable[[], TinyModule]] = [
    ClipsByHand,
    ClipsByStrategy,
    ClipsEach,
    ClipsGreatest,
    LogsNorms,
    LogsChangedNorms,
    LogsEachNorm,
    LooksBeforeBackward,
    TrainsNewRows,
    LeavesOut,
    AveragesWhatTravels,
    ByElements,
    SwapsAverages,
]


@pytest.mark.parametrize("plan", [COPIES, STAGES], ids=["copies", "stages"])
def test_hooks_get_one_devices_numbers(pool: ProcessPool, plan: dict[str, Any]) -> None:
    expected = pool.run(fit_each, 1, RIGHT, None)[0]
    for results in pool.run(fit_each, 2, RIGHT, plan):
        for found, one in zip(results, expected, strict=True):
            assert isinstance(found, dict), found
            same(found, one)


def test_standbys_count_once_in_norms(pool: ProcessPool) -> None:
    makes = [ClipsByHand, LogsNorms, LogsEachNorm, TrainsNewRows]
    plan = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (0, 1, 2, 3)))
    expected = pool.run(fit_each, 1, makes, None)[0]
    for results in pool.run(fit_each, 4, makes, plan, {"redundancy": 1, "num_microbatches": 1}):
        for found, one in zip(results, expected, strict=True):
            assert isinstance(found, dict), found
            same(found, one)


def test_norms_of_accumulated_gradients_are_one_devices(pool: ProcessPool) -> None:
    expected = pool.run(fit, 1, LogsNorms, None, 0, None, 2, 2)[0]
    for found in pool.run(fit, 2, LogsNorms, STAGES, 0, None, 2, 2):
        same(found, expected)


def test_rows_of_gradients_may_be_chosen_where_one_rank_has_all(pool: ProcessPool) -> None:
    (expected,) = pool.run(fit_each, 1, [ZeroesOldRows], None)[0]
    for (found,) in pool.run(fit_each, 2, [ZeroesOldRows], STAGES):
        same(found, expected)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (CopiesModel, "deepcopy is called on parameter model.embed.weight"),
        (SavesWeights, "pickling or saving is called on parameter model."),
        (Gathers, "A step calls self.all_gather"),
        (TellsWeights, "getitem is called on parameter model.embed.weight"),
        (MeasuresFrozen, "norm is called in a hook on parameter model.embed.weight, which is froz"),
        (ZeroesRow, "setitem is called on parameter model.embed.weight"),
        (ZeroesOldRows, "own_rows(parameter)"),
        (StepsByRatio, 'ownership="parameter"'),
        (Averages, "under torch.no_grad()"),
        (AveragesData, "under torch.no_grad()"),
    ],
)
def test_hooks_that_would_differ_between_ranks_are_refused(
    pool: ProcessPool, make: Callable[[], TinyModule], told: str
) -> None:
    for (message,) in pool.run(fit_each, 2, [make], COPIES):
        assert told in message


CUT_LAYERS = {"tp_plan": {"layers.*.0": "colwise", "layers.*.2": "rowwise"}}


class CutLayers(TinyModule):
    """Its second matrices are cut by columns, and as wide in a slice as they are high."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(3))
        self.model.layers = nn.ModuleList(layers)


class NormsOfColumns(CutLayers):
    dim = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for layer in self.model.layers:
            grad = layer[2].weight.grad
            grad.div_(grad.norm(dim=self.dim, keepdim=True) + 0.5)
            grad[:2] *= 0.6


class NormsOfRows(NormsOfColumns):
    dim = 1


def test_what_hooks_do_along_columns_is_right_where_they_are_cut(pool: ProcessPool) -> None:
    plan, makes = plan_of(pipeline(stage([0, 1], 0, 3))), [NormsOfColumns, NormsOfRows]
    expected = pool.run(fit_each, 1, makes, None)[0]
    for results in pool.run(fit_each, 2, makes, plan, CUT_LAYERS):
        for found, one in zip(results, expected, strict=True):
            same(found, one)


class Validated(TinyModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.model(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.seen = sum(float(item.norm()) for item in self.parameters())


def validate(rank: int, plan: dict[str, Any]) -> float:
    torch.manual_seed(0)
    module, strategy = Validated(), HeteroStrategy(ParallelPlan.from_dict(plan))
    alone = sum(float(item.norm()) for item in module.parameters())
    trainer = L.Trainer(**quiet(use_distributed_sampler=False), strategy=strategy, devices=2)
    trainer.validate(module, DataLoader(Rows(4), batch_size=2), verbose=False)
    return module.seen / alone


def test_hooks_get_whole_numbers_without_training_too(pool: ProcessPool) -> None:
    assert pool.run(validate, 2, STAGES) == pytest.approx([1.0, 1.0])


class Thaws(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model.embed)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.embed, optimizer, lr=0.1)


class Thawed(TinyModule):
    def configure_callbacks(self) -> list[Any]:
        return [Thaws()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.2)


def test_a_group_of_one_ranks_parameters_is_added_on_all(pool: ProcessPool) -> None:
    (expected,) = pool.run(fit_each, 1, [Thawed], None)[0]
    for (found,) in pool.run(fit_each, 2, [Thawed], STAGES):
        assert isinstance(found, dict), found
        same(found, expected)


def test_buffers_that_an_evaluation_changes_are_one_devices_or_refused(pool: ProcessPool) -> None:
    (expected,) = pool.run(fit_each, 1, [Counts], None)[0]
    for (found,) in pool.run(fit_each, 2, [Counts], STAGES, {"num_microbatches": 1}):
        same(found, expected)
    for (message,) in pool.run(fit_each, 2, [Counts], STAGES):
        assert "count changes with what each micro-batch holds" in message


class ChangesInStep(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.model.head.bias.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class ChangesDataInStep(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model.head.bias.data.clamp_(-0.01, 0.01)
        return super().training_step(batch, batch_idx)


class Renorms(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.embed.max_norm = 1.0


@pytest.mark.parametrize("make", [ChangesInStep, ChangesDataInStep, Renorms])
@pytest.mark.parametrize("plan", [STAGES, COPIES], ids=["stages", "copies"])
def test_weights_that_a_step_changes_are_refused(
    pool: ProcessPool, make: Callable[[], TinyModule], plan: dict[str, Any]
) -> None:
    for (message,) in pool.run(fit_each, 2, [make], plan):
        assert "changes parameter" in message
