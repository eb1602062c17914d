"""Ranks of models with quantized or unfrozen weights are lost, and the others go on in place."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_hetero.runtime.setup.layout import find_layers
from tests.callbacks.in_place import Node, playing, undisturbed
from tests.callbacks.test_in_place import trained
from tests.runtime.huggingface_runs import base_model, make_model
from tests.runtime.peft_runs import PeftCase, quantize, with_adapters
from tests.toy import ADAM_EPS, VOCABULARY

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

NUM_RANKS, NUM_STEPS = 4, 8


class Quantized(L.LightningModule):
    """A model of four layers with LoRA, on the toy's batches.

    Args:
        kind: Of quantization; None leaves it out.
        folder: Its weights, which are quantized while they are read; None builds it in memory.
        is_planned: Whether each rank reads the weights of its layers.
        model: Its family.
        adapters: Options of LoRA.
    """

    def __init__(
        self,
        kind: str | None,
        folder: Path | None,
        *,
        is_planned: bool,
        model: str = "llama",
        adapters: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        case = PeftCase(
            model=model,
            plan={} if is_planned else None,
            folder=None if folder is None else str(folder),
            while_loading=kind,
            adapters=adapters or {},
        )
        base = make_model(model, vocab_size=VOCABULARY) if folder is None else base_model(case)
        if folder is None and kind is not None:
            _, layers = find_layers(base, None)
            for layer in layers:
                quantize(layer, kind)
        self.model = with_adapters(base, case)
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.2)

    def training_step(self, batch: Any) -> Any:
        ids, _ = batch
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Unfrozen(Quantized):
    """The same without quantization; Lightning's callback unfreezes base layers in epoch 1."""

    def __init__(self, *, is_planned: bool) -> None:
        super().__init__(None, None, is_planned=is_planned)

    @property
    def backbone(self) -> nn.Module:
        found = (getattr(part, "base_layer", None) for part in self.model.modules())
        return nn.ModuleList(part for part in found if part is not None)

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(1, backbone_initial_lr=0.05)]

    def configure_optimizers(self) -> Any:
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPS)


class UnfreezeAfterTwo(L.Callback):
    """Unfreezes base layers after the second step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            pl_module.backbone.requires_grad_(True)


class UnfrozenOnce(Unfrozen):
    """The same by a callback of one's own; the optimizer has all weights from the start."""

    def configure_callbacks(self) -> Any:
        return [UnfreezeAfterTwo()]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, eps=ADAM_EPS)


def check_losses(node: Node, expected: list[float]) -> None:
    """Wait for the end; compare the losses of all steps, on all ranks that trained them."""
    assert node.wait_for_end() == 0, node.log()
    steps = trained(node)
    assert {step for _, step in steps} == set(range(1, len(expected) + 1))
    for (size, step), items in steps.items():
        losses = [item["loss"] for item in items]
        assert losses == pytest.approx([expected[step - 1]] * size, rel=1e-5), step


@pytest.mark.parametrize(
    ("kind", "is_stored", "more"),
    [
        ("nf4", True, {}),
        ("int8", True, {"model": "bert"}),
        ("torchao", False, {"model": "mixtral"}),
        (None, False, {"model": "qwen3", "adapters": {"modules_to_save": ["lm_head"]}}),
    ],
)
def test_survivors_read_the_layers_that_they_lack(
    tmp_path: Path, kind: str | None, more: dict[str, Any], *, is_stored: bool
) -> None:
    """Of two pipelines of two stages two ranks are lost, one after the other."""
    pytest.importorskip("torchao" if kind == "torchao" else "bitsandbytes")
    folder = None
    if is_stored:
        folder = tmp_path / "model"
        torch.manual_seed(0)
        make_model(more.get("model", "llama"), vocab_size=VOCABULARY).save_pretrained(folder)
    make = partial(Quantized, kind, folder, **more)
    expected = undisturbed(2, NUM_STEPS, make_module=partial(make, is_planned=False))
    options = {"num_steps": NUM_STEPS, "every": 100, "redundancy": 1, "num_stages": 2}
    options["make_module"] = partial(make, is_planned=True)
    with playing(tmp_path / "run", NUM_RANKS, **options) as node:
        node.wait_for_all(range(NUM_RANKS), 2)
        node.strike(0)
        node.wait_for_all((1, 2, 3), 5)
        node.strike(3)
        node.let_go_on_to(NUM_STEPS)
        check_losses(node, expected)
        recovered = node.events("recovered")
    assert [(item["is_live"], item["lost_steps"]) for item in recovered] == [(True, 0)] * 2


def test_what_a_callback_has_unfrozen_trains_on(tmp_path: Path) -> None:
    """A rank is lost after the epoch began in which the base was unfrozen."""
    expected = undisturbed(2, 36, make_module=partial(Unfrozen, is_planned=False))
    assert len({round(loss, 3) for loss in expected[30:]}) > 3
    options = {"num_steps": 36, "every": 100, "redundancy": 1, "num_stages": 2}
    options["make_module"] = partial(Unfrozen, is_planned=True)
    with playing(tmp_path / "run", NUM_RANKS, **options) as node:
        node.wait_for_all(range(NUM_RANKS), 32)
        node.strike(0)
        node.let_go_on_to(36)
        check_losses(node, expected)


def test_what_was_unfrozen_trains_on_with_a_rank_that_joins_later(tmp_path: Path) -> None:
    """And goes on with it when another rank is lost. The joiner's script begins frozen."""
    num_steps = 44
    expected = undisturbed(2, num_steps, make_module=partial(UnfrozenOnce, is_planned=False))
    options = {"num_steps": num_steps, "every": 100, "redundancy": 1}
    options["make_module"] = partial(UnfrozenOnce, is_planned=True)
    with playing(tmp_path / "run", 2, **options) as node:
        node.wait_for_all((0,), 4)
        node.join("new")
        joined = node.go_on_until(lambda: bool(node.records("new")), first=5, last=num_steps - 10)
        node.wait_for_all((0, 1, "new"), joined + 2)
        node.strike(1)
        node.let_go_on_to(num_steps)
        check_losses(node, expected)
        assert {size for size, _ in trained(node)} == {2, 3}
