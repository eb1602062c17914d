"""A layer is called once before anybody waits for it, and the real call finds it compiled."""

import pytest
import torch
from torch import nn

from lightning_hetero.models import PackedBatch, pack_samples, varlen_attention
from lightning_hetero.runtime.stage.layer_calls import LayerCall
from lightning_hetero.runtime.stage.recomputation import LayerOptions
from lightning_hetero.runtime.stage.rehearsal import describe_call, rehearse
from tests.toy import Block


def call_of(*args: object, **kwargs: object) -> LayerCall:
    return LayerCall(0, lambda: None, args, kwargs)


def test_what_was_rehearsed_is_compiled_for_the_first_real_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: whole(forward, backend=count))
    torch._dynamo.reset()
    options = LayerOptions(compile_layers=True)
    with torch.device("meta"):
        layer = Block(16)
    layer.forward = options.wrap_layer(0, layer.forward)
    hidden = torch.randn(2, 8, 16, requires_grad=True)
    rehearse(layer, describe_call(call_of(hidden)), device=hidden.device, dtype=torch.float32)
    num_compiled = len(compiled)
    assert num_compiled > 0
    assert all(parameter.is_meta and parameter.grad is None for parameter in layer.parameters())
    real = Block(16)
    real.forward = options.wrap_layer(1, real.forward)
    expected = Block.forward(real, hidden)
    torch.testing.assert_close(real(hidden), expected)
    assert len(compiled) == num_compiled, "the real call was compiled again"


def test_nothing_of_a_layer_or_of_random_numbers_changes() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()

        def forward(self, x: torch.Tensor, *, rest: object, mask: object = None) -> object:
            table, (scale, name) = rest["table"], rest["pair"]
            assert (mask, scale, name) == (None, 2.0, "sum")
            return self.drop(self.norm(x)) + table.sum() * scale, table

    layer = Layer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    rest = {"table": torch.ones(3, dtype=torch.int64), "pair": (2.0, "sum")}
    described = describe_call(call_of(torch.ones(2, 4), rest=rest, mask=None))
    state = torch.get_rng_state()
    rehearse(layer, described, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    assert describe_call(call_of(object())) == "", "what can't be made anew isn't rehearsed"


def test_a_call_with_packed_samples_is_made_with_samples_of_their_lengths() -> None:
    seen: list[object] = []

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, batch: PackedBatch, positions: torch.Tensor) -> object:
            seen.append((batch.cu_seqlens.tolist(), batch.max_seqlen, positions.tolist()))
            heads = x[:, None, :]
            attended = varlen_attention(
                heads, heads, heads, batch.cu_seqlens, max_seqlen=batch.max_seqlen
            )
            return attended[:, 0]

    batch = pack_samples([[1, 2, 3], [4, 5]])
    hidden = torch.randn(5, 8, requires_grad=True)
    described = describe_call(call_of(hidden, batch, torch.arange(2000)))
    rehearse(Attention(), described, device=torch.device("cpu"), dtype=torch.float32)
    assert seen == [([0, 3, 5], 3, [0] * 2000)]
