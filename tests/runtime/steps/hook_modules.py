"""Modules whose hooks do something to weights and gradients."""

import copy
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero import own_rows
from tests.toy import VOCABULARY, Tiny, TinyModule


class ClipsByHand(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.01))
        self.log("after", nn.utils.get_total_norm([item.grad for item in self.parameters()]))


class ClipsGreatest(TinyModule):
    """Clips after backward by another norm, and one part of the model only."""

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.model.layers.parameters(), 0.01, norm_type=torch.inf)
        nn.utils.clip_grad_value_(self.model.head.parameters(), 0.02)


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
        for order in (2, 1, "inf"):
            self.log_dict(grad_norm(self, norm_type=order), on_epoch=order == 1)
        own = grad_norm(self.model.head, norm_type=2, group_separator="_")
        self.log_dict({f"head_{name}": norm for name, norm in own.items()}, prog_bar=True)


class LogsChangedNorms(TinyModule):
    """Looks at gradients before and after it has changed them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        before = grad_norm(self, norm_type=2)
        for item in self.model.layers.parameters():
            item.grad.data.mul_(0.5)
        self.model.head.weight.grad = self.model.head.weight.grad * 0.25
        self.log_dict({f"before_{name}": norm for name, norm in before.items()})
        self.log_dict(grad_norm(self, norm_type=2))


class LogsEachNorm(TinyModule):
    """Computes norms as forums teach it, and other numbers of whole parameters."""

    def on_after_backward(self) -> None:
        total = 0.0
        for item in self.parameters():
            if item.grad is not None:
                total += item.grad.detach().data.norm(2).item() ** 2
        self.log("total", total**0.5)
        grads = [item.grad for item in self.parameters() if item.grad is not None]
        self.log("stacked", torch.norm(torch.stack([torch.norm(grad, 2) for grad in grads])))
        self.log("flat", torch.cat([grad.flatten() for grad in grads]).norm())
        self.log("is_finite", float(all(torch.isfinite(grad).all() for grad in grads)))

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        grads = [item.grad for item in self.parameters() if item.grad is not None]
        self.log("left", torch.stack([item.square().sum() for item in grads]).sum().sqrt())
        for name, item in self.named_parameters():
            self.log(f"mean_{name}", item.detach().mean())
            self.log(f"std_{name}", item.std())
            self.log(f"most_{name}", item.data.abs().max())
            self.log(f"columns_{name}", item.norm(dim=0).sum())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("before", self.model.head.weight.norm())

    def on_train_epoch_end(self) -> None:
        weights = torch.cat([item.detach().flatten() for item in self.model.head.parameters()])
        self.log("head", weights.square().sum().sqrt())


class TrainsNewRows(TinyModule):
    """Trains the last rows of a table only, as of new tokens."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        table = self.model.embed.weight
        table.grad[own_rows(table) < VOCABULARY - 8] = 0
        self.log_dict(grad_norm(self, norm_type=2))

    def configure_optimizers(self) -> Any:
        assert (own_rows(self.model.embed.weight) < VOCABULARY).all()
        return super().configure_optimizers()


class ZeroesOldRows(TinyModule):
    """The same by rows' numbers, without a look at whether there are gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.model.embed.weight.grad[:-8] = 0.0
        self.model.embed.weight.grad[-1] *= 0.5


class LeavesOut(TinyModule):
    """Has a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("grads", float(sum(item.grad is not None for item in self.parameters())))
        self.log_dict(grad_norm(self, norm_type=2))


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


class FollowsTeacher(TinyModule):
    """A mean teacher: its outputs are those of an average of all weights, which a hook keeps."""

    layers_at = "model.layers"

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        with torch.no_grad():
            wanted = self.teacher(ids)
        return self.loss(self.model(ids) + wanted, labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            for own, other in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
                other.mul_(0.5).add_(own, alpha=0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.2)


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


class Gathers(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = super().loss(logits, labels)
        self.gathered = self.all_gather(loss.detach())
        return loss


class ReplacesData(TinyModule):
    """Gives every parameter other data between two steps, as some optimizers and callbacks do."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        for item in self.parameters():
            item.data = item.data / (1 + item.data.abs())


class LoadsParts(TinyModule):
    """Takes stored weights of parts of its model, which are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = [copy.deepcopy(Tiny().state_dict()) for _ in range(2)]

    def on_fit_start(self) -> None:
        self.model.load_state_dict(self.stored[0])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            own = {
                f"0.0.{name}": self.stored[1][f"layers.0.0.{name}"] for name in ("weight", "bias")
            }
            self.model.layers.load_state_dict(own, strict=False)
            self.model.head.load_state_dict({"bias": self.stored[1]["head.bias"]}, strict=False)


class AlongRows(TinyModule):
    """Uses functions that go along the rows of a slice."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad: Any = self.model.embed.weight.grad
        grad.mul_(torch.ones(grad.shape[0])[:, None]).add_(torch.zeros(grad.shape))
        grad.copy_(F.normalize(grad.flip(1).sort().values.cumsum(-1)).softmax(dim=1).roll(1, 1))


class BySize(TinyModule):
    """Groups and learning rates that depend on the sizes of parameters, of which one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head.weight = self.model.embed.weight

    def configure_optimizers(self) -> Any:
        ordered = sorted(self.parameters(), key=lambda p: (p.numel(), tuple(p.shape)))
        groups = [
            {
                "params": [p],
                "lr": 0.5 / (p.shape[0] + len(p)),
                "momentum": 0.9 if p.numel() > 40 else 0.0,
                "weight_decay": 0.1 if p.ndim == 2 else 0.0,
            }
            for p in ordered
        ]
        return torch.optim.SGD(groups, lr=0.1)


class ByNorm(TinyModule):
    """A learning rate that depends on values of a parameter."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 / float(self.model.embed.weight.norm()))


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


class NormsOfColumns(TinyModule):
    """Its second matrices are cut by columns, and as wide in a slice as they are high."""

    dim = 0

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(3))
        self.model.layers = nn.ModuleList(layers)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for layer in self.model.layers:
            grad = layer[2].weight.grad
            grad.div_(grad.norm(dim=self.dim, keepdim=True) + 0.5)
            grad[:2] *= 0.6


class NormsOfRows(NormsOfColumns):
    dim = 1
