"""A layer is called once before anybody waits for it, and the real call finds it compiled."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.models import PackedBatch, pack_samples, varlen_attention
from lightning_hetero.runtime.stage.recomputation import LayerCall, LayerOptions
from lightning_hetero.runtime.stage.rehearsal import describe_call, rehearse
from tests.toy import Block

CPU = torch.device("cpu")


def described(*args: object, **kwargs: object) -> str:
    return describe_call(LayerCall(0, lambda: None, args, kwargs))


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
    rehearse(layer, described(hidden), device=CPU, dtype=torch.float32)
    num_compiled = len(compiled)
    assert num_compiled > 0
    assert all(item.is_meta and item.grad is None for item in layer.parameters())
    real = Block(16)
    real.forward = options.wrap_layer(1, real.forward)
    torch.testing.assert_close(real(hidden), Block.forward(real, hidden))
    assert len(compiled) == num_compiled, "the real call was compiled again"


class Packed(nn.Module):
    """A layer of packed samples with a buffer, dropout and odd arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout()
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor, batch: PackedBatch, *, rest: Any = None) -> Any:
        self.seen.append((*x.shape, *batch.cu_seqlens.tolist(), rest["scale"], rest[3]))
        heads = self.norm(x).unflatten(-1, (2, 4))
        found = varlen_attention(heads, heads, heads, batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        return self.drop(found.flatten(-2)), None


def test_packed_calls_are_made_anew_and_leave_layer_and_random_numbers_as_they_were() -> None:
    layer, batch = Packed(), pack_samples([torch.arange(4), torch.arange(6)])
    call = described(
        torch.randn(10, 8, requires_grad=True), batch, rest={"scale": 2, 3: (True, [None])}
    )
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    random_state = torch.get_rng_state()
    rehearse(layer, call, device=CPU, dtype=torch.float32)
    assert layer.seen == [(10, 8, 0, 4, 10, 2, (True, [None]))]
    assert described(layer, object()) == ""
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
