"""A plan may change between iterations: losses go on as if it hadn't, and nothing of it is left."""

import ctypes
import gc
import multiprocessing
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from resource import getpagesize
from statistics import median
from typing import Any

import lightning as L
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import ConfigurationError, PlanError
from tests.fits import Case, Outcome, assert_same, assert_same_bits, outcome_of, train
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.case_modules import RowsModule
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist

LOOK_EVERY = 10
MOST_GROWN_MB = 4.0
"""Of 100 changes. Between two looks a process differs by up to 1 MB without any leak."""


def parsed(*pipelines: dict[str, Any]) -> ParallelPlan:
    return ParallelPlan.from_dict(plan_of(*pipelines))


PLANS = [
    parsed(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 1), stage(2, 1, 3))),
    parsed(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 2), stage(2, 2, 3))),
    parsed(pipeline(stage(0, 0, 3)), pipeline(stage(2, 0, 2), stage(1, 2, 3))),
    # Other pipelines for the ranks, other numbers of micro-batches, an idle rank, one pipeline.
    parsed(
        pipeline(stage(2, 0, 3), num_microbatches=1),
        pipeline(stage(0, 0, 1), stage(1, 1, 3), num_microbatches=3),
    ),
    parsed(*(pipeline(stage(rank, 0, 3), num_microbatches=(2, 0, 1)[rank]) for rank in range(3))),
    parsed(pipeline(stage(1, 0, 3))),
    parsed(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 3), num_microbatches=4)),
    # A rank that runs two stages.
    parsed(
        pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(1, 2, 3), num_microbatches=2),
        pipeline(stage(2, 0, 3), num_microbatches=1),
    ),
]


