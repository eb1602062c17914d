"""The one harness of runs: ranks of a plan train a case, and know what one device knows.

A *case* says what is trained, by which plan, and how. `fit(rank, case)` trains it in a process of
the pool and returns an `Outcome`. `check` compares each rank's with that of one device, which
trains a case once a session; `refused` looks for words in the error of every rank.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import HeteroError
from lightning_hetero.runtime.slices import wholes
from tests.plans import Plan, size_of
from tests.processes import ProcessPool
from tests.runtime import case_modules, toy_lm
from tests.toy import Compared, quiet

SEED = 11
TOLERANCE = 1e-5
LEAST = 1e-3
FEW_BYTES = 2_000
"""Gathered at a time, so that whole weights come in several messages."""
MODULES = case_modules.MODULES | {"toy": toy_lm.ToyLMModule, "unknown id": toy_lm.UnknownToken}

Make = Callable[[], Compared]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained and how; without a plan, on a single device."""

    model: str | Make = "gpt"
    """A name of `MODULES`, whose sizes follow; or what makes a module."""
    num_layers: int = 3
    width: int = 16
    tied: bool = False
    optimizer: str = "adamw"
    num_rows: int = 12
    plan: Plan | None = None
    later: tuple[Plan, ...] = ()
    """Plans that the run changes to after its first iteration, second, and so on."""
    world_size: int | None = None
    """By default as many ranks as the plan names."""
    batch_size: int | None = 2
    """Rows of each pipeline; None cuts the module's `iteration_rows`."""
    num_empty: int = 0
    """Rows of four without targets."""
    parts: int = 1
    """Batches that one device makes of an iteration, for losses of a micro-batch."""
    num_microbatches: int | None = None
    ownership: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    """More options of the strategy."""
    accumulate: int = 1
    clip_val: float | None = None
    clip_algorithm: str = "norm"
    max_epochs: int = 1
    max_steps: int = -1
    precision: str = "32-true"
    accelerator: str = "cpu"
    evaluates: bool = False
    """Validates instead."""
    data: Callable[[], L.LightningDataModule] | None = None
    """What makes a data module, instead of the module's own rows."""
    ckpt_path: Any = None
    """The checkpoint that training begins with."""
    seed: int = SEED
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """More options of the Trainer."""

    @property
    def num_pipelines(self) -> int:
        if self.plan is None:
            return self.size // self.options.get("num_stages", self.size)
        return len(self.plan["pipelines"])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.world_size or (1 if self.plan is None else size_of(self.plan))

    def on_single_device(self) -> "Case":
        """The same run without a plan: its batch is what all pipelines' batches are together."""
        batch_size = self.batch_size and self.batch_size * self.num_pipelines
        nothing: dict[str, Any] = {"plan": None, "later": (), "world_size": 1, "options": {}}
        return replace(self, batch_size=batch_size, precision="32-true", **nothing)

    def module(self) -> Any:
        """Make the module."""
        return MODULES[self.model](self) if isinstance(self.model, str) else self.model()

    def weights_of(self, module: Any) -> Mapping[str, Tensor]:
        """Return what is compared of a module that was trained."""
        found: Mapping[str, Tensor] = module.state_dict()
        return found

    def strategy(self, module: Any) -> dict[str, Any]:
        """Return the Trainer's options for the plan, or for one that the strategy makes."""
        if self.size == 1 and self.plan is None:
            return {"devices": 1, "accumulate_grad_batches": self.accumulate * self.parts}
        plan = None if self.plan is None else ParallelPlan.from_dict(self.plan)
        given = {
            "plan": plan,
            "num_microbatches": self.num_microbatches,
            "ownership": self.ownership,
            "whole_after_run": True,
            "layers": module.layers_at,
        }
        strategy = HeteroStrategy(**{**given, **self.options})
        found = {"strategy": strategy, "devices": self.size}
        return found | {"accumulate_grad_batches": self.accumulate}


@dataclass(kw_only=True)
class Outcome:
    """What a rank knows after a run."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    logged: dict[str, float]
    seen: Any
    """Of `Compared`."""
    num_steps: int
    parameter_bytes: list[int]
    """After each iteration."""
    held: list[str]
    """Parameters of which the rank holds compute weights at the end."""
    own_bytes: dict[str, int]
    """Bytes of the rank's slice of each parameter."""
    peak_in_flight: int


