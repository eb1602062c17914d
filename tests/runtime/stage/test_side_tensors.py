"""Laws of what layers leave beside their outputs, on one process."""

import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.stage.side_tensors import LayerLeavings
from lightning_hetero.runtime.unknown import Origin, Unknown


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


def handed_over(x: Tensor) -> tuple[list[Leaves], list[Leaves], Handover]:
    """Return layers that ran, layers that were skipped, and what went from the first to these."""
    ran, skipped = ([Leaves(shared) for _ in range(2)] for shared in ([], []))
    handover = Handover()
    theirs, ours = LayerLeavings(ran), LayerLeavings(skipped)
    for index, layer in enumerate(ran):
        before = theirs.look(index)
        x = layer(x)
        theirs.note(before, x, (), handover)
    for index in range(2):
        ours.restore(index, ours.look(index), (), handover)
    return ran, skipped, handover


def test_what_a_layer_leaves_is_found_where_it_was_skipped() -> None:
    ran, skipped, handover = handed_over(torch.randn(3, 2))
    for one, other in zip(ran, skipped, strict=True):
        assert other.inner.norm is one.inner.norm
        assert other.last is one.last
        assert "last" in dict(other.named_buffers())
        assert other.known["kept"] == 1
        assert other.known["mean"]["of"] is one.known["mean"]["of"]
        assert other.known["mean"]["rows"] == 3
        assert other.calls == 1
        assert other.inner.weight is not one.inner.weight
    assert skipped[0].shared is skipped[1].shared
    assert [a is b for a, b in zip(ran[0].shared, skipped[0].shared, strict=True)] == [True] * 2
    # The hidden state, and each of the others once.
    assert len(handover.tensors) == len({id(tensor) for tensor in handover.tensors}) == 1 + 2 * 4


def test_nothing_is_kept_of_what_a_layer_no_longer_holds() -> None:
    layer = nn.Linear(2, 2)
    leavings = LayerLeavings([layer])
    for _ in range(2):
        layer.last = torch.zeros(1)
        gone = weakref.ref(layer.last)
        before = leavings.look(0)
        layer.last = torch.ones(1)
        leavings.note(before, torch.randn(3, 2), (), Handover())
        del before
        assert gone() is None


def test_what_does_not_travel_is_refused_when_touched() -> None:
    shared: list[Tensor] = []
    layer = Leaves(shared)
    leavings = LayerLeavings([layer])
    before, last = leavings.look_anew(0), layer.last
    layer(torch.randn(3, 2))
    leavings.undo(before)
    assert shared == []
    assert layer.known == {"kept": 1}
    assert layer.last is last
    assert not hasattr(layer.inner, "norm")
    assert layer.calls == 0


def test_what_torch_itself_reads_is_no_leaving_and_is_restored_as_it_was_last() -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    leavings = LayerLeavings([layer])
    seen = leavings.look(0)
    layer.eval()
    layer[0]._forward_hooks = hooks = OrderedDict()
    assert leavings.look(0) is seen
    before = leavings.look_anew(0)
    layer.train()
    layer[0]._forward_hooks = OrderedDict()
    leavings.undo(before)
    assert not layer.training
    assert layer[0]._forward_hooks is hooks


def test_what_the_next_layer_takes_travels_however_large_it_is() -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    theirs, ours = LayerLeavings(layers), LayerLeavings(layers)
    hidden, bias, unread = torch.randn(3, 2), torch.randn(4, 4), torch.randn(5, 5)
    stand_in = Unknown.of((4, 4), torch.float32, torch.device("cpu"), Origin("a bias", "none"))
    for taken, is_there in (([hidden, bias], True), ([hidden, None], False)):
        handover = Handover()
        theirs.note(theirs.look(0), hidden, (bias, bias.mean(), None), handover)
        theirs.hand_on(taken, handover)
        theirs.note(theirs.look(1), hidden, (unread,), handover)
        rest = ours.restore(0, ours.look(0), (stand_in, stand_in, None), handover)
        assert (rest[0] is bias) is is_there
        assert isinstance(rest[0], Unknown) is not is_there
        assert not any(tensor is unread for tensor in handover.tensors)


def test_pieces_of_a_sequence_may_not_be_left() -> None:
    layer = Leaves([])
    leavings = LayerLeavings([layer])
    before = leavings.look(0)
    leavings.refuse_pieces(0, before, ())
    layer(torch.randn(3, 2))
    with pytest.raises(ModelError, match=r"Layer 0 leaves tensors in 'shared'.*sequence_parallel"):
        leavings.refuse_pieces(0, before, ())
