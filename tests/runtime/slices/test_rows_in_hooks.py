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
from lightning_hetero.core.errors import StepError
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


def losses_of(rank: int, make: Callable[..., ToyModule], plan: Any) -> list[float]:
    L.seed_everything(3, verbose=False)
    module, run = make(ToyOptions()), dict[str, Any](devices=1)
    if plan is not None:
        run = {"strategy": HeteroStrategy(plan, num_microbatches=2), "devices": 3}
    size = 12 // (1 if plan is None else len(plan["pipelines"]))
    trainer = L.Trainer(**quiet(max_epochs=1, num_sanity_val_steps=1), **run)
    trainer.fit(module, *[loader(48, size)] * 2)
    return module.losses


class AlongRows(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad: Any = self.model.embed.weight.grad
        grad.mul_(torch.ones(grad.shape[0])[:, None]).add_(torch.zeros(grad.shape))
        grad.copy_(F.normalize(grad.flip(1).sort().values.cumsum(-1)).softmax(dim=1).roll(1, 1))


UNEQUAL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 1), stage(2, 1, 3)))
THREE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(3)))


def test_data_that_hooks_replace_is_what_travels(pool: ProcessPool) -> None:
    (expected,) = pool.run(losses_of, 1, ReplacesData, None)
    for found in pool.run(losses_of, 3, ReplacesData, UNEQUAL):
        assert found == pytest.approx(expected, rel=1e-4)


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda grad: grad @ grad.T,
    "setitem": lambda grad: grad.__setitem__(3, 0.0),
    "getitem": lambda grad: grad[:2],
    "numpy": lambda grad: grad.detach().cpu().numpy(),
    "prod": lambda grad: grad.prod(),
    "median": lambda grad: grad.median(),
    "split": lambda grad: grad.split(2),
    "tolist": lambda grad: grad.tolist(),
    "matrix_norm": lambda grad: torch.linalg.matrix_norm(grad),
}


class MixesRows(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = []
        for change in MIXED.values():
            try:
                change(self.model.embed.weight.grad)
            except StepError as error:
                self.seen.append(str(error))


def test_functions_that_mix_rows_or_go_by_their_places_are_refused(pool: ProcessPool) -> None:
    for (found,) in pool.run(fit_each, 2, [MixesRows], COPIES):
        for name, message in zip(MIXED, found["seen"], strict=True):
            assert f"{name} is called on parameter" in message, name


def test_functions_along_rows_are_let_be(pool: ProcessPool) -> None:
    (expected,) = pool.run(fit_each, 1, [AlongRows], None)[0]
    for (found,) in pool.run(fit_each, 2, [AlongRows], COPIES):
        same(found, expected)