class Watch(L.Callback):
    """Looks at the engine while it is there, and runs the case's later plans."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.parameter_bytes: list[int] = []
        self.held: list[str] = []
        self.own_bytes: dict[str, int] = {}
        self.peak_in_flight = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not isinstance(trainer.strategy, HeteroStrategy):
            return
        engine = trainer.strategy.engine
        shards = engine.plans.running.weights.shards
        held = (*engine.store.masters.values(), *shards.values())
        tensors = [item for item in held if not hasattr(item, "__tensor_flatten__")]
        self.held = sorted(shards)
        # Hooks are told counts of the whole.
        with torch._C.DisableTorchFunction():
            self.own_bytes = {
                name: item.numel() * item.element_size()
                for name, item in engine.store.masters.items()
            }
            # Slices that are views of compute weights share their storage.
            storages = {s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, tensors)}
            self.parameter_bytes.append(sum(storages.values()))
        self.peak_in_flight = engine.peak_in_flight
        if 0 < trainer.global_step <= len(self._case.later):
            plan = self._case.later[trainer.global_step - 1]
            trainer.strategy.change_plan(ParallelPlan.from_dict(plan))


def train(case: Case, *callbacks: L.Callback, module: Any = None) -> Any:
    """Train a case in this process, or a module that is there; return the module."""
    L.seed_everything(case.seed, verbose=False)
    module = case.module() if module is None else module
    watch = Watch(case)
    options: dict[str, Any] = {"max_epochs": case.max_epochs, "max_steps": case.max_steps}
    options["accelerator"] = case.accelerator
    if "plugins" not in case.trainer:
        options["precision"] = case.precision
    options["num_sanity_val_steps"] = 0
    if case.clip_val is not None:
        clipping = {"gradient_clip_algorithm": case.clip_algorithm}
        options |= {"gradient_clip_val": case.clip_val, **clipping}
    given = dict(case.trainer)
    options["callbacks"] = [watch, *callbacks, *given.pop("callbacks", ())]
    options["enable_checkpointing"] = any(isinstance(item, Checkpoint) for item in callbacks)
    made = L.Trainer(
        **{**quiet(**options), **case.strategy(module), **given}, use_distributed_sampler=False
    )
    with mock.patch.multiple(wholes, _AT_ONCE=FEW_BYTES, _OF_EACH_RANK=FEW_BYTES):
        _run(made, module, case)
    module.case, module.watch = case, watch
    return module


def _run(trainer: L.Trainer, module: Any, case: Case) -> None:
    how = {"ckpt_path": case.ckpt_path, "weights_only": False}
    if case.data is not None:
        trainer.fit(module, datamodule=case.data(), **how)
        return
    parts = case.parts if case.plan is None else 1
    size = case.batch_size or module.iteration_rows // (case.num_pipelines * parts)
    loaders = [
        module.loader(module.rows(case.num_empty), batch_size=size, collate_fn=module.collate)
        for _ in range(2)
    ]
    if case.evaluates:
        trainer.validate(module, loaders[1], verbose=False)
    else:
        validation = loaders[1:] * int(module.validates) or None
        trainer.fit(module, loaders[0], validation, **how)
    if module.predicts:
        found = [item for item in trainer.predict(module, loaders[1]) or () if item is not None]
        module.seen = torch.cat(found).tolist()
    module.losses = np.reshape(module.losses, (-1, parts)).sum(1).tolist()


def outcome_of(module: Any) -> Outcome:
    """Return what a rank knows of a module that it has trained."""
    trainer, watch = module.trainer, module.watch
    found = {name: item.detach() for name, item in module.case.weights_of(module).items()}
    weights = {name: item.float().cpu().numpy().copy() for name, item in found.items()}
    return Outcome(
        losses=module.losses,
        weights=weights,
        logged={name: float(value) for name, value in trainer.callback_metrics.items()},
        seen=module.seen,
        num_steps=trainer.global_step,
        parameter_bytes=watch.parameter_bytes,
        held=watch.held,
        own_bytes=watch.own_bytes,
        peak_in_flight=watch.peak_in_flight,
    )


def fit(rank: int, case: Case) -> Outcome:
    """Train a case on one of its ranks."""
    return outcome_of(train(case))


def attempt(rank: int, *cases: Case) -> list[Outcome | str]:
    """Train cases one after the other; return the error of each one that is refused.

    An index out of range is the user's, as on one device; any other error is a defect.
    """
    found: list[Outcome | str] = []
    for case in cases:
        try:
            found.append(fit(rank, case))
        except (HeteroError, IndexError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def warnings_of(rank: int, case: Case) -> str:
    """Train a case on one of its ranks; return all that the rank is warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(case)
    return "\n".join(str(item.message) for item in told)


