"""Mistakes of the first hour: refused early, and in words that say what to do."""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import ConfigurationError, PlanError
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.toy import ToyModule, ToyOptions, loader, quiet


class UnknownTokens(ToyModule):
    """Its tokenizer knows more tokens than its model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        return super().training_step((ids + 5 * (ids == ids.max()), labels), batch_idx)


class AssertsOnDevice(ToyModule):
    """Plays what CUDA says of an index outside of a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")


class DifferentiatesByAnother(ToyModule):
    """What torch says to a gradient penalty, if another stage has the input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.autograd.grad(self.loss(batch), torch.zeros(1, requires_grad=True))


def fit(module: ToyModule, rows: DataLoader[Any]) -> None:
    options = quiet(max_steps=4, devices=1, strategy=HeteroStrategy(plan=None))
    L.Trainer(**options).fit(module, rows)


@pytest.mark.filterwarnings("ignore")
def test_rows_that_an_embedding_does_not_have_are_explained() -> None:
    with pytest.raises(IndexError) as caught:
        fit(UnknownTokens(ToyOptions()), loader(8, 4))
    assert "an embedding has no row for" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="device-side assert") as failed:
        fit(AssertsOnDevice(ToyOptions()), loader(8, 4))
    assert "a label that the logits have no class for" in failed.value.__notes__[0]


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_by_what_another_stage_computes_is_explained() -> None:
    with pytest.raises(RuntimeError, match="used in the graph") as caught:
        fit(DifferentiatesByAnother(ToyOptions()), loader(8, 4))
    assert "only by what the last stage computes" in caught.value.__notes__[0]


class WithoutOptimizer(ToyModule):
    """Trains nothing, as plain Lightning lets it."""

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore")
def test_a_module_without_an_optimizer_is_saved_and_goes_on(tmp_path: Path) -> None:
    options = quiet(max_steps=1, devices=1, enable_checkpointing=True, default_root_dir=tmp_path)
    for path in (None, tmp_path / "saved.ckpt"):
        trainer = L.Trainer(**options, strategy=HeteroStrategy(plan=None))
        trainer.fit(WithoutOptimizer(ToyOptions()), loader(8, 4), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")


def test_a_strategy_belongs_to_one_trainer() -> None:
    with pytest.raises(ConfigurationError, match="num_stages is 0; it must be 1 or more"):
        HeteroStrategy(num_stages=0)
    options = quiet(max_steps=4, devices=1, strategy=HeteroStrategy(plan=None))
    L.Trainer(**options)
    with pytest.raises(ConfigurationError, match="belongs to another Trainer"):
        L.Trainer(**options)


def test_what_cannot_run_on_the_devices_is_refused_before_processes_start() -> None:
    plan = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 1), stage(2, 1, 3)))
    with pytest.raises(PlanError, match="names rank 2 but 2 processes run"):
        L.Trainer(**quiet(devices=2, strategy=HeteroStrategy(ParallelPlan.from_dict(plan))))
    with pytest.raises(PlanError, match="3 processes can't be split"):
        L.Trainer(**quiet(devices=3, strategy=HeteroStrategy(num_stages=2)))


def test_a_plan_is_taken_as_the_dictionary_that_its_json_holds() -> None:
    plan = plan_of(pipeline(stage(0, 0, 3)))
    L.Trainer(**quiet(devices=1, strategy=HeteroStrategy(plan)))
    with pytest.raises(PlanError, match="Did you mean ranks"):
        HeteroStrategy({"pipelines": [{"stages": [{"rank": [0], "layers": [0, 3]}]}]})
    with pytest.raises(ConfigurationError, match="plan is of type int; give a ParallelPlan"):
        HeteroStrategy(3)  # type: ignore[arg-type]


def test_no_script_to_run_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(ConfigurationError, match='start_method="fork"'):
        L.Trainer(**quiet(devices=2, strategy=HeteroStrategy()))
    L.Trainer(**quiet(devices=2, strategy=HeteroStrategy(start_method="fork")))
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigurationError, match="a notebook"):
        L.Trainer(**quiet(devices=1, strategy=HeteroStrategy()))


class Counts(ModelSummary):
    """Keeps what it would print."""

    def summarize(self, summary_data: Any, total_parameters: int, *_: Any, **__: Any) -> None:
        self.total = total_parameters


def summarize(rank: int, plan: dict[str, Any]) -> tuple[int, list[str]]:
    counts = Counts()
    strategy = HeteroStrategy(ParallelPlan.from_dict(plan))
    options = quiet(max_steps=1, devices=2, strategy=strategy, callbacks=[counts])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        L.Trainer(**options | {"enable_model_summary": True}).fit(
            ToyModule(ToyOptions()), loader(8, 4)
        )
    return getattr(counts, "total", 0), [str(item.message) for item in caught]


@pytest.mark.dist
def test_the_summary_is_whole_and_an_idle_rank_is_warned_of(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage(1, 0, 3)))
    (total, caught), _ = pool.run(summarize, 2, plan)
    module = ToyModule(ToyOptions())
    assert total == sum(item.numel() for item in torch.nn.ModuleList([module]).parameters())
    assert any("ranks [0] no layers: 1 of 2 devices are idle, 50%" in text for text in caught)
