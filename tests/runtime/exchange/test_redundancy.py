"""With redundancy a plan trains the same, and every row is kept by two ranks, bit for bit alike."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.exchange.push import Push
from lightning_hetero.testing import EmulatedDevices
from tests.fits import Case, Outcome, fit, outcome_of, train
from tests.plans import COPIES, STAGES, TRIPLE, pipeline, plan_of, stage
from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.case_modules import RowsModule

pytestmark = pytest.mark.dist

Rows = tuple[str, str, int, int]
"""(parameter, "weight" or the key of a state, first row, last row + 1)"""
Disturb = Callable[[HeteroStrategy, int], None]
REDUNDANT = {"redundancy": 1, "standby_check_steps": 1}


@dataclass
class Kept:
    """What a rank has after each step, the last one's at the end."""

    outcome: Outcome | None = None
    standbys: tuple[int, ...] = ()
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
                if store.global_rank in item.ranks:
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
    kept = Kept()
    case = replace(case, options={**REDUNDANT, **case.options})
    with mock.patch.dict(os.environ, {"GROUP_RANK": nodes[rank]}):
        kept.outcome = outcome_of(train(case, Look(kept, disturb)))
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


def fit_refused(rank: int, case: Case, redundancy: tuple[int, ...], *callbacks: Any) -> str:
    """Return why a run is refused; ranks may differ in what they are told."""
    case = replace(case, options={"redundancy": redundancy[rank]})
    try:
        kind = NormsModule if case.optimizer == "norms" else RowsModule
        train(case, *callbacks, module=kind(case))
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


UNEQUAL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(2, 0, 1), stage(1, 1, 3)))
OTHER = plan_of(pipeline(stage(1, 0, 3)), pipeline(stage(0, 0, 2), stage(2, 2, 3)))
SHARDED = plan_of(pipeline(stage([0, 1], 0, 4)), pipeline(stage(2, 0, 3), stage(3, 3, 4)))
FOUR = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(4)))
COLLECTIVES = {"exchange": "collectives"}

CASES: dict[str, tuple[str, Disturb | None, dict[str, Any]]] = {
    "clipped, micro-batches in bf16": (
        "ab",
        None,
        {"plan": COPIES, "num_microbatches": 2, "precision": "bf16-mixed", "options": COLLECTIVES},
    ),
    # A ring of three: one rank keeps both ends of a parameter.
    "tied, accumulated, other plan": (
        "abc",
        RunsLater(OTHER),
        {"plan": UNEQUAL, "tied": True, "accumulate": 2, "num_rows": 32},
    ),
    "frozen, standbys that hold nothing": (
        "aa",
        None,
        {"plan": STAGES, "model": "adapted", "clip_val": None},
    ),
    "tensor parallel, most on one node": (
        "aaab",
        None,
        {"plan": SHARDED, "model": "packed", "num_layers": 4},
    ),
    "whole matrices": (
        "aab",
        None,
        {"plan": UNEQUAL, "optimizer": "muon", "ownership": "parameter", "clip_val": None},
    ),
    "collectives": ("aabb", None, {"plan": FOUR, "options": COLLECTIVES, "num_rows": 16}),
    "collectives in a ring": (
        "abc",
        None,
        {"plan": TRIPLE, "options": COLLECTIVES, "num_rows": 6, "clip_val": None},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_are_equal_bit_for_bit_and_train_as_one_device(pool: ProcessPool, name: str) -> None:
    nodes, disturb, features = CASES[name]
    case = Case(**{"clip_val": 0.05, **features})
    expected = pool.run_alone(fit, case.on_single_device())
    found: list[Kept] = pool.run(train_redundant, case.size, case, nodes, disturb)
    is_exact = case.precision == "32-true"
    for kept in found:
        np.testing.assert_allclose(
            kept.outcome.losses, expected.losses, rtol=1e-5 if is_exact else 2e-2
        )
    for weight, value in expected.weights.items() if is_exact else ():
        np.testing.assert_allclose(
            found[0].outcome.weights[weight], value, atol=1e-5 * np.abs(value).max(), err_msg=weight
        )
    owned = {rows: value for kept in found for rows, value in kept.owned.items()}
    assert sum(len(kept.owned) for kept in found) == len(owned), "a row has two owners"
    copies = {rows: value for kept in found for rows, value in kept.stood_by.items()}
    assert copies.keys() == owned.keys(), "a row has no standby"
    for rows, value in owned.items():
        np.testing.assert_array_equal(copies[rows], value, err_msg=str(rows))
    assert any(key != "weight" for _, key, _, _ in owned), "no state of the optimizer was compared"
    for rank, standby in enumerate(found[0].standbys):
        assert nodes[rank] != nodes[standby] or len(set(nodes)) == 1


@pytest.mark.parametrize("exchange", ["messages", "collectives"])
def test_nobody_steps_before_all_have_their_gradients(pool: ProcessPool, exchange: str) -> None:
    """Else a rank that is lost meanwhile leaves the others at different steps."""
    case = Case(plan=TRIPLE, world_size=3, num_rows=18, options={"exchange": exchange})
    found = pool.run(times_of_a_slow_push, 3, case, "abc")
    pushed, stepped = (np.array(times) for times in zip(*found, strict=True))
    assert pushed.shape[1] > 1
    assert (stepped.min(axis=0) >= pushed.max(axis=0)).all()


@pytest.mark.parametrize(
    "case",
    [
        Case(plan=UNEQUAL, world_size=3),
        # All weights are gathered, but not into what a standby keeps.
        Case(plan=TRIPLE, world_size=3, options=COLLECTIVES, num_rows=18),
    ],
    ids=["messages", "collectives"],
)
def test_a_changed_copy_is_found_and_named_on_every_rank(pool: ProcessPool, case: Case) -> None:
    with pytest.raises(ProcessFailed) as caught:
        pool.run(train_redundant, 3, case, "abc", change_a_standby)
    assert len(caught.value.failures) == 3
    for text in caught.value.failures.values():
        assert "StepError: After optimizer step 3" in text
        assert "of rank 0 on its standby 1" in text


NORMS = Case(plan=COPIES, world_size=2, optimizer="norms")
TOY = Case(plan=COPIES, world_size=2)
WHOLE = "Norms needs whole matrices: it steps the rows of a tensor otherwise"
FULL = "Rank 0 has 0.000126 GiB to use, but weights, gradients and states take"


@pytest.mark.parametrize(
    ("told", "given"),
    [
        (WHOLE, (NORMS, (1, 1))),
        ("not refused", (replace(NORMS, ownership="parameter"), (1, 1))),
        (FULL, (TOY, (1, 1), EmulatedDevices((1.0, 1.0), memory_bytes=150_000))),
        ("Ranks don't run the same", (TOY, (0, 1))),
    ],
)
def test_what_could_not_be_kept_twice_is_refused_on_every_rank(
    pool: ProcessPool, told: str, given: tuple[Any, ...]
) -> None:
    for text in pool.run(fit_refused, 2, *given):
        assert told in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"redundancy": 2}, "redundancy is 2; it must be 0, or 1"),
        ({"redundancy": 1, "exchange": "reduce-scatter"}, 'Use exchange="collectives"'),
        (
            {"owned_device": "disk"},
            "owned_device is 'disk'; it must be one of 'auto', 'device', 'cpu'",
        ),
    ],
)
def test_options_that_cannot_be_had_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HeteroStrategy(**options)
