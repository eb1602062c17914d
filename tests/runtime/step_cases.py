"""Modules that are trained under plans and on one device, to compare what each rank knows then.

The harness of all laws about steps, layers, hooks and logs: a law is a module, `check` holds it to
what one device has, and `refused` to the words by which every rank refuses it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import HeteroError
from tests.plans import COPIES, STAGES, Plan, size_of
from tests.processes import ProcessPool
from tests.toy import VOCABULARY, TokenRows, quiet

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


class Compared(L.LightningModule):
    """What the harness asks of a module: how it is trained, and what it has seen."""

    iteration_rows = ROWS
    layers_at: str | None = None
    """The strategy's `layers`."""
    validates = 0
    """How many validation sets there are."""
    predicts = False
    """What it then predicts is what it has seen."""
    seen: Any = None
    """Numbers, or lists of them, that a rank must know, too."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def rows(self, num_empty: int) -> Dataset[Any]:
        return Rows(2 * ROWS, num_empty)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


class TinyModule(Compared):
    """A subclass says what its loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Tiny()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        return self.loss(self.model(ids), labels)


Make = Callable[[], Compared]


class TakesTurns(L.Callback):
    """Changes the plan after each iteration."""

    def __init__(self, *plans: Plan) -> None:
        self.plans = [ParallelPlan.from_dict(plan) for plan in plans]

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        plan = self.plans[trainer.global_step % len(self.plans)]
        trainer.strategy.change_plan(plan)  # type: ignore[attr-defined]


def train(
    make: Make,
    plan: Plan | None,
    *,
    num_empty: int = 0,
    parts: int = 1,
    evaluates: bool = False,
    later: Plan | None = None,
    options: Mapping[str, Any] | None = None,
    ckpt_path: Any = None,
    **trainer: Any,
) -> Any:
    """Train a module on one of a plan's ranks, for two epochs of the rows that it has.

    Args:
        make: Makes the module.
        plan: None for one device.
        num_empty: Rows of four without targets.
        parts: Batches that one device makes of an iteration, for losses of a micro-batch.
        evaluates: Validates instead.
        later: A plan for every second iteration.
        options: Of the strategy.
        ckpt_path: The checkpoint that training begins with.
        trainer: Options of the Trainer.
    """
    L.seed_everything(3, verbose=False)
    module, num_batches = make(), parts
    run: dict[str, Any] = {"devices": 1, "accumulate_grad_batches": parts}
    if plan is not None:
        given = {"num_microbatches": 2, "whole_after_run": True, "layers": module.layers_at}
        parsed, num_batches = ParallelPlan.from_dict(plan), len(plan["pipelines"])
        strategy = HeteroStrategy(parsed, **{**given, **(options or {})})
        run = {"strategy": strategy, "devices": size_of(plan)}
        run["callbacks"] = [] if later is None else [TakesTurns(plan, later)]
    defaults = {"max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    made = L.Trainer(**{**quiet(**defaults), **run, **trainer})
    size = module.iteration_rows // num_batches
    loaders = [DataLoader(module.rows(num_empty), batch_size=size) for _ in range(2)]
    if evaluates:
        made.validate(module, loaders[1], verbose=False)
    else:
        validation = loaders[1:] * module.validates or None
        made.fit(module, loaders[0], validation, ckpt_path=ckpt_path, weights_only=False)
    if module.predicts:
        found = [item for item in made.predict(module, loaders[1]) if item is not None]
        module.seen = torch.cat(found).tolist()
    module.losses = np.reshape(module.losses, (-1, 1 if plan else parts)).sum(1).tolist()
    return module


def known_of(module: Compared) -> dict[str, Any]:
    """Return what a rank knows of a module that it has trained."""
    metrics = module.trainer.callback_metrics
    return {
        "losses": module.losses,
        "metrics": {name: float(item) for name, item in metrics.items()},
        "weights": {n: item.float().numpy().copy() for n, item in module.state_dict().items()},
        "seen": module.seen,
    }


def fit(rank: int, make: Make, plan: Plan | None, how: Mapping[str, Any] | None = None) -> Any:
    """Train a module as `train` does; return what the rank knows then."""
    return known_of(train(make, plan, **(how or {})))


def fit_each(rank: int, makes: Sequence[Make], plan: Plan | None, how: Any = None) -> list[Any]:
    """Train several modules one after the other; return the error of those that are refused."""
    results: list[Any] = []
    for make in makes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results.append(fit(rank, make, plan, how))
            except HeteroError as error:
                results.append(f"{type(error).__name__}: {error}")
    return results


def warnings_of(rank: int, make: Make, plan: Plan, how: Mapping[str, Any]) -> str:
    """Return all that a rank is warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(rank, make, plan, how)
    return "\n".join(str(item.message) for item in told)


def check(
    pool: ProcessPool, makes: Sequence[Make], *plans: Plan, rtol: float = 1e-4, **how: Any
) -> list[list[Any]]:
    """Check that each rank of each plan knows of each module what one device knows."""
    alone = {name: value for name, value in how.items() if name not in ("options", "later")}
    expected = pool.run_alone(fit_each, makes, None, alone)
    for plan in plans:
        found = pool.run(fit_each, size_of(plan), makes, plan, {**how, "parts": 1})
        for make, single, *ranks in zip(makes, expected, *found, strict=True):
            for item in ranks:
                assert isinstance(item, dict), (make, plan, item)
                same(item, single, rtol, f"{make} under {plan}")
    return found


def refused(pool: ProcessPool, told: Mapping[Make, str], *plans: Plan, **how: Any) -> None:
    """Check that every rank of each plan refuses each module by these words, parted by dots."""
    for plan in plans:
        for make, words in told.items():
            # One at a time: what one rank alone refuses has ended only with the others' sockets.
            how = {"max_epochs": 1, **how}
            for (message,) in pool.run(fit_each, size_of(plan), [make], plan, how):
                for part in words.split(" … "):
                    assert part in str(message), (make, plan, message)


def same(found: Any, expected: Any, rtol: float = 1e-4, what: str = "") -> None:
    """Check that a rank knows what one device knows."""
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol, 1e-6, err_msg=what)
    assert found["metrics"].keys() == expected["metrics"].keys(), what
    for kind in ("metrics", "weights"):
        for name, value in expected[kind].items():
            text, atol = f"{name} of {what}", 1e-6 if kind == "weights" else 0.0
            np.testing.assert_allclose(found[kind][name], value, rtol, atol, err_msg=text)
    same_seen(found["seen"], expected["seen"], rtol, what)


def same_seen(found: Any, expected: Any, rtol: float, what: str) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected), what
        for one, other in zip(found, expected, strict=True):
            same_seen(one, other, rtol, what)
    elif expected is not None:
        np.testing.assert_allclose(found, expected, rtol, 1e-6, err_msg=what)
