"""Small training runs under a plan and on one device, for laws about losses, logs and outputs."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import HeteroError
from tests.runtime.runs import pipeline, plan_of, stage
from tests.toy import VOCABULARY, TokenRows, quiet

STAGES = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
COPIES = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3)))
PLANS = {"stages": STAGES, "copies": COPIES}
ROWS = 4
"""Of an iteration, over all pipelines."""


class Rows(TokenRows):
    """Rows with uneven numbers of targets; the first ones of every four have none."""

    def __init__(self, num_rows: int, num_empty: int = 0) -> None:
        super().__init__(num_rows)
        for row in range(num_empty):
            self.labels[row::ROWS] = -100


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TinyModule(L.LightningModule):
    """A subclass says what its loss is."""

    validates = False

    def __init__(self) -> None:
        super().__init__()
        self.model = Tiny()
        self.losses: list[float] = []

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        return self.loss(self.model(ids), labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


def strategy_ranks(plan: dict[str, Any]) -> tuple[int, ...]:
    return ParallelPlan.from_dict(plan).ranks


def fit(
    rank: int,
    make: Callable[[], TinyModule],
    plan: dict[str, Any] | None,
    num_empty: int = 0,
    options: dict[str, Any] | None = None,
    max_epochs: int = 2,
    accumulate: int = 1,
) -> dict[str, Any]:
    """Train and validate epochs of two iterations; returns what a rank knows then."""
    L.seed_everything(3, verbose=False)
    module = make()
    run: dict[str, Any] = {"devices": 1}
    if plan is not None:
        given = {"num_microbatches": 2, "whole_after_run": True, **(options or {})}
        strategy = HeteroStrategy(ParallelPlan.from_dict(plan), **given)
        run = {"strategy": strategy, "devices": len(strategy_ranks(plan))}
    batch_size = ROWS if plan is None else ROWS // len(plan["pipelines"])
    trainer = L.Trainer(
        **quiet(max_epochs=max_epochs, num_sanity_val_steps=0, use_distributed_sampler=False),
        accumulate_grad_batches=accumulate,
        **run,
    )
    loaders = [DataLoader(Rows(2 * ROWS, num_empty), batch_size=batch_size) for _ in range(2)]
    trainer.fit(module, *loaders[: 1 + module.validates])
    return {
        "losses": module.losses,
        "metrics": {name: float(item) for name, item in trainer.callback_metrics.items()},
        "weights": {name: item.numpy().copy() for name, item in module.state_dict().items()},
        "seen": getattr(module, "seen", None),
    }


def fit_each(
    rank: int, makes: list[Callable[[], TinyModule]], plan: Any, options: Any = None
) -> list[Any]:
    """Train several modules one after the other; the message of those that are refused."""
    results: list[Any] = []
    for make in makes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results.append(fit(rank, make, plan, options=options))
            except HeteroError as error:
                results.append(str(error))
    return results


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that a rank knows what one device knows."""
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-4, atol=1e-6)
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        np.testing.assert_allclose(found["metrics"][name], value, rtol=1e-4, err_msg=name)
    for name, value in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], value, rtol=1e-4, atol=1e-6)
