"""`BackboneFinetuning` unfreezes the base of a model with adapters as on one device."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_hetero.callbacks import LayerwiseCheckpoint
from tests.fits import Outcome, assert_same, outcome_of, train
from tests.processes import ProcessPool
from tests.runtime.peft_runs import PeftCase, PeftModule
from tests.runtime.test_adapters import PLANS
from tests.toy import ADAM_EPS

pytest.importorskip("peft")

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

UNFREEZES = 1
"""The epoch that begins with it."""
NUM_EPOCHS = 4


class WithBackbone(PeftModule):
    """Names what `BackboneFinetuning` freezes: base layers that have adapters, or whole layers."""

    def __init__(self, case: "BackboneCase") -> None:
        super().__init__(case)
        self.is_whole = case.whole
        if case.whole:
            self.model.base_model.model.lm_head.requires_grad_(True)

    @property
    def backbone(self) -> nn.Module:
        layers = next(
            part
            for part in self.model.modules()
            if isinstance(part, nn.ModuleList) and len(part) == 4
        )
        if self.is_whole:
            return layers
        return nn.ModuleList(
            part.base_layer for part in layers.modules() if hasattr(part, "base_layer")
        )

    def configure_optimizers(self) -> Any:
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        return torch.optim.AdamW(trained, lr=0.02, eps=ADAM_EPS)


@dataclass(frozen=True, kw_only=True)
class BackboneCase(PeftCase):
    """A PEFT model whose base is unfrozen."""

    whole: bool = False
    """Whether whole layers are, with their adapters; if not, only what has adapters."""
    num_rows: int = 8
    max_steps: int = -1

    def module(self) -> Any:
        return WithBackbone(self)

    def weights_of(self, module: Any) -> Any:
        return dict(module.named_parameters())


class Notes(L.Callback):
    """Keeps each epoch's learning rates, and how many values this rank owns."""

    def __init__(self) -> None:
        self.owned: list[int] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        pl_module.seen = [*(pl_module.seen or []), rates]
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            self.owned.append(sum(item.numel() for item in engine.store.masters.values()))


def fit(
    rank: int,
    case: BackboneCase,
    num_epochs: int = NUM_EPOCHS,
    file: Path | None = None,
    folder: Path | None = None,
) -> tuple[Outcome, list[int]]:
    """Train a case, from a file if there is one, which else is written at the end.

    A folder is of layer-wise checkpoints, from the newest of which training goes on.
    """
    has_file = file is not None and file.exists()
    case = replace(case, max_epochs=num_epochs, ckpt_path=file if has_file else None)
    unfreeze = BackboneFinetuning(UNFREEZES, lambda_func=_double, backbone_initial_ratio_lr=0.1)
    callbacks: list[L.Callback] = [unfreeze, notes := Notes()]
    if folder is not None:
        callbacks += [LayerwiseCheckpoint(folder, every_n_train_steps=1, shared_memory=False)]
    module = train(case, *callbacks)
    if file is not None and not has_file:
        module.trainer.save_checkpoint(file)
    return outcome_of(module), notes.owned


def _double(epoch: int) -> float:
    return 2.0


ADAPTED = ["q_proj", "up_proj"]


def case_of(plan: str, *, whole: bool) -> BackboneCase:
    found = PLANS[plan]
    size, adapters = 4 // len(found["pipelines"]), {"target_modules": ADAPTED}
    return BackboneCase(plan=found, batch_size=size, adapters=adapters, whole=whole)


def check(found: Outcome, expected: Outcome) -> None:
    assert_same(found, expected)
    assert found.seen == expected.seen


@pytest.mark.parametrize(("plan", "whole"), [("stages", False), ("beside a copy", True)])
def test_the_base_trains_from_the_epoch_that_unfreezes_it(
    pool: ProcessPool, plan: str, *, whole: bool
) -> None:
    case = case_of(plan, whole=whole)
    expected, _ = pool.run_alone(fit, case.on_single_device())
    results = pool.run(fit, case.size, case)
    for found, _ in results:
        check(found, expected)
    owned = np.sum([owned for _, owned in results], axis=0)
    trained = [w.size for n, w in expected.weights.items() if any(p in n for p in ADAPTED)]
    assert owned[0] < owned[UNFREEZES] == owned[-1]
    assert whole or owned[-1] == sum(trained)


@pytest.mark.parametrize(("until", "whole"), [(UNFREEZES, False), (UNFREEZES + 1, True)])
def test_it_trains_on_from_a_file_as_plain_lightning_does(
    pool: ProcessPool, tmp_path: Path, until: int, *, whole: bool
) -> None:
    """Whose files don't say what was unfrozen: past that epoch the base stays as it is."""
    case = case_of("stages", whole=whole)
    alone = case.on_single_device()
    for file, size, each in ((tmp_path / "one", 1, alone), (tmp_path / "many", 2, case)):
        pool.run(fit, size, each, until, file)
    expected, _ = pool.run(fit, 1, alone, NUM_EPOCHS, tmp_path / "one")[0]
    for found, _ in pool.run(fit, 2, case, NUM_EPOCHS, tmp_path / "many"):
        check(found, expected)
    # A file of many ranks goes on in one, and the other way round, under another plan.
    check(pool.run(fit, 1, alone, NUM_EPOCHS, tmp_path / "many")[0][0], expected)
    other = case_of("beside a copy", whole=whole)
    for found, _ in pool.run(fit, 3, other, NUM_EPOCHS, tmp_path / "one"):
        check(found, expected)


def test_it_trains_on_from_layers_as_if_nothing_had_happened(
    pool: ProcessPool, tmp_path: Path
) -> None:
    until = UNFREEZES + 1
    case, other, one = (case_of(plan, whole=False) for plan in ("stages", "beside a copy", "one"))
    expected, _ = pool.run_alone(fit, case.on_single_device())
    for first, then in ((case, other), (other, one)):
        folder = tmp_path / f"{first.size}-{then.size}"
        pool.run(fit, first.size, first, until, None, folder)
        for found, _ in pool.run(fit, then.size, then, NUM_EPOCHS, None, folder):
            losses = expected.losses[: 2 * until] + found.losses
            check(replace(found, losses=losses, seen=expected.seen[:until] + found.seen), expected)
