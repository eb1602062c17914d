"""What hooks do to weights and gradients, which are slices there, is right or refused."""

import copy
import io
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import HeteroError
from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.step_cases import COPIES, STAGES, Rows, TinyModule, fit_each, same
from tests.toy import quiet

pytestmark = pytest.mark.dist


class ClipsByHand(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class ClipsByStrategy(TinyModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class ClipsEach(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_((0.01 / parameter.grad.norm()).clamp(max=1.0))


class LogsNorms(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class KeepsNorms(TinyModule):
    """Looks at gradients that are left after the step."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        grads = [item.grad for item in self.parameters() if item.grad is not None]
        self.norm = torch.stack([item.square().sum() for item in grads]).sum().sqrt()


class ZeroesOldRows(TinyModule):
    """Trains the last rows of a table only, as of new tokens."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.model.embed.weight.grad is not None:
            self.model.embed.weight.grad[:-8] = 0.0


class CopiesModel(TinyModule):
    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.model)


class SavesWeights(TinyModule):
    def on_train_epoch_end(self) -> None:
        torch.save(self.state_dict(), io.BytesIO())


class TellsWeights(TinyModule):
    def on_train_epoch_end(self) -> None:
        self.told = [float(item.detach().cpu().flatten()[0]) for item in self.parameters()]


class NormsByHand(TinyModule):
    """Looks only once an epoch has ended."""

    def on_train_epoch_end(self) -> None:
        weights = torch.cat([item.detach().flatten() for item in self.model.head.parameters()])
        self.norm = weights.square().sum().sqrt()


class ZeroesRow(TinyModule):
    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.model.embed.weight.data[0] = 0.0


class TrustRatio(torch.optim.SGD):
    """An optimizer whose name says nothing of what it needs."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for item in self.param_groups[0]["params"]:
                if item.grad is not None:
                    item.sub_(0.01 * item.grad * item.norm() / (item.grad.norm() + 1.0))
        return loss


class StepsByRatio(TinyModule):
    def configure_optimizers(self) -> Any:
        return TrustRatio(self.parameters(), lr=0.1)


class ByElements(TinyModule):
    """Does to a slice what it would do to the whole."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for item in self.parameters():
            item.grad.add_(item.detach(), alpha=0.1).clamp_(-0.05, 0.05)
            item.grad[item.grad.abs() < 1e-6] = 0.0

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        weight = self.model.head.weight
        weight.data.div_(weight.detach().norm(dim=1, keepdim=True).clamp(min=0.5))


class Averages(TinyModule):
    """Its targets lie near those of an average of the head, which a hook keeps."""

    needs_gradients = False

    def __init__(self) -> None:
        super().__init__()
        head = self.model.head
        self.average = nn.Linear(head.in_features, head.out_features)
        self.average.load_state_dict(head.state_dict())
        self.average.requires_grad_(self.needs_gradients)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            table = self.average.weight.mean(1)
        return super().loss(logits + table, labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        pairs = zip(self.average.parameters(), self.model.head.parameters(), strict=True)
        with torch.no_grad():
            for average, own in pairs:
                average.lerp_(own, 0.5)


class AveragesWhatTravels(Averages):
    needs_gradients = True


class AveragesData(Averages):
    """Changes values so that torch counts no change."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        TinyModule.on_train_batch_end(self, outputs, batch, batch_idx)
        self.average.weight.data.mul_(0.5)


class Counts(TinyModule):
    """Counts validated batches in a buffer."""

    validates = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, labels = batch
        self.log("val_loss", self.loss(self.model(ids), labels))
        self.count += 1


class SwapsAverages(TinyModule):
    """Trains on, and validates with averages in the place of its weights."""

    validates = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.model(batch[0]), batch[1]))

    def on_fit_start(self) -> None:
        self.shadow = {name: item.data.clone() for name, item in self.named_parameters()}

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        for name, item in self.named_parameters():
            self.shadow[name] = 0.5 * item.data + 0.5 * self.shadow[name]

    def on_validation_epoch_start(self) -> None:
        self.backup = {name: item.data for name, item in self.named_parameters()}
        for name, item in self.named_parameters():
            item.data = self.shadow[name]

    def on_validation_epoch_end(self) -> None:
        for name, item in self.named_parameters():
            item.data = self.backup[name]


class TellsSizes(TinyModule):
    """Counts whole parameters, and makes tensors that go with its slices."""

    def on_fit_start(self) -> None:
        self.average = {name: torch.zeros(item.shape) for name, item in self.named_parameters()}

    def on_after_backward(self) -> None:
        grads = [item.grad for item in self.parameters() if item.grad is not None]
        self.is_finite = all(torch.isfinite(grad).all() for grad in grads)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, item in self.named_parameters():
            if item.grad is not None:
                item.grad.div_(item.shape[0] * item.data.numel() ** 0.25)
            self.average[name].lerp_(item.detach(), 0.1)
            assert self.average[name].shape == item.shape

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.log("count", float(sum(item.numel() for item in self.parameters())))
        self.log("finite", float(self.is_finite))


class DrawsNoise(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for item in self.parameters():
            if item.grad is not None:
                item.grad += 0.1 * torch.randn(item.grad.shape)


class LogsScalar(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits * self.scale, labels)

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.log("scale", self.scale.exp())


class Gathers(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = super().loss(logits, labels)
        self.gathered = self.all_gather(loss.detach())
        return loss


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
