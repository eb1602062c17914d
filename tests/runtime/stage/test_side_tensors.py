"""Laws of what layers return and keep beside their hidden states, on one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.recomputation import LayerCall
from lightning_hetero.runtime.stage.side_tensors import refuse_pieces
from lightning_hetero.runtime.unknown import Unknown


class Layer(nn.Module):
    """A layer with one habit."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.habit = habit
        self.calls = 0
        self.left: Tensor | None = None
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        self.calls += 1
        y = x + torch.tanh(self.linear(x))
        if "attribute" in self.habit:
            self.left = y.mean()
        if "listed" in self.habit:
            self.kept.append(y.mean())
        return (y, y[:, :1], x.shape[1], scale) if "tuple" in self.habit else y


class Model(nn.Module):
    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList([Layer(habit) for _ in range(3)])
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        hidden, scale = self.embed(x), torch.ones(1)
        for layer in self.layers:
            hidden = layer(hidden, scale)
            if isinstance(hidden, tuple):
                self.seen.append(hidden)
                hidden = hidden[0]
        return self.head(hidden)


def in_stages(model: Model, boundary: StageBoundary, x: Tensor) -> Tensor:
    """Return what a second stage makes of layers 1 and 2, of what a first made of layer 0."""
    handed_on: list[Any] = []
    for layers in (range(1), range(1, 3)):
        run = MicrobatchPass(
            layers=layers,
            num_layers=3,
            seed=(1,),
            receive=(lambda: handed_on[0]) if handed_on else None,
            wait_unit=lambda index: None,
        )
        try:
            with boundary.forward_of(run):
                return model(x)
        except StageEnd as end:
            handed_on.append(end.handed_on)
    raise AssertionError("the last stage ended the step")


@pytest.fixture(params=[False, True], ids=["with gradients", "inference"])
def _inference(request: pytest.FixtureRequest) -> Any:
    with torch.inference_mode(mode=request.param):
        yield


def test_a_skipped_layer_does_not_run() -> None:
    model = Model()
    boundary = StageBoundary(model.layers)
    for num_passes, size in enumerate((5, 7, 6), 1):
        assert in_stages(model, boundary, torch.randn(size, 3)).shape == (size, 2)
        assert model.layers[0].calls == num_passes


def test_what_layers_keep_as_attributes_is_unknown_where_they_are_skipped() -> None:
    model = Model("attribute")
    boundary = StageBoundary(model.layers)
    for _ in range(2):
        in_stages(model, boundary, torch.randn(5, 3))
        assert isinstance(model.layers[0].left, Unknown)
        assert not isinstance(model.layers[1].left, Unknown)
    with pytest.raises(ModelError, match=r"layer 0 keeps in 'left'.*Return it from the layer"):
        model.layers[0].left.item()


def test_a_layer_that_keeps_gradients_in_a_list_is_refused() -> None:
    model = Model("listed")
    with pytest.raises(ModelError, match=r"Layer 0 keeps tensors with gradients in 'kept'"):
        in_stages(model, StageBoundary(model.layers), torch.randn(5, 3))


@pytest.mark.usefixtures("_inference")
def test_hooks_inside_layers_see_unknown_tensors() -> None:
    model, outputs = Model(), list[Any]()
    for layer in model.layers:
        layer.linear.register_forward_hook(lambda *args: outputs.append(args[2]))
    boundary = StageBoundary(model.layers)
    for _ in range(2):
        outputs.clear()
        in_stages(model, boundary, torch.randn(5, 3))
        assert [isinstance(item, Unknown) for item in outputs] == [False, True, False, False]


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_hooks_inside_layers_that_need_values_are_refused(*, with_kwargs: bool) -> None:
    model = Model()
    for layer in model.layers:
        layer.linear.register_forward_hook(
            lambda *args: float(args[-1].detach().sum()) and None, with_kwargs=with_kwargs
        )
    with pytest.raises(ModelError, match=r"hooks inside it see unknown tensors"):
        in_stages(model, StageBoundary(model.layers), torch.randn(5, 3))


@pytest.mark.usefixtures("_inference")
def test_tuples_come_in_the_form_of_each_call() -> None:
    model = Model("tuple")
    boundary = StageBoundary(model.layers)
    for size in (5, 2):
        in_stages(model, boundary, torch.randn(size, 3))
        hidden, first, width, scale = model.seen[0]
        assert isinstance(hidden, Unknown)
        assert not isinstance(first, Unknown)  # It came from where it was made.
        assert (tuple(first.shape), width) == ((size, 1), 4)
        assert torch.equal(scale, torch.ones(1))


def test_pieces_of_a_sequence_may_not_be_returned() -> None:
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    call = LayerCall(0, layer.forward, (x,), {})
    refuse_pieces(call, (x, x))
    with pytest.raises(ModelError, match=r"Layer 0 returns tensors.*sequence_parallel"):
        refuse_pieces(call, (x, x + 1))
