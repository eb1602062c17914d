"""One process plays the stages one after the other: together they are the whole model."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.stage import boundary as boundary_file
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.recomputation import LayerCall
from lightning_hetero.runtime.stage.side_tensors import refuse_pieces


class Layer(nn.Module):
    """Returns what layers of other models return: a tensor, or a tuple that begins with it."""

    def __init__(self, extra: Callable[[Tensor], tuple[Any, ...]] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.extra = extra

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Any:
        out = hidden + self.dropout(torch.tanh(self.linear(hidden))) * scale
        return out if self.extra is None else (out, *self.extra(out))


class Model(nn.Module):
    def __init__(
        self, extra: Callable[[Tensor], tuple[Any, ...]] | None = None, *, by_name: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList([Layer(extra) for _ in range(3)])
        self.head = nn.Linear(4, 2)
        self.by_name = by_name
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            out = layer(hidden=hidden, scale=0.5) if self.by_name else layer(hidden, scale=0.5)
            if isinstance(out, tuple):
                hidden = out[0]
                self.seen.append(out[1:])
            else:
                hidden = out
        return self.head(hidden) * (1 + torch.rand(()))


def run_of(layers: range, received: Tensor | Handover | None) -> MicrobatchPass:
    if isinstance(received, Tensor):
        forms = [(tuple(received.shape), received.dtype)] * layers.start
        received = Handover([received], [b""] * layers.start, forms)
    return MicrobatchPass(
        layers=layers,
        num_layers=3,
        seed=(1, 2, 3),
        receive=None if received is None else lambda: received,
        wait_unit=lambda index: None,
    )


def through_stages(
    model: Model, boundary: StageBoundary, step: Callable[[], Any], cuts: list[int]
) -> Any:
    received = None
    for first, last in pairwise(cuts):
        torch.manual_seed(first)  # Whatever a stage's generators were, the run seeds them.
        run = run_of(range(first, last), received)
        try:
            with boundary.forward_of(run):
                return step()
        except StageEnd as end:
            assert last < 3
            received = end.handed_on
    raise AssertionError("the last stage ended the step")


@pytest.mark.parametrize("extra", [None, lambda out: (None, 7), lambda out: (out.detach(),)])
@pytest.mark.parametrize("cuts", [[0, 1, 3], [0, 2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("by_name", [False, True])
def test_stages_in_turn_are_the_whole_model(extra: Any, cuts: list[int], *, by_name: bool) -> None:
    model = Model(extra, by_name=by_name)
    boundary = StageBoundary(model.layers)
    x = torch.randn(5, 3)
    whole = through_stages(model, boundary, lambda: model(x), [0, 3])
    cut = through_stages(model, boundary, lambda: model(x), cuts)
    assert torch.equal(cut, whole)


def test_the_first_call_is_described_once_even_if_it_can_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[LayerCall] = []

    def describe(call: LayerCall) -> str:
        calls.append(call)
        return ""

    monkeypatch.setattr(boundary_file, "describe_call", describe)
    model = Model()
    boundary = StageBoundary(model.layers)
    through_stages(model, boundary, lambda: model(torch.randn(5, 3)), [0, 3])
    assert (len(calls), boundary.first_call) == (1, "")


def test_no_except_of_the_users_stops_a_stage_end() -> None:
    model = Model()
    boundary = StageBoundary(model.layers)

    def step() -> Any:
        try:
            return model(torch.randn(5, 3))
        except Exception:
            return None

    with pytest.raises(StageEnd), boundary.forward_of(run_of(range(1), None)):
        step()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_hidden_states_are_refused_in_stages() -> None:
    layer = nn.Identity()
    boundary = StageBoundary([layer, nn.Identity()])
    nested = torch.nested.as_nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)])
    run = replace(run_of(range(1), None), num_layers=2)
    with pytest.raises(ModelError, match="enable_nested_tensor=False"), boundary.forward_of(run):
        layer(nested)


def test_a_module_without_layers_waits_for_its_weights_before_its_step() -> None:
    waited_for: list[int] = []
    run = replace(run_of(range(1), None), num_layers=1, wait_unit=waited_for.append)
    with StageBoundary(()).forward_of(run):
        assert waited_for == [0]


def test_outside_a_run_and_after_removal_layers_are_their_own() -> None:
    model = Model().eval()
    x = torch.randn(5, 3)
    layers = [layer(torch.ones(2, 4)) for layer in model.layers]
    boundary = StageBoundary(model.layers)
    for layer, expected in zip(model.layers, layers, strict=True):
        assert torch.equal(layer(torch.ones(2, 4)), expected)
    boundary.remove()
    assert all("forward" not in vars(layer) for layer in model.layers)
    assert model(x).shape == (5, 2)


class Keeping(Layer):
    """Keeps tensors with gradients in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Any:
        out = super().forward(hidden, scale=scale)
        self.kept.append(out.mean())
        return out


def test_a_layer_that_keeps_gradients_in_a_list_is_refused() -> None:
    model = Model()
    model.layers = nn.ModuleList([Keeping() for _ in range(3)])
    boundary = StageBoundary(model.layers)
    with pytest.raises(ModelError, match=r"Layer 0 keeps tensors with gradients in 'kept'"):
        through_stages(model, boundary, lambda: model(torch.randn(5, 3)), [0, 1, 3])


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_hooks_inside_layers_that_need_values_are_refused(*, with_kwargs: bool) -> None:
    model = Model()
    for layer in model.layers:
        layer.linear.register_forward_hook(
            lambda *args: float(args[-1].detach().sum()) and None, with_kwargs=with_kwargs
        )
    boundary = StageBoundary(model.layers)
    with pytest.raises(ModelError, match=r"hooks inside it see unknown tensors"):
        through_stages(model, boundary, lambda: model(torch.randn(5, 3)), [0, 1, 3])


def test_pieces_of_a_sequence_may_not_be_returned() -> None:
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    call = LayerCall(0, layer.forward, (x,), {})
    refuse_pieces(call, (x, x))
    with pytest.raises(ModelError, match=r"Layer 0 returns tensors.*sequence_parallel"):
        refuse_pieces(call, (x, x + 1))
