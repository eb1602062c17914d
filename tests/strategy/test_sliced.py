"""Behind a run: the module keeps its slices, and whatever works gives what one device gives."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import ConfigurationError
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.toy import TokenRows, ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist

OPTIONS = ToyOptions(tied=True, optimizer="sgd")
TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3), num_microbatches=2))
OTHER = plan_of(pipeline(stage(1, 0, 2), stage(0, 2, 3), num_microbatches=1))


def trainer_of(plan: dict[str, Any] | None, steps: int, **options: Any) -> L.Trainer:
    if plan is None:
        return L.Trainer(**quiet(devices=1, max_steps=steps))
    strategy = HeteroStrategy(plan=ParallelPlan.from_dict(plan), **options)
    return L.Trainer(strategy=strategy, **quiet(devices=2, max_steps=steps))


def go_on(rank: int, plan: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Fit, then do what users do with the same Trainer, and with another one."""
    torch.manual_seed(0)
    module, trainer = ToyModule(OPTIONS), trainer_of(plan, 3)
    trainer.fit(module, loader(32, 4))
    trainer.save_checkpoint(folder / f"fitted-{plan is None}.ckpt")
    found: dict[str, Any] = {
        "validated": trainer.validate(module, loader(8, 4, seed=1), verbose=False),
        "tested": trainer.test(module, loader(8, 4, seed=2), verbose=False),
        "predicted": torch.cat(trainer.predict(module, loader(8, 4, seed=2))).tolist(),
    }
    trainer.save_checkpoint(folder / f"tested-{plan is None}.ckpt", weights_only=True)
    copied = copy.deepcopy(module)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader(32, 4))
    other = trainer_of(None if plan is None else OTHER, 3)
    found["copy"] = other.test(copied, loader(8, 4, seed=2), verbose=False)
    found["losses"] = module.losses
    return found


def test_a_trainer_goes_on_behind_a_run_as_on_a_single_device(
    pool: ProcessPool, tmp_path: Path
) -> None:
    expected = pool.run(go_on, 1, None, tmp_path)[0]
    for found in pool.run(go_on, 2, TWO, tmp_path):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert len(found["losses"]) == 6
        assert found["predicted"] == expected["predicted"]
        for name in ("validated", "tested", "copy"):
            assert found[name][0] == pytest.approx(expected[name][0], rel=1e-4), name
    for name in ("fitted", "tested"):
        ours, plain = (
            torch.load(tmp_path / f"{name}-{is_plain}.ckpt", weights_only=True)["state_dict"]
            for is_plain in (False, True)
        )
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


USES: dict[str, Callable[[ToyModule], object]] = {
    "call": lambda module: module.model(TokenRows(1).ids),
    "state_dict": lambda module: module.state_dict(),
    "read": lambda module: float(module.model.wpe.sum()),
    "data": lambda module: module.model.wpe.data,
    "cast": lambda module: module.bfloat16(),
    "pickle": lambda module: torch.save(module, io.BytesIO()),
    "load": lambda module: module.load_state_dict(ToyModule(OPTIONS).state_dict()),
    "plain": lambda module: L.Trainer(**quiet(devices=1)).test(module, loader(4, 2)),
}


def use(rank: int, end: str) -> dict[str, str]:
    """Return what each use of a module behind its run says on this rank."""
    torch.manual_seed(0)
    module, trainer = ToyModule(OPTIONS), trainer_of(TWO, 2)
    if end == "failed":
        module.on_train_batch_end = _stop  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="enough"):
            trainer.fit(module, loader(32, 4))
    else:
        trainer.fit(module, loader(32, 4))
    said = {}
    for name, work in USES.items():
        with pytest.raises((ConfigurationError, RuntimeError)) as caught:
            work(module)
        said[name] = str(caught.value)
    # What asks for shapes only is answered for the whole.
    assert sum(p.numel() for p in module.parameters()) == sum(
        p.numel() for p in ToyModule(OPTIONS).parameters()
    )
    return said


def _stop(*_: Any) -> None:
    raise ValueError("enough")


@pytest.mark.parametrize("end", ["good", "failed"])
def test_a_use_of_values_behind_a_run_is_refused_by_name_with_the_remedy(
    pool: ProcessPool, end: str
) -> None:
    for said in pool.run(use, 2, end):
        for name, message in said.items():
            assert "Parameter model." in message, name
            assert "whole_state_dict" in message, name


def make_whole(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, trainer = ToyModule(ToyOptions(optimizer="sgd")), trainer_of(TWO, 2)
    trainer.fit(module, loader(32, 4))
    state = trainer.strategy.whole_state_dict()
    assert bool(state) == (rank == 0)
    if rank == 0:
        module.load_state_dict(state, assign=True)
        module.model(TokenRows(1).ids)
    with pytest.raises(ConfigurationError, match="some ranks only"):
        trainer.validate(module, loader(8, 4), verbose=False)
    torch.manual_seed(0)
    again, trainer = (
        ToyModule(ToyOptions(optimizer="sgd")),
        trainer_of(TWO, 2, whole_after_run=True),
    )
    trainer.fit(again, loader(32, 4))
    whole = {name: value.numpy() for name, value in again.state_dict().items()}
    for name, value in state.items():
        assert (value.numpy() == whole[name]).all()
    return whole


def test_whole_weights_are_given_to_rank_0_or_to_all(pool: ProcessPool) -> None:
    first, second = pool.run(make_whole, 2)
    for name, value in first.items():
        assert (value == second[name]).all()
