"""Runs with redundancy that tests look into; in the processes of the pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.autoplan.facts import Emulation
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.exchange import even
from lightning_hetero.runtime.exchange.push import Push
from tests.runtime.runs import MODULES, SEED, Case, RowsModule
from tests.toy import quiet

Rows = tuple[str, str, int, int]
"""(parameter, "weight" or the key of a state, first row, last row + 1)"""
Disturb = Callable[[HeteroStrategy, int], None]


@dataclass
class Kept:
    """What a rank has after each step, the last one's at the end."""

    standbys: tuple[int, ...] = ()
    losses: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole ones, on rank 0."""
    owned: dict[Rows, np.ndarray] = field(default_factory=dict)
    stood_by: dict[Rows, np.ndarray] = field(default_factory=dict)


class Look(L.Callback):
    """Copies what the rank keeps after each step; then `disturb` does something."""

    def __init__(self, kept: Kept, disturb: Disturb | None) -> None:
        self.kept = kept
        self.disturb = disturb

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        with torch._C.DisableTorchFunction():  # Rows of slices are refused to hooks.
            self._look(trainer)

    def _look(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HeteroStrategy)
        store = strategy.engine.store
        self.kept.standbys = strategy.engine.config.standbys
        states = {p: s for o in trainer.optimizers for p, s in o.state.items()}
        for name, items in store.slices.items():
            master = store.masters[name]
            values = {"weight": master.detach(), **states.get(master, {})}
            like = {key: value for key, value in values.items() if value.shape == master.shape}
            for item in items:
                if store.global_rank in item.keepers:
                    is_own = item.owner == store.global_rank
                    into = self.kept.owned if is_own else self.kept.stood_by
                    for key, value in like.items():
                        rows = store.rows(name, value, item.start, item.stop)
                        into[name, key, item.start, item.stop] = bits_of(rows)
        if self.disturb is not None:
            self.disturb(strategy, trainer.global_step)


def bits_of(rows: Tensor) -> np.ndarray:
    return rows.float().contiguous().numpy().view(np.int32).copy()


def train_redundant(
    rank: int,
    case: Case,
    nodes: tuple[str, ...],
    disturb: Disturb | None = None,
) -> Kept:
    """Train a case, each rank on the node that it plays."""
    L.seed_everything(SEED, verbose=False)
    assert case.plan is not None
    strategy = HeteroStrategy(
        plan=ParallelPlan.from_dict(case.plan),
        num_microbatches=case.num_microbatches,
        ownership=case.ownership,
        **{"redundancy": 1, "standby_check_steps": 1, **dict(case.options)},
    )
    strategy.emulation = Emulation(node=nodes[rank])
    kept, module = Kept(), MODULES[case.model](case)
    trainer = L.Trainer(
        **quiet(callbacks=[Look(kept, disturb)], precision=case.precision),
        strategy=strategy,
        devices=case.world_size,
        max_epochs=case.max_epochs,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_val,
        gradient_clip_algorithm=case.clip_algorithm if case.clip_val else None,
        use_distributed_sampler=False,
    )
    # More than two pipelines are added by pairs, as hundreds are.
    with mock.patch.object(even, "_ADDED_IN_TURN", 2):
        trainer.fit(module)
    kept.losses = module.losses
    kept.weights = {
        name: value.float().numpy() for name, value in strategy.whole_state_dict().items()
    }
    return kept


def times_of_a_slow_push(
    rank: int, case: Case, nodes: tuple[str, ...]
) -> tuple[list[float], list[float]]:
    """Return when this rank has each step's gradients, and begins that step; rank 1 is late."""
    pushed, stepped = list[float](), list[float]()
    finish, deposit = Push.finish, HeteroStrategy.deposit_gradients

    def finish_late(push: Push) -> dict[str, Tensor]:
        sums = finish(push)
        if rank == 1:
            time.sleep(0.3)
        pushed.append(time.monotonic())
        return sums

    def deposit_noted(strategy: HeteroStrategy) -> None:
        stepped.append(time.monotonic())
        deposit(strategy)

    with (
        mock.patch.object(Push, "finish", finish_late),
        mock.patch.object(HeteroStrategy, "deposit_gradients", deposit_noted),
    ):
        train_redundant(rank, case, nodes)
    return pushed, stepped


class Norms(torch.optim.SGD):
    """Steps by the gradient's direction, so that a row's step depends on the others."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is not None and item.numel():
                    item.grad /= item.grad.norm() + 1e-6
        super().step()
        return loss


class NormsModule(RowsModule):
    def configure_optimizers(self) -> Any:
        return Norms(self.parameters(), lr=0.1)


def fit_refused(
    rank: int,
    case: Case,
    memory_bytes: tuple[int | None, ...],
    redundancy: tuple[int, ...],
) -> str:
    """Return why a run with redundancy is refused; ranks may differ in what they are told."""
    L.seed_everything(SEED, verbose=False)
    assert case.plan is not None
    strategy = HeteroStrategy(
        plan=ParallelPlan.from_dict(case.plan),
        redundancy=redundancy[rank],
        ownership=case.ownership,
        timeout=timedelta(seconds=60),
    )
    strategy.emulation = Emulation(memory_bytes=memory_bytes[rank])
    module = NormsModule(case) if case.optimizer == "norms" else RowsModule(case)
    options = quiet(max_epochs=1, devices=case.world_size)
    try:
        L.Trainer(strategy=strategy, use_distributed_sampler=False, **options).fit(module)
    except ConfigurationError as error:
        return str(error)
    return "not refused"


@dataclass(frozen=True)
class RunsLater:
    """Runs another plan after the first step."""

    plan: dict[str, Any]

    def __call__(self, strategy: HeteroStrategy, step: int) -> None:
        if step == 1:
            strategy.change_plan(ParallelPlan.from_dict(self.plan))


def change_a_standby(strategy: HeteroStrategy, step: int) -> None:
    """Change one value of what rank 1 keeps for another rank, after the second step."""
    store = strategy.engine.store
    if (store.global_rank, step) == (1, 2):
        name, item = next(
            (name, item)
            for name, items in store.slices.items()
            for item in items
            if item.standby == 1
        )
        rows = store.rows(name, store.masters[name].detach(), item.start, item.stop)
        # Not the last bit: the next step's rounding may take that away.
        rows.view(torch.int32).flatten()[0] ^= 1 << 16
