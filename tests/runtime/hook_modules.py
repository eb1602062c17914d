"""Modules whose hooks do something to weights and gradients."""

import copy
import io
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.runtime.step_cases import TinyModule


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
