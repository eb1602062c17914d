"""Hooks may put a slice elsewhere and change its rows one by one, but not mix or number them.

They may change what is frozen before training.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero import HeteroStrategy
from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.step_cases import COPIES, TinyModule, fit_each, same
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


class ReplacesData(ToyModule):
    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        for item in self.parameters():
            item.data = item.data / (1 + item.data.abs())


class ChangesFrozen(ToyModule):
    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        self.model.blocks[0].requires_grad_(False)

    def on_train_start(self) -> None:
        for item in self.model.blocks[0].parameters():
            item.mul_(0.5)


def losses_of(rank: int, make: Callable[..., ToyModule], plan: Any) -> list[float]:
    L.seed_everything(3, verbose=False)
    module, run = make(ToyOptions()), dict[str, Any](devices=1)
    if plan is not None:
        run = {"strategy": HeteroStrategy(plan, num_microbatches=2), "devices": 3}
    size = 12 // (1 if plan is None else len(plan["pipelines"]))
    trainer = L.Trainer(**quiet(max_epochs=1, num_sanity_val_steps=1), **run)
    trainer.fit(module, *[loader(48, size)] * 2)
    return module.losses


def leave_out(grad: Tensor) -> Any:
    mask = grad.new_ones(grad.shape[0], 1)
    mask[3] = 0
    return grad.mul_(mask)


class AlongRows(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad: Any = self.model.embed.weight.grad
        grad.mul_(torch.ones(1).repeat(grad.shape[0])[:, None]).add_(torch.zeros(grad.shape))
        grad.copy_(F.normalize(grad.flip(1).sort().values.cumsum(-1)).softmax(dim=1).roll(1, 1))


UNEQUAL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 1), stage(2, 1, 3)))
THREE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(3)))


@pytest.mark.parametrize(("make", "plan"), [(ReplacesData, UNEQUAL), (ChangesFrozen, THREE)])
def test_data_that_hooks_replace_is_what_travels(
    pool: ProcessPool, make: Callable[..., ToyModule], plan: dict[str, Any]
) -> None:
    (expected,) = pool.run(losses_of, 1, make, None)
    for found in pool.run(losses_of, 3, make, plan):
        assert found == pytest.approx(expected, rel=1e-4)


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "flip": lambda grad: grad.copy_(grad.flip(0)),
    "cumsum": lambda grad: grad.copy_(grad.cumsum(0)),
    "softmax": lambda grad: grad.copy_(grad.softmax(0)),
    "argsort": lambda grad: grad.copy_(grad.argsort(0)),
    "roll": lambda grad: grad.copy_(grad.roll(1)),
    "normalize": lambda grad: grad.copy_(F.normalize(grad, dim=0)),
    "tril": lambda grad: grad.tril_(),
    "t": lambda grad: grad.sub_(grad.T.mean(1)),
    "arange": lambda grad: grad.add_(torch.arange(grad.shape[0])[:, None]),
    "len": lambda grad: grad.div_(len(grad)),
    "eye": lambda grad: grad.add_(torch.eye(*grad.shape)),
    "setitem": leave_out,
    "repeat": lambda grad: grad.mul_(torch.eye(2, 6).repeat(grad.shape[0] // 2, 1)),
    "getitem": lambda grad: grad.mul_(torch.eye(99, 6)[: grad.shape[0]]),
}


def change_rows(rank: int) -> list[str]:
    found = []
    for change in MIXED.values():

        class Changes(TinyModule):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                change(self.model.embed.weight.grad)  # noqa: B023

        found += fit_each(rank, [Changes], COPIES)
    return found


def test_functions_that_mix_rows_or_go_by_their_places_are_refused(pool: ProcessPool) -> None:
    for messages in pool.run(change_rows, 2):
        for name, message in zip(MIXED, messages, strict=True):
            assert f"{name} is called on parameter" in message, name


def test_functions_along_rows_are_let_be(pool: ProcessPool) -> None:
    (expected,) = pool.run(fit_each, 1, [AlongRows], None)[0]
    for (found,) in pool.run(fit_each, 2, [AlongRows], COPIES):
        same(found, expected)
