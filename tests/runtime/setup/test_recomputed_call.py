"""A call that is computed again in backward gives the same bits and keeps nothing in between."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.setup.products import _is_product
from lightning_hetero.runtime.setup.recomputed_call import (
    computed_again,
    computed_again_but_products,
)
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

    expected = gradients(in_forward_only(plainly))
    for call in (computed_again, computed_again_but_products):
        for one, other in zip(gradients(in_forward_only(call)), expected, strict=True):
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


def test_what_the_function_changes_in_place_after_it_was_saved_is_refused() -> None:
    def changing(hidden: Tensor) -> Tensor:
        middle = hidden.exp()
        return middle.add_(1).square()

    output = computed_again(changing, torch.ones(2, requires_grad=True))
    with pytest.raises(ModelError, match="changes a tensor in place"):
        output.sum().backward()


def test_hooks_that_modules_always_call_are_called_where_the_second_call_stops() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    entered: list[str] = []
    layer[1].register_forward_pre_hook(lambda *_: entered.append("in"))
    layer[1].register_forward_hook(lambda *_: entered.append("out"), always_call=True)
    computed_again(layer, torch.ones(1, 8)).sum().backward()
    assert entered == ["in", "out", "in", "out"]


def test_a_function_that_catches_all_errors_ends_nothing() -> None:
    def careful(hidden: Tensor) -> Tensor:
        try:
            return hidden.exp()
        except Exception:
            return hidden.square()

    def wrapping(hidden: Tensor) -> Tensor:
        try:
            return hidden.exp()
        except Exception as error:
            raise ValueError("no exp") from error

    for function in (careful, wrapping):
        hidden = torch.zeros(2, requires_grad=True)
        computed_again(function, hidden).sum().backward()
        assert hidden.grad is not None
        assert hidden.grad.tolist() == [1, 1]


def test_a_hook_that_a_function_puts_on_its_argument_runs_once() -> None:
    def halving(hidden: Tensor) -> Tensor:
        hidden.register_hook(lambda gradient: gradient / 2)
        return hidden.exp()

    start = torch.zeros(2, requires_grad=True)
    computed_again(halving, start * 1).sum().backward()
    assert start.grad is not None
    assert start.grad.tolist() == [0.5, 0.5]


def test_arguments_made_in_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        bias = torch.ones(2)
    hidden = torch.zeros(2, requires_grad=True)
    computed_again(lambda hidden, bias: (hidden + bias).square(), hidden, bias).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [2, 2]


def test_autocast_is_the_same_without_tensors_among_the_arguments() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = computed_again(lambda given: F.linear(given["x"], weight), {"x": torch.ones(1, 2)})
    output.sum().backward()
    assert weight.grad is not None


def test_errors_of_hooks_around_the_call_stay_as_they_are() -> None:
    def unpack(packed: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        output = computed_again(torch.exp, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="out of memory"):
        output.sum().backward()


def attending(hidden: Tensor) -> Tensor:
    query = (hidden.exp() @ WEIGHT).sigmoid().view(1, 2, 4, 4)
    found = F.scaled_dot_product_attention(query, query, query).view(4, 8)
    return (found.tanh() @ WEIGHT).relu() @ WEIGHT


def test_products_and_attention_are_kept_as_far_as_others_need_them() -> None:
    def flops(call: Callable[..., Any]) -> tuple[int, int, list[Tensor]]:
        hidden = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            with SavedBytes(without=[WEIGHT]) as saved:
                output = call(attending, hidden)
            for _ in range(2):  # What a graph is kept for: once more.
                output.sum().backward(retain_graph=True)
        assert hidden.grad is not None
        return counter.get_total_flops(), saved.total, [output, hidden.grad]

    total, kept, expected = flops(plainly)
    found_flops, found_kept, found = flops(computed_again_but_products)
    assert found_flops == total
    assert all(map(torch.equal, found, expected))
    logsumexp = 2 * 4
    # The argument, two products and attention, not the last product, which nothing needs.
    assert found_kept == 4 * (4 * 32 + logsumexp) < kept
    assert flops(computed_again)[0] > total


def test_attention_is_kept_if_it_draws_no_random_numbers() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    queries = [WEIGHT] * 3
    assert _is_product(attention, queries, {})
    assert _is_product(attention, [*queries, 0.0, True], {"scale": None})
    assert not _is_product(attention, [*queries, 0.1], {})
    assert not _is_product(attention, queries, {"dropout_p": 0.1})
    assert not _is_product(torch.ops.aten.exp.default, [WEIGHT], {})


def test_products_that_change_or_differ_the_second_time_are_refused() -> None:
    def changing(hidden: Tensor) -> Tensor:
        return (hidden @ WEIGHT).relu_().exp()

    hidden = torch.ones(4, 8, requires_grad=True)
    with pytest.raises(ModelError, match=r"changes in place what aten\.mm.*the whole layer"):
        computed_again_but_products(changing, hidden)
    turns = iter([lambda x: (x @ WEIGHT).exp(), lambda x: torch.addmm(x, x, WEIGHT).exp()])
    output = computed_again_but_products(lambda hidden: next(turns)(hidden), hidden)
    with pytest.raises(ModelError, match=r"calls aten\.addmm.*where it called aten\.mm"):
        output.sum().backward()
