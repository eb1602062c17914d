import pytest
import torch
from torch import nn

from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.sizes import infer_model_spec
from tests.toy import GPT, VOCABULARY


def infer(module: nn.Module) -> ModelSpec | None:
    return infer_model_spec(module, ModelLayout.of(module))


def matrix_params(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters() if p.ndim >= 2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [16, 96])
def test_sizes_are_read_from_shapes(width: int, *, tied: bool) -> None:
    module = GPT(5, width, tied=tied)
    found = infer(module)
    assert found is not None
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (5, width, VOCABULARY)
    assert found.tied_embeddings is tied
    assert found.num_heads == 2
    assert found.matrix_params_per_layer == matrix_params(module.blocks[0])


def test_a_hugging_face_config_names_heads_and_gate() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=99,
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    found = infer(module)
    assert found is not None
    assert (found.num_heads, found.num_kv_heads, found.gated_mlp) == (4, 2, True)
    assert (found.vocab_size, found.intermediate_size) == (99, 128)


def test_of_unlike_layers_the_largest_counts_wherever_it_is() -> None:
    small, large = (GPT(num_layers=1, width=16, tied=False).blocks[0] for _ in range(2))
    large.extra = nn.Linear(16, 400)
    matrices = sum(item.numel() for item in large.parameters() if item.ndim == 2)
    for layers in ([small, large], [large, small]):
        module = nn.Module()
        module.blocks = nn.ModuleList(layers)
        spec = infer_model_spec(module, ModelLayout.of(module))
        assert spec is not None
        assert spec.matrix_params_per_layer == pytest.approx(matrices, rel=0.01)
