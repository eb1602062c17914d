"""Wrong modules, plans and batches are told on every rank; nobody waits for who is lost."""

import os
import signal
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from tests.fits import Make, check_refused, each, fit, refused
from tests.plans import UNEQUAL, Plan, pipeline, plan_of, stage
from tests.processes import SILENT, ProcessFailed, ProcessPool
from tests.toy import Compared, TinyModule, TokenRows, ToyModule, ToyOptions

pytestmark = pytest.mark.dist


class Returns(TinyModule):
    """Returns what is no loss with gradients, or computes one without the model."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.what == "no call":
            return self.model.head.weight.sum()
        loss = super().training_step(batch, batch_idx)
        if self.what == "two calls":
            return loss + super().training_step(batch, batch_idx)
        return {"nothing": None, "a dict": {"accuracy": loss}, "detached": loss.detach()}[self.what]


class Manual(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(TinyModule):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class MasksGradients(TinyModule):
    """One device would train only some rows of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        next(self.parameters()).register_hook(lambda gradient: gradient * 0)


class MasksGradientsLater(TinyModule):
    def on_train_start(self) -> None:
        next(self.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


class NoLayers(Compared):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(torch.randn(2, 4)).sum()


TOLD: dict[Make, str] = {
    partial(Returns, "nothing"): "training_step returned None",
    partial(Returns, "a dict"): "training_step returned dict; it must return the loss",
    partial(Returns, "two calls"): "calls the model twice",
    partial(Returns, "no call"): "without calling the model's layers",
    partial(Returns, "detached"): "loss without gradients",
    Manual: "needs automatic optimization",
    OwnBackward: "overrides backward",
    MasksGradients: "has a gradient hook",
    MasksGradientsLater: "has a gradient hook",
    NoLayers: "has no list of layers",
}


def test_bad_modules_are_a_clear_error_on_every_rank(pool: ProcessPool) -> None:
    refused(pool, TOLD, UNEQUAL)


class RaggedRows(TokenRows):
    def __getitem__(self, index: int) -> Any:
        return self.ids[index], self.labels[index][: 1 + index % 2]


class Ragged(TinyModule):
    def rows(self, num_empty: int) -> Any:
        return RaggedRows(64)

    @staticmethod
    def collate(rows: list[Any]) -> Any:
        return torch.stack([row[0] for row in rows]), torch.cat([row[1] for row in rows])


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (UNEQUAL, "can't be cut into micro-batches"),
        (plan_of(pipeline(stage(7, 0, 3))), "names rank 7 but 3"),
        (plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(0, 0, 3))), "Name each rank once"),
        (plan_of(pipeline(stage(0, 0, 1), stage(1, 2, 3))), "skips layers"),
        (plan_of(pipeline(stage(0, 0, 5))), "the model has 3"),
    ],
)
def test_wrong_plans_and_ragged_batches_are_a_clear_error_on_every_rank(
    pool: ProcessPool, plan: Plan, told: str
) -> None:
    check_refused(pool, each([Ragged], plan, world_size=3)[0], told)


class Struck(ToyModule):
    """One of its ranks raises, dies, or stops as a paused machine does, at some moment."""

    def __init__(self, how: str, struck: int, moment: str) -> None:
        super().__init__(ToyOptions())
        self.how, self.struck, self.moment = how, struck, moment

    def strike_at(self, moment: str) -> None:
        if moment == self.moment and self.global_rank == self.struck:
            if self.how == "raises":
                raise ValueError("a bug of the user's")
            # A stopped process keeps its connections, and answers nothing.
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stops" else signal.SIGKILL)

    def setup(self, stage: str) -> None:
        self.strike_at("set-up")

    def configure_model(self) -> None:
        self.strike_at("model")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.strike_at("step")
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.strike_at("end")


def failures_beside(pool: ProcessPool, how: str, struck: int, moment: str) -> dict[int, str]:
    """Return how ranks failed, apart from one that is stopped."""
    failures: dict[int, str] = {}
    frozen = struck if how == "stops" else None
    timeout = timedelta(seconds=3 if how == "stops" else 30)
    options = {"timeout": timeout, "whole_after_run": how == "raises"}
    case = each([partial(Struck, how, struck, moment)], UNEQUAL, max_epochs=1, options=options)[0]
    try:
        # Seconds are enough; a machine under load gets more. Without an end it would be for ever.
        pool.run(fit, 3, case, timeout_s=60.0, frozen=frozen)
    except ProcessFailed as error:
        failures = error.failures
    assert SILENT not in failures.values()
    return failures


@pytest.mark.parametrize("moment", ["model", "step", "end"])
def test_all_ranks_name_the_rank_that_raised(pool: ProcessPool, moment: str) -> None:
    failures = failures_beside(pool, "raises", 2, moment)
    assert sorted(failures) == [0, 1, 2]
    assert all("ValueError: a bug of the user's" in text for text in failures.values())


def test_survivors_name_the_rank_that_was_killed(pool: ProcessPool) -> None:
    failures = failures_beside(pool, "dies", 2, "step")
    assert failures[2] == "the process died"
    for rank in (0, 1):
        assert "PeerError" in failures[rank]
        assert "Rank 2 died or stopped answering" in failures[rank]


@pytest.mark.parametrize(
    ("struck", "moment"),
    [
        (0, "step"),  # It serves the store.
        pytest.param(0, "set-up", marks=pytest.mark.slow),
        pytest.param(0, "end", marks=pytest.mark.slow),
        pytest.param(1, "step", marks=pytest.mark.slow),
        pytest.param(2, "step", marks=pytest.mark.slow),
        pytest.param(2, "set-up", marks=pytest.mark.slow),
    ],
)
def test_whichever_rank_freezes_whenever_the_others_end(
    pool: ProcessPool, struck: int, moment: str
) -> None:
    """They may as well end as if nothing was wrong where it has trained."""
    failures = failures_beside(pool, "stops", struck, moment)
    assert moment == "end" or len(failures) == 2