class ChangesPlan(L.Callback):
    """Asks for another plan after every iteration, and freezes or thaws a parameter."""

    def __init__(self, plans: list[ParallelPlan], freeze_every: int = 5) -> None:
        self.plans, self.freeze_every = plans, freeze_every
        self.ran: list[ParallelPlan] = []
        self.expected: dict[int, ParallelPlan] = {}
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.left = Left()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self._look(strategy.engine.plans.running.weights.shards)
        step = trainer.global_step
        if step % self.freeze_every == 0:
            module.model.ln_f.requires_grad_(step // self.freeze_every % 2 == 0)
        self.ran.append(strategy.plan)
        if len(self.plans) > 1:
            plan = self.plans[step % len(self.plans)]
            self.expected[len(self.ran) + strategy.change_plan(plan)] = plan
        if step % LOOK_EVERY == 0:
            gc.collect()
            self.left.resident_mb.append(resident_mb())

    def _look(self, shards: dict[str, torch.Tensor]) -> None:
        """Count shards and gradients of earlier plans that are still there."""
        held = [*shards.values(), *(s.grad for s in shards.values() if s.grad is not None)]
        known = {id(tensor) for tensor in held}
        alive = [tensor for item in self.tensors if (tensor := item()) is not None]
        if len(self.plans) > 1:
            num_left = sum(id(tensor) not in known for tensor in alive)
            self.left.most_alive = max(self.left.most_alive, num_left)
        self.tensors = [weakref.ref(tensor) for tensor in held]


@dataclass
class Left:
    """What a run of many changes has left on one rank."""

    most_alive: int = 0
    """Shards and gradients of earlier plans, at most, that were there after an iteration."""
    alive_behind: int = 0
    """The same of all plans behind the run."""
    resident_mb: list[float] = field(default_factory=list)
    """Memory of the process, every so many changes."""

    @property
    def grown_mb(self) -> float:
        """Twice what lies between the medians of the first half of the looks and of the second."""
        half = len(self.resident_mb) // 2
        return 2 * (median(self.resident_mb[half:]) - median(self.resident_mb[:half]))


def resident_mb() -> float:
    ctypes.CDLL(None).malloc_trim(0)  # What is free in the allocator isn't held by anybody.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * getpagesize() / 2**20


@dataclass
class Found:
    outcome: Outcome
    num_plans: int
    left: Left


class Rows(RowsModule):
    validates = 1


class RowsByWorker(Rows):
    loader = partial(StatefulDataLoader, num_workers=1)


def fit(
    rank: int, plans: list[ParallelPlan], kind: Any, freeze_every: int = 5, **how: Any
) -> Found:
    # The pool's processes are daemons, which may have no children such as a loader's workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    changes = ChangesPlan(plans, freeze_every)
    given = {"num_rows": 48, "batch_size": 4, "num_microbatches": 2, "max_epochs": 2, **how}
    case = Case(plan=plans[0].to_dict(), world_size=3, **given)
    gc.disable()  # A cycle would be there until Python looks for it, one through torch for ever.
    try:
        module = train(replace(case, model=partial(kind, case)), changes)
    finally:
        gc.enable()
    for iteration, plan in changes.expected.items():
        assert iteration >= len(changes.ran) or changes.ran[iteration] == plan
    changes.left.alive_behind = sum(item() is not None for item in changes.tensors)
    return Found(outcome_of(module), len({str(plan) for plan in changes.ran}), changes.left)


def run(pool: ProcessPool, plans: list[ParallelPlan], kind: Any = Rows, **how: Any) -> list[Found]:
    return pool.run(partial(fit, **how), 3, plans, kind)


def check(ranks: list[Found], still: Outcome, least: int) -> None:
    for found in ranks:
        # Asked for again before it runs, a plan may be passed over.
        assert found.num_plans >= least
        assert_same(found.outcome, still)
        assert (found.left.most_alive, found.left.alive_behind) == (0, 0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_losses_and_weights_do_not_depend_on_changes_of_plan(pool: ProcessPool) -> None:
    still, tied = (run(pool, PLANS[:1], tied=tied)[0].outcome for tied in (False, True))
    changed = run(pool, PLANS)
    check(changed, still, len(PLANS))
    check(run(pool, PLANS, options={"exchange": "collectives"}), still, len(PLANS))
    check(run(pool, PLANS, RowsByWorker, tied=True), tied, 3)
    # Runs that change plans alike are equal bit for bit.
    again = run(pool, PLANS)
    assert_same_bits(*([item.outcome for item in found] for found in (changed, again)))


@pytest.mark.slow
def test_changes_of_plan_leave_memory_flat(pool: ProcessPool) -> None:
    """A leak is seen: a plan's weights are 0.3 MB of a process, 33 MB after 100 changes."""
    how = {"width": 64, "num_rows": 400, "freeze_every": 1000}
    run(pool, PLANS, **how)  # Until caches have what they need.
    for found in run(pool, PLANS, **how):
        assert found.left.most_alive == 0
        assert found.left.grown_mb <= MOST_GROWN_MB


class PairModule(ToyModule):
    """Trains on the first of two loaders' batches."""

    def __init__(self) -> None:
        super().__init__(ToyOptions())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


def refuse(rank: int, plan: ParallelPlan, num_loaders: int) -> str:
    trainer = L.Trainer(
        strategy=HeteroStrategy(plan=PLANS[0]),
        callbacks=[ChangesPlan([plan, plan])],
        **quiet(devices=3, max_steps=2),
    )
    loaders: Any = {"a": loader(64, 4), "b": loader(64, 4)} if num_loaders == 2 else loader(64, 4)
    with pytest.raises(PlanError if num_loaders == 1 else ConfigurationError) as caught:
        trainer.fit(PairModule() if num_loaders == 2 else ToyModule(ToyOptions()), loaders)
    return str(caught.value)


def test_a_plan_that_does_not_fit_is_refused(pool: ProcessPool) -> None:
    for message in pool.run(refuse, 3, parsed(pipeline(stage(0, 0, 2))), 1):
        assert "layers" in message
    for message in pool.run(refuse, 3, PLANS[3], 2):
        assert "2 loaders at once" in message
