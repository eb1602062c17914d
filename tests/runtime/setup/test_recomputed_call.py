"""A call that is computed again in backward gives the same bits and keeps nothing in between."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.setup.recomputed_call import computed_again
from lightning_hetero.runtime.setup.saved_bytes import SavedBytes

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def layer(hidden: Tensor, weight: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, str]:
    hidden = F.dropout(torch.tanh(F.linear(hidden, weight)), 0.5)
    return (hidden if scale is None else hidden * scale), "something else"


def gradients(call: Callable[..., Any]) -> list[Tensor]:
    """Return the gradients through two layers, what was drawn after them, and what after that."""
    torch.manual_seed(1)
    weight = WEIGHT.clone().requires_grad_()
    hidden = torch.randn(4, 8, requires_grad=True)
    scale = torch.randn(8, requires_grad=True)
    first, text = call(layer, hidden, weight, scale=scale)
    second, _ = call(layer, first, weight)
    assert text == "something else"
    drawn = torch.rand(2)
    second.square().sum().backward()
    found = [hidden.grad, weight.grad, scale.grad, drawn, torch.rand(2)]
    return [item for item in found if item is not None]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_gradients_and_drawn_numbers_are_the_same_bit_for_bit(cast: torch.dtype | None) -> None:
    def in_forward_only(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", cast, enabled=cast is not None):
                return call(*args, **kwargs)

        return run

    found, expected = (gradients(in_forward_only(call)) for call in (computed_again, plainly))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_function_that_checkpoints_a_part_of_itself_is_computed_again_as_well() -> None:
    def nested(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(layer, *args, use_reentrant=False, **kwargs)

    def again(function: Any, *args: Any, **kwargs: Any) -> Any:
        return computed_again(nested, *args, **kwargs)

    for one, other in zip(gradients(again), gradients(plainly), strict=True):
        assert torch.equal(one, other)


def test_the_arguments_are_all_that_is_kept_and_what_was_computed_again_goes_at_once() -> None:
    made: list[weakref.ref[Tensor]] = []

    def watched(hidden: Tensor) -> Tensor:
        middle = hidden.exp()
        made.append(weakref.ref(middle))
        return middle.square()

    hidden = torch.ones(100, requires_grad=True)
    with SavedBytes() as saved:
        output = computed_again(watched, hidden)
    assert saved.total == 400
    assert made[0]() is None
    output.sum().backward(retain_graph=True)
    output.sum().backward()  # What a graph is kept for: once more.
    torch.testing.assert_close(hidden.grad, 4 * hidden.detach().mul(2).exp())
    gone = weakref.ref(output)
    del output
    gc.collect()
    assert len(made) == 3
    assert [ref() for ref in (*made, gone)] == [None] * 4


def test_the_rest_is_not_computed_once_all_is_there() -> None:
    calls: list[str] = []

    def counted(hidden: Tensor) -> Tensor:
        hidden = hidden.square()
        calls.append("needed")
        hidden = hidden + 1
        calls.append("not needed")
        return hidden

    computed_again(counted, torch.ones(2, requires_grad=True)).sum().backward()
    assert calls == ["needed", "not needed"]


def test_the_function_gets_the_very_arguments_the_first_time() -> None:
    given = torch.ones(2, requires_grad=True) * 1
    assert computed_again(lambda hidden: (hidden.exp(), hidden), given)[1] is given


def test_arguments_that_were_changed_are_refused() -> None:
    hidden = torch.ones(2, requires_grad=True) * 1
    output = computed_again(torch.exp, hidden)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(ModelError, match="changed in place"):
        output.sum().backward()


@pytest.mark.parametrize("second", [nn.Identity(), lambda hidden: hidden[:1].exp()])
def test_another_result_the_second_time_is_refused(second: Callable[[Tensor], Tensor]) -> None:
    turns = iter([torch.exp, second])
    output = computed_again(lambda hidden: next(turns)(hidden), torch.ones(2, requires_grad=True))
    with pytest.raises(ModelError, match="must do the same both times"):
        output.sum().backward()
