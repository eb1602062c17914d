"""What can't train as on one device is refused, with what to do instead."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, ThroughputMonitor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import CheckpointError, ConfigurationError, ModelError
from lightning_hetero.runtime.ranks.communicators import check_queues
from lightning_hetero.strategy.steps import explained
from lightning_hetero.strategy.trainable import check_trainable
from tests.plans import pipeline, plan_of, stage
from tests.toy import VOCABULARY, ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_as_a_whole_is_refused(*, in_place: bool) -> None:
    module: Any = ToyModule(ToyOptions())
    if in_place:
        module.model.compile()
    else:
        module.model = torch.compile(module.model)
    trainer = L.Trainer(**quiet(), strategy=HeteroStrategy(), devices=1)
    with pytest.raises(ConfigurationError, match=r"model is compiled.*compile_layers=True"):
        trainer.fit(module, loader(4, 2))


@pytest.mark.filterwarnings("ignore")
def test_a_callback_that_masks_whole_parameters_is_refused() -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.3)
    trainer = L.Trainer(**quiet(callbacks=[pruning]), strategy=HeteroStrategy(), devices=1)
    with pytest.raises(ConfigurationError, match="ModelPruning masks whole parameters"):
        trainer.fit(ToyModule(ToyOptions()), loader(4, 2))


def test_a_callback_that_counts_ranks_as_copies_is_warned_of() -> None:
    monitor = ThroughputMonitor(batch_size_fn=len)
    with pytest.warns(UserWarning, match="ThroughputMonitor takes each rank for a copy"):
        check_trainable(ToyModule(ToyOptions()), [monitor])


def test_an_attribute_that_only_another_stage_sets_is_explained() -> None:
    memory: Any = SimpleNamespace(explaining=lambda **_: nullcontext())
    nothing: Any = nullcontext
    with (
        pytest.raises(TypeError) as caught,
        explained(nothing, memory, nothing, trains=False),
    ):
        sum([None])  # type: ignore[list-item]
    assert "only the stage that runs the layer" in caught.value.__notes__[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scale_grad_by_freq": True}, "model.wte has scale_grad_by_freq.* each micro-batch"),
        ({"sparse": True}, "model.wte makes sparse gradients"),
    ],
)
def test_gradients_that_aren_t_sums_of_dense_ones_are_refused(
    options: dict[str, bool], told: str
) -> None:
    module = ToyModule(ToyOptions())
    module.model.wte = torch.nn.Embedding(VOCABULARY, 16, **options)
    trainer = L.Trainer(**quiet(), strategy=HeteroStrategy(), devices=1)
    with pytest.raises(ConfigurationError, match=told):
        trainer.fit(module, loader(4, 2))


class TakesLoader(ToyModule):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_takes_a_loader_is_refused_and_a_plan_is_there_in_runs_only() -> None:
    trainer = L.Trainer(**quiet(), strategy=HeteroStrategy(), devices=1)
    with pytest.raises(ConfigurationError, match="takes a dataloader_iter"):
        trainer.fit(TakesLoader(ToyOptions()), loader(4, 2))
    with pytest.raises(ConfigurationError, match="only while a run is on"):
        _ = HeteroStrategy().plan


class RunsCode:
    """What a crafted file holds: reading it back makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return (Path.touch, (self.made,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_no_code_of_a_file_to_resume_from_is_run(
    tmp_path: Path, entry: str, *, is_zip: bool
) -> None:
    crafted = {"state_dict": {}, "callbacks": RunsCode(tmp_path / "made")}
    torch.save(crafted, tmp_path / "bad.ckpt", _use_new_zipfile_serialization=is_zip)
    trainer = L.Trainer(**quiet(), strategy=HeteroStrategy(), devices=1)
    with pytest.raises(CheckpointError, match=r"bad.ckpt holds more than .* can run code"):
        getattr(trainer, entry)(
            ToyModule(ToyOptions()), loader(4, 2), ckpt_path=tmp_path / "bad.ckpt"
        )
    assert not (tmp_path / "made").exists()


def test_a_device_with_one_hardware_queue_is_refused():
    cuda, one = torch.device("cuda", 0), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with pytest.raises(ConfigurationError, match="share one hardware queue"):
        check_queues(cuda, one)
    check_queues(torch.device("cpu"), one)
    check_queues(cuda, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})


class NoOtherProcess(Exception):
    """Raised where other processes would be started."""


UNITED = plan_of(pipeline(stage([0, 1], 0, 4)))
STAGES = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 4)))


def trainer_that_starts_nobody(
    monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], start_method: Any
) -> L.Trainer:
    def start(*_: Any, **__: Any) -> None:
        raise NoOtherProcess

    for name in ("subprocess.Popen", "torch.multiprocessing.start_processes"):
        monkeypatch.setattr(name, start)
    monkeypatch.setattr("sys.argv", [__file__])  # A worker of pytest-xdist runs no script.
    strategy = HeteroStrategy(plan, start_method=start_method)
    return L.Trainer(**quiet(), strategy=strategy, devices=2)


def adapted(kind: str, folder: Path) -> Any:
    """Return a module whose base is quantized, with LoRA; "folder" is read when the run starts."""
    pytest.importorskip("peft")
    pytest.importorskip("torchao" if kind == "torchao" else "bitsandbytes")
    from tests.runtime.huggingface_runs import make_model
    from tests.runtime.peft_runs import PeftCase, PeftModule

    more: dict[str, Any] = {"quantized": kind}
    if kind == "folder":
        make_model("llama").save_pretrained(folder)
        more = {"folder": str(folder), "while_loading": "nf4"}
    return PeftModule(PeftCase(plan=UNITED, **more))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "start_method"),
    [("nf4", "popen"), ("int8", "spawn"), ("torchao", "fork"), ("folder", "popen")],
)
def test_a_quantized_base_is_cut_by_no_plan_before_processes_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, start_method: Any
) -> None:
    module = adapted(kind, tmp_path)
    trainer = trainer_that_starts_nobody(monkeypatch, UNITED, start_method)
    with pytest.raises(ModelError, match=r"_proj\S*weight is quantized.*plan with degree 1"):
        trainer.fit(module, DataLoader([]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_a_quantized_weight_that_is_to_train_is_refused_before_processes_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: torch.dtype
) -> None:
    """torchao's, and bitsandbytes' bits that are stored as floats, as FSDP needs them."""
    module = adapted("torchao" if storage is torch.uint8 else "nf4", tmp_path)
    weight = module.model.base_model.model.model.layers[2].mlp.up_proj.weight
    if storage is not torch.uint8:
        weight.data = weight.data.view(-1).view(storage)[:, None]
    weight.requires_grad_(True)
    trainer = trainer_that_starts_nobody(monkeypatch, STAGES, "popen")
    with pytest.raises(ModelError, match=r"2.mlp.up_proj.weight is quantized.*adapters beside"):
        trainer.fit(module, DataLoader([]))
    weight.requires_grad_(False)
    with pytest.raises(NoOtherProcess):
        trainer.fit(module, DataLoader([]))
