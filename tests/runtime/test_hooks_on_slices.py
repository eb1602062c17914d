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
from lightning_hetero.core.errors import HeteroError
from tests.processes import ProcessPool
from tests.runtime.hook_modules import (
    Averages,
    AveragesData,
    AveragesWhatTravels,
    ByElements,
    ClipsByHand,
    ClipsByStrategy,
    ClipsEach,
    CopiesModel,
    Counts,
    DrawsNoise,
    Gathers,
    KeepsNorms,
    LogsNorms,
    LogsScalar,
    NormsByHand,
    SavesWeights,
    StepsByRatio,
    SwapsAverages,
    TellsSizes,
    TellsWeights,
    ZeroesOldRows,
    ZeroesRow,
)
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.step_cases import COPIES, STAGES, Rows, TinyModule, fit_each, same
from tests.toy import quiet

pytestmark = pytest.mark.dist


RIGHT: list[Callable[[], TinyModule]] = [
    ClipsByStrategy,
    AveragesWhatTravels,
    ByElements,
    SwapsAverages,
    TellsSizes,
]


def test_hooks_that_take_all_ranks_slices_do_what_one_device_does(pool: ProcessPool) -> None:
    expected = pool.run(fit_each, 1, RIGHT, None)[0]
    for results in pool.run(fit_each, 2, RIGHT, COPIES):
        for found, one in zip(results, expected, strict=True):
            assert isinstance(found, dict), found
            same(found, one)


def test_rows_of_gradients_may_be_chosen_where_stages_keep_whole_parameters(
    pool: ProcessPool,
) -> None:
    expected, sizes = pool.run(fit_each, 1, [ZeroesOldRows, TellsSizes], None)[0]
    makes = [ZeroesOldRows, LogsNorms, KeepsNorms, DrawsNoise, TellsSizes]
    for found, logged, kept, drawn, told in pool.run(fit_each, 2, makes, STAGES):
        same(found, expected)
        same(told, sizes)
        assert "randn is called on parameter" in drawn
        assert "norm is called on parameter model." in logged
        assert "sum is called on parameter model." in kept


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (DrawsNoise, "randn is called on parameter"),
        (CopiesModel, "clone is called on parameter model.embed.weight"),
        (SavesWeights, "untyped_storage is called on parameter model."),
        (LogsScalar, "'scale' that is logged in a hook has 0 elements"),
        (Gathers, "A step calls self.all_gather"),
        (TellsWeights, "getitem is called on parameter model.embed.weight"),
        (ClipsByHand, "gradient_clip_val"),
        (ClipsEach, "norm is called on parameter model.embed.weight or its gradient"),
        (NormsByHand, "whole_state_dict"),
        (ZeroesRow, "setitem is called on parameter model.embed.weight"),
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
            grad[:2] *= grad.shape[1] / 10


class NormsOfRows(NormsOfColumns):
    dim = 1


def test_what_hooks_do_along_columns_is_right_or_refused_where_they_are_cut(
    pool: ProcessPool,
) -> None:
    plan = plan_of(pipeline(stage([0, 1], 0, 3)))
    (expected,) = pool.run(fit_each, 1, [NormsOfColumns], None)[0]
    for found, message in pool.run(fit_each, 2, [NormsOfColumns, NormsOfRows], plan, CUT_LAYERS):
        same(found, expected)
        assert "norm is called on parameter model.layers.0.2.weight" in message


class Validated(TinyModule):
    tells_norm = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.model(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.seen = sum(item.numel() for item in self.parameters())
        if self.tells_norm:
            self.seen = sum(float(item.norm()) for item in self.parameters())


def validate(rank: int, plan: dict[str, Any], tells_norm: bool) -> Any:  # noqa: FBT001
    module = Validated()
    module.tells_norm = tells_norm
    strategy = HeteroStrategy(ParallelPlan.from_dict(plan))
    trainer = L.Trainer(**quiet(use_distributed_sampler=False), strategy=strategy, devices=2)
    try:
        trainer.validate(module, DataLoader(Rows(4), batch_size=2), verbose=False)
    except HeteroError as error:
        return str(error)
    return module.seen


def test_hooks_are_watched_without_training_too(pool: ProcessPool) -> None:
    whole = sum(item.numel() for item in TinyModule().parameters())
    assert pool.run(validate, 2, COPIES, False) == [whole, whole]
    for message in pool.run(validate, 2, STAGES, True):
        assert "norm is called on parameter" in message


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
