"""A stage foresees what layers of other stages return, and nobody takes that for a value."""

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.layer_calls import LayerCall
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.unknown import Unknown

if TYPE_CHECKING:
    from lightning_hetero.runtime.stage.activations import Handover

ELSEWHERE: list[Tensor] = []
"""Where layers leave tensors that no stage looks for."""


class Layer(nn.Module):
    """A layer with one habit."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.habit = habit
        self.calls = 0
        self.left: Tensor | None = None
        self.table: Tensor | None = None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(4.0)
        if "own input" in self.habit:
            x = x.mul_(0.5)
        y = self.norm(x + torch.tanh(self.linear(x))) + self.table
        if "values" in self.habit and float(y.detach().sum()) > 1e6:
            return x
        if "own weights" in self.habit and not float(self.linear.weight.detach().abs().sum()):
            raise ValueError("no weights")
        if "wide attribute" in self.habit:
            self.left = torch.cat([y, y], dim=1)
        if "small attribute" in self.habit:
            self.left = y.mean()
        if "elsewhere" in self.habit:
            ELSEWHERE.append(y)
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
    handed_on: list[Handover] = []
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


@pytest.fixture(params=[False, True], ids=["with gradients", "inference"], autouse=True)
def _inference(request: pytest.FixtureRequest) -> Any:
    ELSEWHERE.clear()
    with torch.inference_mode(mode=request.param):
        yield


def test_a_layer_is_looked_at_once_and_its_state_stays_as_it_was() -> None:
    model = Model()
    boundary = StageBoundary(model.layers)
    before = [x.clone() for x in model.layers[0].buffers()]
    skipped = model.layers[0]
    for size in (5, 7, 6):
        x = torch.randn(size, 3)
        calls = skipped.calls
        assert in_stages(model, boundary, x).shape == (size, 2)
        # Once on the first stage, which runs it; being looked at leaves no trace.
        assert skipped.calls == calls + 1
    assert len(boundary._skipped[0]._outputs) == 1
    assert int(before[2]) == 0
    assert int(skipped.norm.num_batches_tracked) == 3
    assert type(skipped.table) is Tensor


@pytest.mark.parametrize("habit", ["small attribute", "small attribute by values"])
def test_small_leavings_travel(habit: str) -> None:
    model = Model(habit)
    boundary = StageBoundary(model.layers)
    for _ in range(2):
        in_stages(model, boundary, torch.randn(5, 3))
        assert type(model.layers[0].left) is Tensor
        assert not isinstance(model.layers[0].left, Unknown)


@pytest.mark.parametrize("habit", ["wide attribute", "wide attribute by values"])
def test_wide_leavings_are_unknown_behind(habit: str) -> None:
    model = Model(habit)
    boundary = StageBoundary(model.layers)
    for _ in range(2):
        in_stages(model, boundary, torch.randn(5, 3))
        assert isinstance(model.layers[0].left, Unknown)
        assert model.layers[0].left.shape == (5, 8)
        with pytest.raises(ModelError, match=r"layer 0 leaves in 'left'.*too large to travel"):
            F.mse_loss(model.layers[0].left, torch.zeros(5, 8)).item()


def test_what_layers_leave_elsewhere_is_unknown_each_time() -> None:
    model = Model("elsewhere")
    boundary = StageBoundary(model.layers)
    for _ in range(2):
        ELSEWHERE.clear()
        in_stages(model, boundary, torch.randn(5, 3))
        kinds = [type(item) for item in ELSEWHERE]
        assert kinds == [Tensor, Unknown, Tensor, Tensor]


def test_what_layers_leave_elsewhere_by_values_is_refused() -> None:
    model = Model("elsewhere by values")
    with pytest.raises(ModelError, match="Layer 0 runs on another stage and computes by values"):
        in_stages(model, StageBoundary(model.layers), torch.randn(5, 3))


def test_a_layer_that_runs_with_its_own_weights_alone_is_refused_by_name() -> None:
    model = Model("own weights")
    with pytest.raises(ModelError, match="ValueError: no weights"):
        in_stages(model, StageBoundary(model.layers), torch.randn(5, 3))


@pytest.mark.parametrize("habit", ["", "by values"])
def test_hooks_inside_layers_see_unknown_tensors(habit: str) -> None:
    model, outputs = Model(habit), []
    for layer in model.layers:
        layer.linear.register_forward_hook(lambda *args: outputs.append(args[2]))
    boundary = StageBoundary(model.layers)
    if habit:
        with pytest.raises(ModelError, match="hooks inside it look at what it computes"):
            in_stages(model, boundary, torch.randn(5, 3))
        return
    for _ in range(2):
        outputs.clear()
        in_stages(model, boundary, torch.randn(5, 3))
        assert [isinstance(item, Unknown) for item in outputs] == [False, True, False, False]


def test_tuples_come_in_the_form_of_each_call() -> None:
    model = Model("tuple by values")
    boundary = StageBoundary(model.layers)
    for size in (5, 2):
        in_stages(model, boundary, torch.randn(size, 3))
        hidden, first, width, scale = model.seen[0]
        assert isinstance(hidden, Unknown)
        assert not isinstance(first, Unknown)  # It is small, so it came from where it was made.
        assert (tuple(first.shape), width) == ((size, 1), 4)
        assert torch.equal(scale, torch.ones(1))


def test_a_layer_that_is_skipped_may_change_its_own_input() -> None:
    model = Model("own input")
    assert in_stages(model, StageBoundary(model.layers), torch.randn(5, 3)).shape == (5, 2)


def test_a_compiled_layer_is_looked_at_uncompiled_and_compiled_later() -> None:
    model, graphs = Model(), []

    def capture(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    first = model.layers[0]
    first.forward = torch.compile(first.forward, backend=capture)
    boundary = StageBoundary(model.layers)
    hidden = torch.randn(5, 4)
    boundary._skipped[0](LayerCall(0, first.forward._forward, (hidden, None), {}), hidden)
    assert not graphs
    first(hidden)
    assert graphs
