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


@dataclass
class Outcome:
    """What came out of one run on one rank."""

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    predictions: list[np.ndarray] = field(default_factory=list)
    refused: str | None = None
    """Type and message of the `HeteroError`; None if the run went through."""
    seen: set[str] = field(default_factory=set)
    """Kinds of step that had ended before the refusal."""


class ChangesPlan(Callback):
    """Asks for another plan after the second step."""

    def __init__(self, plan: ParallelPlan) -> None:
        self.plan = plan

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            strategy: Any = trainer.strategy
            strategy.change_plan(self.plan)


class Saves(Callback):
    """Writes a checkpoint when training has ended."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.file)


class Watches(Callback):
    """Notes metrics, and which kinds of step have ended."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, *_: Any) -> None:
        self.outcome.seen.add("train")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.outcome.seen.add("validate")


def run_on_plan(rank: int, recipe: Recipe, folder: str) -> Outcome:
    """Run the recipe on one rank of its plan; collective."""
    world_size = PLANS[recipe.plan][1]

    def trainer_options(recipe: Recipe) -> dict[str, Any]:
        strategy = HeteroStrategy(
            plan=_spending_memory(_plan(recipe.plan, world_size), recipe, world_size),
            ownership="auto" if recipe.owners == "shares" else recipe.owners,
            redundancy=recipe.redundancy,
            standby_check_steps=1,
            num_microbatches=recipe.num_microbatches,
            activation_checkpointing=recipe.recompute
            if recipe.recompute in ("full", "selective")
            else "none",
            activation_budget_bytes=BUDGET_BYTES if recipe.recompute == "budget" else None,
            timeout=TIMEOUT,
            tp_plan=TP_PLAN if recipe.is_tensor_parallel else None,
        )
        return {"strategy": strategy, "devices": world_size}

    outcome = Outcome()
    try:
        with mock.patch.object(split_check, "_DUE", frozenset({0, 1})):  # As in users' short runs.
            _run(recipe, trainer_options, outcome, Path(folder))
    except HeteroError as error:
        outcome.refused = f"{type(error).__name__}: {error}"
    return outcome


def run_alone(rank: int, recipe: Recipe, folder: str) -> Outcome:
    """Run the recipe on one device, by plain Lightning: the oracle."""
    outcome = Outcome()
    _run(recipe, lambda _: {"devices": 1}, outcome, Path(folder), is_oracle=True)
    return outcome


def _plan(name: str, world_size: int) -> ParallelPlan:
    plan, num_ranks = PLANS[name]
    assert plan is not None
    assert num_ranks <= world_size
    return ParallelPlan.from_dict(plan)


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


def _run(
    recipe: Recipe, trainer_options: Any, outcome: Outcome, folder: Path, *, is_oracle: bool = False
) -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumes = recipe.resumed_plan is not None
        first, last = folder / "first.ckpt", folder / "last.ckpt"
        run = Run(recipe, trainer_options, outcome, is_oracle=is_oracle)
        run.fit(epochs=1 if resumes else 2, saved=first if resumes else last)
        if resumes:
            later = replace(
                recipe,
                plan=recipe.resumed_plan,
                later_plan=None,
                redundancy=recipe.resumed_redundancy,
            )
            run = Run(later, trainer_options, outcome, is_oracle=is_oracle)
            run.fit(epochs=2, saved=last, ckpt_path=first)
        run.predict()
    state = torch.load(last, weights_only=False)["state_dict"]
    outcome.state = {name: value.float().numpy() for name, value in state.items()}


class Run:
    """One Trainer's life.

    Args:
        recipe: What is run.
        trainer_options: Given a recipe, the Trainer's options for it.
        outcome: Takes what comes out.
        is_oracle: Whether it runs on one device, with all pipelines' samples in a batch.
    """

    def __init__(
        self, recipe: Recipe, trainer_options: Any, outcome: Outcome, *, is_oracle: bool
    ) -> None:
        L.seed_everything(SEED, verbose=False)
        self.recipe = recipe
        self.options = trainer_options(recipe)
        self.outcome = outcome
        self.rows = ROWS if is_oracle else ROWS // recipe.num_pipelines
        by_micro_batch = is_oracle and recipe.dropout
        self.parts = recipe.num_microbatches * recipe.num_pipelines if by_micro_batch else 1
        self.module: FuzzedModule = (
            SeededModule(recipe, self.parts) if by_micro_batch else module_of(recipe)
        )
        self.callbacks: list[Callback] = [Watches(outcome)]
        if recipe.later_plan is not None and not is_oracle:
            self.callbacks.append(ChangesPlan(_plan(recipe.later_plan, PLANS[recipe.plan][1])))

    def fit(self, *, epochs: int, saved: Path, ckpt_path: Path | None = None) -> None:
        """Train, validate after each epoch, and write the last checkpoint to `saved`."""
        recipe = self.recipe
        self.trainer = L.Trainer(
            **quiet(callbacks=[*self.callbacks, Saves(saved)], max_epochs=epochs),
            **self.options,
            accumulate_grad_batches=self.parts if self.parts > 1 else recipe.accumulate,
            gradient_clip_val=recipe.clip_val,
            num_sanity_val_steps=recipe.seed % 2,
        )
        train = loader_of(recipe, STEPS_PER_EPOCH * ROWS, self.rows // self.parts)
        validate = loader_of(recipe, ROWS, self.rows)
        self.trainer.fit(self.module, train, validate, ckpt_path=ckpt_path, weights_only=True)
        self.outcome.losses += np.array(self.module.losses).reshape(-1, self.parts).sum(1).tolist()
        self.outcome.metrics = {
            name: float(value)
            for name, value in self.trainer.callback_metrics.items()
            if name in ("val_loss", "decoded", "measured", "hooked")
        }

    def predict(self) -> None:
        """Predict with the trained module."""
        found: Any = self.trainer.predict(self.module, loader_of(self.recipe, ROWS, self.rows))
        self.outcome.predictions = [item.numpy() for item in found or [] if item is not None]
