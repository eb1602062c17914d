"""Folders of models and adapters, quantized or not, are read layer by layer and train alike."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from lightning_hetero.core.errors import ModelError
from lightning_hetero.models.huggingface import add_adapters, load_pretrained
from tests.fits import check
from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import auto_class, make_model, quantization
from tests.runtime.test_adapters import PLANS, case_of

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.*MatMul8bitLt.*", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
slow = pytest.mark.slow

KINDS = ["nf4", "fp4-double", "int8", "torchao"]


def write(folder: Path, model: str = "llama", kind: str | None = None) -> str:
    """Write a model's folder, quantized if a kind is given."""
    disable_progress_bar()
    torch.manual_seed(0)
    make_model(model).save_pretrained(folder / "plain")
    if kind is None:
        return str(folder / "plain")
    found = auto_class(model).from_pretrained(
        folder / "plain", quantization_config=quantization(kind), dtype=torch.float32
    )
    found.save_pretrained(folder / kind)
    return str(folder / kind)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ("nf4", "torchao") else [slow]) for kind in KINDS],
)
def test_quantized_folders_and_folders_that_are_quantized_while_they_are_read(
    pool: ProcessPool, tmp_path: Path, kind: str
) -> None:
    check(pool, case_of("stages", max_steps=4, folder=write(tmp_path, kind=kind)))
    how = {"while_loading": kind, "folder": write(tmp_path)}
    check(pool, case_of("beside a copy", max_steps=4, **how))


@slow
@pytest.mark.parametrize("model", ["qwen3", "gemma3_text", "mixtral", "gpt2", "bert"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao"])
def test_folders_of_families(pool: ProcessPool, tmp_path: Path, model: str, kind: str) -> None:
    if (model, kind) == ("gpt2", "torchao"):
        pytest.skip("Transformers leaves GPT-2's Conv1D to bitsandbytes.")
    check(pool, case_of("stages", model, while_loading=kind, folder=write(tmp_path, model)))


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_plan_reads_what_a_rank_lacks(
    pool: ProcessPool, tmp_path: Path, kind: str
) -> None:
    plans = (PLANS["mirrored"], PLANS["beside a copy"], PLANS["mirrored"])
    case = case_of("beside a copy", max_steps=5, later=plans)
    check(pool, replace(case, folder=write(tmp_path, kind=kind)))
    check(pool, replace(case, quantized=kind.removesuffix("-double")))


LORA = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"])


def rename_base(adapter: Path, base: str | None, revision: str | None = None) -> None:
    config = peft.PeftConfig.from_pretrained(adapter)
    config.base_model_name_or_path, config.revision = base, revision
    config.save_pretrained(adapter)


def write_adapter(folder: Path, base: str | None = None) -> dict[str, torch.Tensor]:
    """Write an adapter with values of its own, and the name of its base; return these values."""
    adapted = peft.get_peft_model(make_model("llama"), copy(LORA))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight)
    adapted.save_pretrained(folder)
    rename_base(folder, base)
    return {n: w.detach() for n, w in adapted.named_parameters() if "lora_" in n}


@pytest.mark.parametrize("kind", [None, "nf4", "torchao"])
def test_a_stored_adapter_is_trained_further(tmp_path: Path, kind: str | None) -> None:
    stored = write_adapter(tmp_path / "adapter")
    how = None if kind is None else quantization(kind)
    base = load_pretrained(write(tmp_path), quantization_config=how)
    adapted = add_adapters(base, tmp_path / "adapter")
    found = {n: w.detach() for n, w in adapted.named_parameters() if w.requires_grad}
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], weight) for name, weight in stored.items())


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("llama", {"hidden_size": 32}, "size mismatch"),
        ("llama", {"num_hidden_layers": 2}, "layers.2"),
        ("gpt2", {}, "q_proj"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    tmp_path: Path, model: str, changes: dict[str, int], said: str
) -> None:
    write_adapter(tmp_path / "adapter")
    make_model(model, **changes).save_pretrained(tmp_path / "other")
    base = load_pretrained(tmp_path / "other", quantization_config=quantization("nf4"))
    with pytest.raises(ModelError, match=f"doesn't fit.*{said}.*Read the model that it was"):
        add_adapters(base, tmp_path / "adapter")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Returns the folder of a revision of a model in Hugging Face's cache, with its reference."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def make(name: str, revision: str) -> Path:
        model = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / revision).write_text(f"{revision:0>40}")
        return model / "snapshots" / f"{revision:0>40}"

    return make


ADAPTED = ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight", "norm.weight"]


@pytest.mark.parametrize("changed", [None, *ADAPTED])
@pytest.mark.parametrize("kind", [None, "nf4"])
def test_an_adapter_knows_its_base_by_its_weights(
    tmp_path: Path, cached: Callable[[str, str], Path], changed: str | None, kind: str | None
) -> None:
    """Of equal shapes, in another precision and under another name, in a folder or in the cache."""
    base = make_model("llama")
    base.save_pretrained(tmp_path / "base")
    base.save_pretrained(cached("maker/base", "main"))
    if changed is not None:
        base.model.get_parameter(changed).data *= 1.5
    base.bfloat16().save_pretrained(tmp_path / "mine")
    base.save_pretrained(cached("maker/base", "other"))
    how = None if kind is None else quantization(kind)
    for name in (str(tmp_path / "base"), "maker/base"):
        write_adapter(tmp_path / "adapter", name)
        model = load_pretrained(tmp_path / "mine", quantization_config=how)
        if changed is None:
            assert add_adapters(model, tmp_path / "adapter") is not None
            continue
        with pytest.raises(ModelError, match=rf"trained on {name}, where model.{changed} has oth"):
            add_adapters(model, tmp_path / "adapter")
    rename_base(tmp_path / "adapter", "maker/base", "other")
    model = load_pretrained(tmp_path / "mine", quantization_config=how)
    assert add_adapters(model, tmp_path / "adapter") is not None


def test_a_base_that_isn_t_here_may_be_another(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", "maker/base")
    with pytest.warns(UserWarning, match="ensure that the correct base model is loaded"):
        add_adapters(load_pretrained(write(tmp_path)), tmp_path / "adapter")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_adapters_that_need_values_of_weights_are_refused(tmp_path, options, said) -> None:
    model = load_pretrained(write(tmp_path), quantization_config=quantization("nf4"))
    with pytest.raises(ModelError, match=rf"{said}.*load the model whole with from_pretrained"):
        add_adapters(model, peft.LoraConfig(r=2, target_modules="all-linear", **options))


def test_a_library_that_is_missing_is_named_before_anything_is_read(tmp_path, monkeypatch) -> None:
    name = "transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available"
    folder = write(tmp_path)
    monkeypatch.setattr(name, lambda *_: False)
    with pytest.raises(ModelError, match=r"Install it: pip install 'lightning-hetero\[bnb\]'"):
        load_pretrained(folder, quantization_config=quantization("nf4"))
