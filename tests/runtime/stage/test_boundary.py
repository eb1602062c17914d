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
from lightning_hetero.runtime.unknown import Unknown


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


def test_extra_outputs_that_nothing_uses_are_their_layers_business() -> None:
    model, x = Model(lambda out: (out * 2, None, out * 3)), torch.randn(5, 3)
    boundary = StageBoundary(model.layers)
    whole = through_stages(model, boundary, lambda: model(x), [0, 3])
    assert torch.equal(through_stages(model, boundary, lambda: model(x), [0, 2, 3]), whole)
    assert not any(isinstance(item, Unknown) for item in model.seen[-3])


class TakesRest(nn.Module):
    """Layers that also take what the layer before returned besides the hidden state."""

    def __init__(self, *, learned: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList([TakingLayer(learned=learned) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        hidden, rest = self.embed(x), x.sum(1, keepdim=True)
        for layer in self.layers:
            hidden, rest = layer(hidden, rest)
        return self.head(hidden)


class TakingLayer(nn.Module):
    def __init__(self, *, learned: int) -> None:
        super().__init__()
        self.linear, self.learned = nn.Linear(4, 4), learned

    def forward(self, hidden: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        made = self.linear(hidden)
        return hidden + made * rest, made[:, : self.learned] if self.learned else rest


def test_what_layers_hand_on_is_that_of_the_microbatch() -> None:
    model = TakesRest(learned=0)
    boundary = StageBoundary(model.layers)
    for num_samples in (5, 2):
        x = torch.randn(num_samples, 3)
        whole = through_stages(model, boundary, lambda x=x: model(x), [0, 3])
        assert torch.equal(through_stages(model, boundary, lambda x=x: model(x), [0, 2, 3]), whole)


@torch.inference_mode()
@pytest.mark.parametrize("learned", [1, 4])
def test_what_layers_return_for_layers_behind_travels(learned: int) -> None:
    model, x = TakesRest(learned=learned), torch.randn(5, 3)
    boundary = StageBoundary(model.layers)
    whole = through_stages(model, boundary, lambda: model(x), [0, 3])
    assert torch.equal(through_stages(model, boundary, lambda: model(x), [0, 1, 2, 3]), whole)


def test_extra_outputs_of_a_whole_model_are_its_own_business() -> None:
    model = Model(lambda out: (out * 2,))
    boundary = StageBoundary(model.layers)
    assert through_stages(model, boundary, lambda: model(torch.randn(5, 3)), [0, 3]).requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_hidden_states_are_refused_in_stages() -> None:
    layer = nn.Identity()
    boundary = StageBoundary([layer, nn.Identity()])
    nested = torch.nested.as_nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)])
    run = replace(run_of(range(1), None), num_layers=2)
    with pytest.raises(ModelError, match="enable_nested_tensor=False"), boundary.forward_of(run):
        layer(nested)


def test_outputs_that_are_no_hidden_state_are_refused() -> None:
    class Odd(nn.Module):
        def forward(self, hidden: Tensor) -> dict[str, Tensor]:
            return {"hidden": hidden}

    layer = Odd()
    boundary = StageBoundary([layer])
    run = MicrobatchPass(
        layers=range(1),
        num_layers=2,
        seed=(1,),
        receive=None,
        wait_unit=lambda index: None,
    )
    with pytest.raises(ModelError, match="Layer 0 returns dict"), boundary.forward_of(run):
        layer(torch.zeros(2, 3))


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
