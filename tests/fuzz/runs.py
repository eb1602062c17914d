"""Run a recipe on one device by plain Lightning, or on a rank of its plan."""

import logging
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import HeteroError
from lightning_hetero.runtime.results import split_check
from tests.fuzz.modules import ROWS, SEED, FuzzedModule, SeededModule, loader_of, module_of
from tests.fuzz.recipes import PLANS, TP_PLAN, Recipe
from tests.toy import quiet

STEPS_PER_EPOCH = 3
TIMEOUT = timedelta(seconds=20)
BUDGET_BYTES = 40_000
"""Of activations: more than any recipe's layers need at least, less than most would keep."""
METRICS = ("val_loss", "decoded", "measured", "hooked")


@dataclass
class Outcome:
    """What came out of one run on one rank."""

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    """What the last checkpoint holds."""
    predictions: list[np.ndarray] = field(default_factory=list)
    refused: str | None = None
    """Type and message of the `HeteroError`; None if the run went through."""
    has_trained: bool = False
    """Whether a training step had ended before the refusal."""


class Follows(Callback):
    """Changes the plan after the second step, if there is another, and saves at the end."""

    def __init__(self, outcome: Outcome, later: ParallelPlan | None, file: Path) -> None:
        self.outcome, self.later, self.file = outcome, later, file

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.outcome.has_trained = True
        if trainer.global_step == 2 and self.later is not None:
            strategy: Any = trainer.strategy
            strategy.change_plan(self.later)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.file)


def run_on_plan(rank: int, recipe: Recipe, folder: str) -> Outcome:
    """Run the recipe on one rank of its plan; collective."""
    return _run(recipe, folder, PLANS[recipe.plan][1])


def run_alone(rank: int, recipe: Recipe, folder: str) -> Outcome:
    """Run the recipe on one device, with all pipelines' samples in a batch: the oracle."""
    return _run(recipe, folder, None)


def _run(recipe: Recipe, folder: str, world_size: int | None) -> Outcome:
    for name in ("", ".pytorch", ".fabric", ".pytorch.utilities.rank_zero"):
        logging.getLogger(f"lightning{name}").setLevel(logging.ERROR)
    outcome, first, last = Outcome(), Path(folder) / "first.ckpt", Path(folder) / "last.ckpt"
    # As in users' short runs.
    checks = mock.patch.object(split_check, "_DUE", frozenset({0, 1}))
    with warnings.catch_warnings(), checks:
        warnings.simplefilter("ignore")
        try:
            if recipe.resumed_plan is None:
                _train(recipe, outcome, world_size, 2, last)
            else:
                _train(recipe, outcome, world_size, 1, first)
                plan, redundancy = recipe.resumed_plan, recipe.resumed_redundancy
                recipe = replace(recipe, plan=plan, later_plan=None, redundancy=redundancy)
                _train(recipe, outcome, world_size, 2, last, first)
        except HeteroError as error:
            outcome.refused = f"{type(error).__name__}: {error}"
            return outcome
    state = torch.load(last, weights_only=False)["state_dict"]
    outcome.state = {name: value.float().numpy() for name, value in state.items()}
    return outcome


def _train(
    recipe: Recipe,
    outcome: Outcome,
    world_size: int | None,
    epochs: int,
    saved: Path,
    begins_at: Path | None = None,
) -> None:
    """Train up to an epoch, validate after each, save, and at the end predict."""
    alone = world_size is None
    L.seed_everything(SEED, verbose=False)
    rows = ROWS if alone else ROWS // recipe.num_pipelines
    # An oracle that draws what the strategy draws takes one micro-batch a batch.
    is_seeded = alone and recipe.dropout
    parts = recipe.num_microbatches * recipe.num_pipelines if is_seeded else 1
    module: FuzzedModule = SeededModule(recipe, parts) if is_seeded else module_of(recipe)
    later = None if alone or recipe.later_plan is None else _plan(recipe.later_plan)
    trainer = L.Trainer(
        **quiet(callbacks=[Follows(outcome, later, saved)], max_epochs=epochs),
        **({"devices": 1} if world_size is None else _strategy(recipe, world_size)),
        accumulate_grad_batches=parts if is_seeded else recipe.accumulate,
        gradient_clip_val=recipe.clip_val,
        num_sanity_val_steps=recipe.seed % 2,
    )
    loaders = (
        loader_of(recipe, STEPS_PER_EPOCH * ROWS, rows // parts),
        loader_of(recipe, ROWS, rows),
    )
    trainer.fit(module, *loaders, ckpt_path=begins_at, weights_only=True)
    outcome.losses += np.array(module.losses).reshape(-1, parts).sum(1).tolist()
    metrics = trainer.callback_metrics
    outcome.metrics = {name: float(metrics[name]) for name in METRICS if name in metrics}
    if begins_at is not None or recipe.resumed_plan is None:
        found: Any = trainer.predict(module, loader_of(recipe, ROWS, rows))
        outcome.predictions = [item.numpy() for item in found or [] if item is not None]


def _strategy(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """Return the Trainer's options for the recipe's plan."""
    is_level = recipe.recompute in ("full", "selective")
    strategy = HeteroStrategy(
        plan=_spending_memory(_plan(recipe.plan), recipe, world_size),
        ownership="auto" if recipe.owners == "shares" else recipe.owners,
        redundancy=recipe.redundancy,
        standby_check_steps=1,
        num_microbatches=recipe.num_microbatches,
        activation_checkpointing=recipe.recompute if is_level else "none",
        activation_budget_bytes=BUDGET_BYTES if recipe.recompute == "budget" else None,
        timeout=TIMEOUT,
        tp_plan=TP_PLAN if recipe.is_tensor_parallel else None,
    )
    return {"strategy": strategy, "devices": world_size}


def _plan(name: str) -> ParallelPlan:
    return ParallelPlan.from_dict(PLANS[name][0])


def _spending_memory(plan: ParallelPlan, recipe: Recipe, world_size: int) -> ParallelPlan:
    """Return the plan with what a recipe says of recomputation, owners and micro-batches' sizes."""
    data = plan.to_dict()
    for pipeline in data["pipelines"]:
        for stage in pipeline["stages"]:
            first, end = stage["layers"]
            if recipe.recompute in ("first layers", "some selectively"):
                stage["recomputed_layers"] = 1
            if recipe.recompute == "some selectively":
                stage["selective_layers"] = end - first - 1
    if recipe.unequal_sizes:
        data["pipelines"][0]["microbatch_size"] = 3
    if recipe.owners == "shares":
        data["owner_shares"] = list(range(1, world_size + 1))
    return ParallelPlan.from_dict(data)
