"""Training runs that tests compare: one case under a plan, or the same on a single device.

`train` runs in the processes of the pool and returns plain data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.runtime.slices import wholes
from tests.processes import ProcessPool
from tests.runtime import case_modules, toy_lm
from tests.runtime.case_modules import SEED, Case, Recorded
from tests.toy import quiet

TOLERANCE = 1e-5
FEW_BYTES = 2_000
"""Gathered at a time, so that whole weights come in several messages."""
MODULES = case_modules.MODULES | {"toy": toy_lm.ToyLMModule, "unknown id": toy_lm.UnknownToken}


@dataclass
class Outcome:
    """What a rank knows after a run."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    logged: dict[str, float]
    parameter_bytes: list[int]
    """After each iteration."""
    held: list[str]
    """Parameters of which the rank holds compute weights at the end."""
    own_bytes: dict[str, int]
    """Bytes of the rank's slice of each parameter."""
    peak_in_flight: int
    batches_seen: int


def train(rank: int, case: Case) -> Outcome:
    """Train a case on one of its ranks."""
    L.seed_everything(SEED, verbose=False)
    return fit(MODULES[case.model](case), case)


def refusal(rank: int, case: Case) -> str:
    """Return the error with which a case is refused on a rank."""
    try:
        train(rank, case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def check(pool: ProcessPool, case: Case) -> list[Outcome]:
    """Check that each rank trains a case as a single device does."""
    expected = pool.run_alone(train, case.on_single_device())
    assert len(set(expected.losses)) == len(expected.losses) > 0, "the oracle doesn't train"
    outcomes = pool.run(train, case.world_size, case)
    for outcome in outcomes:
        assert_same_training(outcome, expected)
    return outcomes


def assert_same_training(found: Outcome, expected: Outcome) -> None:
    assert found.batches_seen == expected.batches_seen
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)
    assert found.logged.keys() == expected.logged.keys()
    for name, value in expected.logged.items():
        np.testing.assert_allclose(found.logged[name], value, rtol=TOLERANCE, err_msg=name)
    assert_same_weights(found.weights, expected.weights)


def assert_same_weights(
    found: dict[str, Any],
    expected: dict[str, Any],
    tolerance: float = TOLERANCE,
    least: float = 0.0,
) -> None:
    """Check that weights differ by at most a share of each tensor's largest, or of `least`.

    A key's bias has no gradient but rounding: what is left of it is nothing beside the weights.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(np.abs(value).max(), least)
        difference = np.abs(found[name] - value).max()
        assert difference <= tolerance * scale, f"{name}: {difference:.2e} of {scale:.2e}"


def assert_same_bits(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Check that ranks have the same losses and weights in two runs, bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses
        assert one.logged == other.logged
        assert one.weights.keys() == other.weights.keys()
        for name, weight in other.weights.items():
            assert np.array_equal(one.weights[name], weight), name


def fit(module: Recorded, case: Case, *callbacks: L.Callback, ckpt_path: Any = None) -> Outcome:
    """Train a case's module; on ranks of its plan it is whole behind the run."""
    watch = Watch()
    how = {"precision": case.precision, "accelerator": case.accelerator}
    trainer = L.Trainer(
        **quiet(callbacks=[watch, *callbacks], **how),
        **_strategy(case),
        max_epochs=case.max_epochs,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_val,
        gradient_clip_algorithm=case.clip_algorithm if case.clip_val else None,
        use_distributed_sampler=False,
    )
    with mock.patch.multiple(wholes, _AT_ONCE=FEW_BYTES, _OF_EACH_RANK=FEW_BYTES):
        trainer.fit(module, ckpt_path=ckpt_path)
    return Outcome(
        losses=module.losses,
        weights={name: value.float().cpu().numpy() for name, value in module.state_dict().items()},
        logged={name: float(value) for name, value in trainer.callback_metrics.items()},
        parameter_bytes=watch.parameter_bytes,
        held=watch.held,
        own_bytes=watch.own_bytes,
        peak_in_flight=watch.peak_in_flight,
        batches_seen=trainer.global_step,
    )


def _strategy(case: Case) -> dict[str, Any]:
    if case.plan is None:
        return {"devices": 1}
    strategy = HeteroStrategy(
        plan=ParallelPlan.from_dict(case.plan),
        num_microbatches=case.num_microbatches,
        ownership=case.ownership,
        whole_after_run=True,
        **dict(case.options),
    )
    return {"strategy": strategy, "devices": case.world_size}


class Watch(L.Callback):
    """Looks at the engine while it is there."""

    def __init__(self) -> None:
        self.parameter_bytes: list[int] = []
        self.held: list[str] = []
        self.own_bytes: dict[str, int] = {}
        self.peak_in_flight = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, HeteroStrategy):
            engine = trainer.strategy.engine
            shards = engine.plans.running.weights.shards
            tensors = (*engine.store.masters.values(), *shards.values())
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
