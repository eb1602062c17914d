"""Ranks of models with quantized or unfrozen weights are lost, and the others go on in place."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero.callbacks.run_log import read_log
from tests.callbacks.in_place import playing, undisturbed
from tests.callbacks.quantized import Quantized, Unfrozen, UnfrozenOnce
from tests.callbacks.test_in_place import trained
from tests.runtime.huggingface_runs import make_model
from tests.toy import VOCABULARY

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

NUM_RANKS, NUM_STEPS = 4, 8


@pytest.mark.parametrize(
    ("kind", "is_stored", "more"),
    [
        ("nf4", True, {}),
        ("int8", False, {}),
        ("torchao", True, {}),
        ("nf4", True, {"model": "gpt2"}),
        ("int8", True, {"model": "bert"}),
        ("torchao", False, {"model": "mixtral"}),
        (None, False, {"model": "gemma3_text", "adapters": {"use_dora": True}}),
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
        node.let_go_on_to(2)
        for rank in range(NUM_RANKS):
            node.wait_for_step(rank, 2)
        node.strike(0)
        node.let_go_on_to(5)
        for rank in (1, 2, 3):
            node.wait_for_step(rank, 5)
        node.strike(3)
        node.let_go_on_to(NUM_STEPS)
        assert node.wait_for_end() == 0, node.log()
        steps = trained(node)
        events = list(read_log(node.folder / "events.jsonl"))
    assert {step for _, step in steps} == set(range(1, NUM_STEPS + 1))
    for (size, step), items in steps.items():
        losses = [item["loss"] for item in items]
        assert losses == pytest.approx([expected[step - 1]] * size, rel=1e-5), step
    recovered = [item for item in events if item["event"] == "recovered"]
    assert [(item["is_live"], item["lost_steps"]) for item in recovered] == [(True, 0)] * 2


def test_what_a_callback_has_unfrozen_trains_on(tmp_path: Path) -> None:
    """A rank is lost after the epoch began in which the base was unfrozen."""
    expected = undisturbed(2, 36, make_module=partial(Unfrozen, is_planned=False))
    assert len({round(loss, 3) for loss in expected[30:]}) > 3
    options = {"num_steps": 36, "every": 100, "redundancy": 1, "num_stages": 2}
    options["make_module"] = partial(Unfrozen, is_planned=True)
    with playing(tmp_path / "run", NUM_RANKS, **options) as node:
        node.let_go_on_to(32)
        for rank in range(NUM_RANKS):
            node.wait_for_step(rank, 32)
        node.strike(0)
        node.let_go_on_to(36)
        assert node.wait_for_end() == 0, node.log()
        steps = trained(node)
    assert {step for _, step in steps} == set(range(1, 37))
    for (size, step), items in steps.items():
        losses = [item["loss"] for item in items]
        assert losses == pytest.approx([expected[step - 1]] * size, rel=1e-5), step


def test_what_was_unfrozen_trains_on_with_a_rank_that_joins_later(tmp_path: Path) -> None:
    """And goes on with it when another rank is lost. The joiner's script begins frozen."""
    num_steps = 44
    expected = undisturbed(2, num_steps, make_module=partial(UnfrozenOnce, is_planned=False))
    options = {"num_steps": num_steps, "every": 100, "redundancy": 1}
    options["make_module"] = partial(UnfrozenOnce, is_planned=True)
    with playing(tmp_path / "run", 2, **options) as node:
        node.let_go_on_to(4)
        node.wait_for_step(0, 4)
        node.join("new")
        joined = node.go_on_until(lambda: bool(node.records("new")), first=5, last=num_steps - 10)
        node.let_go_on_to(joined + 2)
        for name in (0, 1, "new"):
            node.wait_for_step(name, joined + 2)
        node.strike(1)
        node.let_go_on_to(num_steps)
        assert node.wait_for_end() == 0, node.log()
        steps = trained(node)
    assert {size for size, _ in steps} == {2, 3}
    for (size, step), items in steps.items():
        losses = [item["loss"] for item in items]
        assert losses == pytest.approx([expected[step - 1]] * size, rel=1e-5), step
