"""Progress bars and tables are drawn once, by global rank 0, and plainly where no terminal is."""

import contextlib
import io
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)

from lightning_hetero import HeteroStrategy
from lightning_hetero.callbacks import RunMetrics
from tests.processes import ProcessPool
from tests.toy import ToyModule, ToyOptions, loader, quiet

BARS = {
    "rich": (RichProgressBar, RichModelSummary),
    "tqdm": (TQDMProgressBar, ModelSummary),
}


def print_of_run(rank: int, kind: str) -> str:
    """Train and test two stages with a bar and a summary; return what this rank printed."""
    bar, summary = BARS[kind]
    printed = io.StringIO()
    options: dict[str, Any] = quiet(devices=2, max_steps=2, callbacks=[bar(), summary()])
    options |= {"enable_progress_bar": True, "enable_model_summary": True}
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        trainer = L.Trainer(strategy=HeteroStrategy(num_stages=2), **options)
        trainer.callbacks.append(RunMetrics())
        module = ToyModule(ToyOptions())
        trainer.fit(module, loader(4, 2), loader(2, 2))
        trainer.test(module, loader(2, 2))
    return printed.getvalue()


class TakesNorm(ToyModule):
    """Takes the norm of its parameters before the first step."""

    norm = 0.0

    def on_train_start(self) -> None:
        self.norm = float(torch.stack([p.detach().norm() for p in self.parameters()]).norm())


def norms_after_summary(rank: int) -> tuple[float, float]:
    """Return the norm of the whole parameters, and that which a hook took after a summary."""
    L.seed_everything(0, verbose=False)
    module = TakesNorm(ToyOptions())
    whole = float(torch.stack([p.detach().norm() for p in module.parameters()]).norm())
    options = {**quiet(devices=2, max_steps=1), "enable_model_summary": True}
    L.Trainer(strategy=HeteroStrategy(num_stages=2), **options).fit(module, loader(4, 2))
    return whole, module.norm


@pytest.mark.dist
def test_hooks_get_whole_norms_after_a_summary_has_counted_parameters(pool: ProcessPool) -> None:
    for whole, found in pool.run(norms_after_summary, 2):
        assert found == pytest.approx(whole)


@pytest.mark.dist
@pytest.mark.parametrize("kind", BARS)
def test_bars_and_tables_are_drawn_by_rank_0_without_control_characters(
    pool: ProcessPool, kind: str
) -> None:
    first, second = pool.run(print_of_run, 2, kind)
    assert second == ""
    assert "Epoch 0" in first
    assert first.count("test_loss") == 1
    assert "\x1b[3" not in first, "colours in a log"
