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


class TakesNorm(ToyModule):
    """Takes the norm of its parameters before the first step."""

    norm = 0.0

    def on_train_start(self) -> None:
        self.norm = norm_of(self)


def norm_of(module: torch.nn.Module) -> float:
    return float(torch.stack([p.detach().norm() for p in module.parameters()]).norm())


def print_of_run(rank: int, kind: str) -> tuple[str, float, float]:
    """Train and test two stages with a bar and a summary.

    Return what this rank printed, the norm of the whole parameters, and the one that a hook took.
    """
    bar, summary = BARS[kind]
    printed = io.StringIO()
    options: dict[str, Any] = quiet(devices=2, max_steps=2, callbacks=[bar(), summary()])
    options |= {"enable_progress_bar": True, "enable_model_summary": True}
    L.seed_everything(0, verbose=False)
    module = TakesNorm(ToyOptions())
    whole = norm_of(module)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        trainer = L.Trainer(strategy=HeteroStrategy(num_stages=2), **options)
        trainer.callbacks.append(RunMetrics())
        trainer.fit(module, loader(4, 2), loader(2, 2))
        trainer.test(module, loader(2, 2))
    return printed.getvalue(), whole, module.norm


@pytest.mark.dist
@pytest.mark.parametrize("kind", BARS)
def test_bars_and_tables_are_drawn_by_rank_0_without_control_characters(
    pool: ProcessPool, kind: str
) -> None:
    (first, whole, norm), (second, *_) = pool.run(print_of_run, 2, kind)
    assert norm == pytest.approx(whole), "that summaries counted parameters changes no norm"
    assert second == ""
    assert "Epoch 0" in first
    assert first.count("test_loss") == 1
    assert "\x1b[3" not in first, "colours in a log"
