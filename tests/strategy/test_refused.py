"""What can't train as on one device is refused, with what to do instead."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.runtime.ranks.communicators import check_queues
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
