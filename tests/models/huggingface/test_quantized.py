"""A weight that is quantized while it is read is what its library makes of the whole weight."""

from typing import Any

import pytest
import torch

from lightning_hetero.core.errors import ModelError
from lightning_hetero.models.huggingface import load_pretrained, quantized
from tests.runtime.huggingface_runs import auto_class, make_model, quantization

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*MatMul8bitLt.*"
)

SIZES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 168},
    "gpt2": {"n_embd": 64},
}


def torchao_config(name: str) -> Any:
    from torchao import quantization as torchao
    from transformers import TorchAoConfig

    kinds = {
        "row": lambda: torchao.Int8WeightOnlyConfig(granularity=torchao.PerRow()),
        "tensor": lambda: torchao.Int8WeightOnlyConfig(granularity=torchao.PerTensor()),
        "float8": torchao.Float8WeightOnlyConfig,
        "intx": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }
    return TorchAoConfig(kinds[name]())


def parts_of(weight: Any) -> dict[str, torch.Tensor]:
    """Return all that a quantized weight consists of."""
    if hasattr(weight, "__tensor_flatten__"):
        return {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}
    if getattr(weight, "quant_state", None) is not None:
        found = weight.quant_state.as_dict(packed=False)
        state = {key: item for key, item in found.items() if isinstance(item, torch.Tensor)}
        return {"data": weight.data, **state}
    return {"data": weight.data, "scales": weight.SCB}


def bits(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).view(torch.uint8)


KINDS = ["nf4", "fp4-double", "int8", "torchao"]
KINDS += [f"torchao by {name}" for name in ("row", "tensor", "float8", "intx")]


@pytest.mark.parametrize(
    ("model", "kind"),
    [*(("llama", kind) for kind in KINDS), *(("gpt2", kind) for kind in KINDS[:3])],
)
def test_runs_of_rows_are_quantized_as_the_whole(tmp_path, monkeypatch, model, kind) -> None:
    monkeypatch.setattr(quantized, "_RUN_NUMEL", 64 * 50)
    how = torchao_config(kind.split()[-1]) if " by " in kind else quantization(kind)
    make_model(model, **SIZES[model]).save_pretrained(tmp_path)
    expected = auto_class(model).from_pretrained(
        tmp_path, quantization_config=how, dtype=torch.float32
    )
    count = 0
    for name, like in load_pretrained(tmp_path, quantization_config=how).named_parameters():
        if not hasattr(like, "whole_reader"):
            continue
        found, whole = like.whole_reader(), expected.get_parameter(name)
        assert type(found) is type(whole)
        assert found.shape == whole.shape
        mine, theirs = parts_of(found), parts_of(whole)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(bits(mine[key]), bits(item)) for key, item in theirs.items()), name
        count += 1
    assert count >= 16


def test_layers_that_a_library_leaves_as_they_are_are_refused(tmp_path) -> None:
    make_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no layer that torchao quantizes.*GPT-2's Conv1D"):
        load_pretrained(tmp_path, quantization_config=quantization("torchao"))
