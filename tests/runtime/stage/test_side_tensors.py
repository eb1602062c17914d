"""Laws of what layers return and leave beside their hidden states, on one process."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.layer_calls import LayerCall
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.side_tensors import LayerLeavings
from lightning_hetero.runtime.unknown import Unknown

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
        y = x + torch.tanh(self.linear(x)) + self.table
        y = self.norm(y) if "norm" in self.habit else y
        if "values" in self.habit and float(y.detach().sum()) > 1e6:
            return x
        if "attribute" in self.habit:
            self.left = torch.cat([y, y], dim=1) if "wide" in self.habit else y.mean()
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


@pytest.fixture(params=[False, True], ids=["with gradients", "inference"])
def _inference(request: pytest.FixtureRequest) -> Any:
    ELSEWHERE.clear()
    with torch.inference_mode(mode=request.param):
        yield


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("habit", ["", "values", "own input", "norm"])
def test_a_skipped_layer_runs_once_on_unknown_tensors_and_leaves_no_trace(habit: str) -> None:
    model = Model(habit)
    boundary = StageBoundary(model.layers)
    skipped = model.layers[0]
    for num_passes, size in enumerate((5, 7, 6), 1):
        assert in_stages(model, boundary, torch.randn(size, 3)).shape == (size, 2)
        assert skipped.calls == num_passes
    assert int(skipped.norm.num_batches_tracked) == (3 if habit == "norm" else 0)
    assert type(skipped.table) is Tensor


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("habit", ["attribute", "attribute by values"])
def test_leavings_travel_if_they_are_small(habit: str) -> None:
    for is_wide in (False, True):
        model = Model(habit + " wide" * is_wide)
        boundary = StageBoundary(model.layers)
        for _ in range(2):
            in_stages(model, boundary, torch.randn(5, 3))
            assert isinstance(model.layers[0].left, Unknown) is is_wide
    assert model.layers[0].left.shape == (5, 8)
    with pytest.raises(ModelError, match=r"layer 0 leaves in 'left'.*too large to travel"):
        F.mse_loss(model.layers[0].left, torch.zeros(5, 8)).item()


@pytest.mark.usefixtures("_inference")
def test_what_layers_leave_elsewhere_is_unknown_in_the_first_pass() -> None:
    model = Model("elsewhere")
    in_stages(model, StageBoundary(model.layers), torch.randn(5, 3))
    assert [type(item) for item in ELSEWHERE] == [Tensor, Unknown, Tensor, Tensor]


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("habit", ["", "by values"])
def test_hooks_inside_layers_see_unknown_tensors(habit: str) -> None:
    model, outputs = Model(habit), []
    for layer in model.layers:
        layer.linear.register_forward_hook(lambda *args: outputs.append(args[2]))
    boundary = StageBoundary(model.layers)
    if habit:
        with pytest.raises(ModelError, match=r"hooks inside it would see unknown tensors"):
            in_stages(model, boundary, torch.randn(5, 3))
        return
    for _ in range(2):
        outputs.clear()
        in_stages(model, boundary, torch.randn(5, 3))
        assert [isinstance(item, Unknown) for item in outputs] == [False, True, False, False]


@pytest.mark.usefixtures("_inference")
def test_tuples_come_in_the_form_of_each_call() -> None:
    model = Model("tuple by values")
    boundary = StageBoundary(model.layers)
    for size in (5, 2):
        in_stages(model, boundary, torch.randn(size, 3))
        hidden, first, width, scale = model.seen[0]
        assert isinstance(hidden, Unknown)
        assert not isinstance(first, Unknown)  # It came from where it was made.
        assert (tuple(first.shape), width) == ((size, 1), 4)
        assert torch.equal(scale, torch.ones(1))


def test_a_compiled_layer_runs_uncompiled_on_unknown_tensors_and_is_compiled_later() -> None:
    model, graphs = Model(), []

    def capture(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    first = model.layers[0]
    first.forward = torch.compile(first.forward, backend=capture)
    leavings, hidden = LayerLeavings(model.layers), torch.randn(5, 4)
    handover = Handover([hidden], [b""], [((5, 4), torch.float32)])
    leavings.skip(LayerCall(0, first.forward, (hidden, None), {}), 0, handover)
    assert not graphs
    first(hidden)
    assert graphs


class Leaves(nn.Module):
    """Leaves something in every place there is."""

    def __init__(self, shared: list[Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("last", torch.zeros(2))
        self.shared = shared
        self.known: dict[str, Any] = {"kept": 1}
        self.large: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner.norm = y.square().sum()
        self.last = y.mean(0)
        self.shared.append(y.mean())
        self.known["mean"] = {"of": y.mean(1)[0], "rows": len(y)}
        self.large = y + 1
        self.calls += 1
        self.odd = (y.sum() for _ in range(1))
        return y


def test_what_a_layer_leaves_is_found_where_it_was_skipped() -> None:
    ran, skipped = ([Leaves(shared) for _ in range(2)] for shared in ([], []))
    handover, x = Handover(), torch.randn(3, 2)
    theirs, ours = LayerLeavings(ran), LayerLeavings(skipped)
    for index, layer in enumerate(ran):
        before, call = theirs.look(index), LayerCall(index, layer.forward, (x,), {})
        x = call.run()
        theirs.note(before, call, x, x, handover)
    for index, layer in enumerate(skipped):
        x = ours.skip(LayerCall(index, layer.forward, (x,), {}), 0, handover)
        assert isinstance(x, Unknown)
    for one, other in zip(ran, skipped, strict=True):
        assert other.inner.norm is one.inner.norm
        assert other.last is one.last
        assert "last" in dict(other.named_buffers())
        assert other.known["kept"] == 1
        assert other.known["mean"]["of"] is one.known["mean"]["of"]
        assert other.known["mean"]["rows"] == 3
        assert other.calls == 1
        assert isinstance(other.large, Unknown)
        assert isinstance(other.odd, Unknown)
        assert other.inner.weight is not one.inner.weight
    assert skipped[0].shared is skipped[1].shared
    assert [a is b for a, b in zip(ran[0].shared, skipped[0].shared, strict=True)] == [True] * 2
    # The hidden state, and each of the others once.
    assert len(handover.tensors) == len({id(tensor) for tensor in handover.tensors}) == 1 + 2 * 4


def test_nothing_is_kept_of_what_a_layer_no_longer_holds() -> None:
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    leavings = LayerLeavings([layer])
    for _ in range(2):
        layer.last = torch.zeros(1)
        gone = weakref.ref(layer.last)
        before = leavings.look(0)
        layer.last = torch.ones(1)
        leavings.note(before, LayerCall(0, layer.forward, (x,), {}), x, x, Handover())
        del before
        assert gone() is None


def test_pieces_of_a_sequence_may_not_be_left() -> None:
    layer, x = Leaves([]), torch.randn(3, 2)
    leavings, call = LayerLeavings([layer]), LayerCall(0, layer.forward, (x,), {})
    before = leavings.look(0)
    leavings.refuse_pieces(call, before, (x, x))
    with pytest.raises(ModelError, match=r"Layer 0 leaves tensors in 'its output'"):
        leavings.refuse_pieces(call, before, (x, x + 1))
    layer(x)
    with pytest.raises(ModelError, match=r"Layer 0 leaves tensors in '\w+' .*sequence_parallel"):
        leavings.refuse_pieces(call, before, x)