def each(makes: Iterable[Make], *plans: Plan | None, **how: Any) -> list[Case]:
    """Return two epochs of each module under each plan; `how` may have options of the Trainer."""
    given: dict[str, Any] = {"batch_size": None, "max_epochs": 2, "num_microbatches": 2}
    own = {name: how.pop(name) for name in list(how) if name in Case.__dataclass_fields__}
    given |= own | {"trainer": how}
    return [Case(model=make, plan=plan, **given) for plan in plans for make in makes]


def check(pool: ProcessPool, *cases: Case, rtol: float = TOLERANCE) -> list[list[Outcome]]:
    """Check that each rank trains each case as one device does; return outcomes by case, rank."""
    found: list[list[Outcome]] = []
    for size, group in groupby(cases, lambda case: case.size):
        some = list(group)
        for case, *ranks in zip(some, *pool.run(attempt, size, *some), strict=True):
            expected = pool.run_alone(fit, case.on_single_device())
            trains = len(set(expected.losses)) == len(expected.losses) > 0
            assert trains or case.evaluates or case.num_empty, "the oracle doesn't train"
            for outcome in ranks:
                assert isinstance(outcome, Outcome), (case, outcome)
                assert_same(outcome, expected, rtol, f"{case.model} under {case.plan}")
            found.append(ranks)
    return found


def refused(pool: ProcessPool, told: Mapping[Make, str], *plans: Plan, **how: Any) -> None:
    """Check that every rank of each plan refuses each module by these words, parted by dots."""
    for make, words in told.items():
        for case in each([make], *plans, **{"max_epochs": 1, **how}):
            check_refused(pool, case, *words.split(" … "))


def check_refused(pool: ProcessPool, case: Case, *words: str) -> None:
    """Check that every rank refuses a case by some words.

    Alone, since what one rank refuses has ended only with the others' sockets.
    """
    for (message,) in pool.run(attempt, case.size, case):
        for part in words:
            assert part in str(message), (case.model, case.plan, message)


def assert_same(found: Outcome, expected: Outcome, rtol: float = TOLERANCE, what: str = "") -> None:
    """Check that a rank knows what one device knows."""
    assert found.num_steps == expected.num_steps, what
    np.testing.assert_allclose(found.losses, expected.losses, rtol, 1e-6, err_msg=what)
    assert found.logged.keys() == expected.logged.keys(), what
    for name, value in expected.logged.items():
        np.testing.assert_allclose(found.logged[name], value, rtol, err_msg=f"{name} of {what}")
    assert_same_weights(found.weights, expected.weights, rtol, what)
    _assert_same_seen(found.seen, expected.seen, rtol, what)


def _assert_same_seen(found: Any, expected: Any, rtol: float, what: str) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected), what
        for one, other in zip(found, expected, strict=True):
            _assert_same_seen(one, other, rtol, what)
    elif expected is not None:
        np.testing.assert_allclose(found, expected, rtol, 1e-6, err_msg=what)


def assert_same_weights(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    tolerance: float = TOLERANCE,
    what: str = "",
) -> None:
    """Check that weights differ by at most a share of each tensor's largest, or of `LEAST`.

    A key's bias has no gradient but rounding: what is left of it is nothing beside the weights.
    """
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        scale = max(np.abs(value).max(initial=0.0), LEAST)
        difference = np.abs(found[name] - value).max(initial=0.0)
        assert difference <= tolerance * scale, f"{name}: {difference:.2e} of {scale:.2e}; {what}"


def assert_same_bits(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Check that ranks have the same losses and weights in two runs, bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses
        assert one.logged == other.logged
        assert one.weights.keys() == other.weights.keys()
        for name, weight in other.weights.items():
            assert np.array_equal(one.weights[name], weight), name
