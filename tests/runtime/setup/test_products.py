"""A call that is recomputed but for its products gives the same bits, and keeps what it must."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.runtime.setup.products import KeptProducts, bytes_of_products
from tests.capped_memory import MemoryCounter

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
    products = KeptProducts()
    for _ in range(2):  # What it has learnt from a backward changes nothing.
        for one, other in zip(gradients(in_forward_only(products)), expected, strict=True):
            assert torch.equal(one, other)


def attending(hidden: Tensor) -> Tensor:
    query = (hidden.exp() @ WEIGHT).sigmoid().view(1, 2, 4, 4)
    found = F.scaled_dot_product_attention(query, query, query).view(4, 8)
    return hidden + (found.tanh() @ WEIGHT).relu() @ WEIGHT


def test_products_and_attention_are_kept_as_far_as_backward_needs_them() -> None:
    def flops(call: Callable[..., Any]) -> tuple[int, int, list[Tensor]]:
        hidden = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            with MemoryCounter(2**40) as memory:
                before = memory.live_bytes
                output = call(attending, hidden)
                kept = memory.live_bytes - before
            output.sum().backward()
        assert hidden.grad is not None
        return counter.get_total_flops(), kept, [output, hidden.grad]

    total, kept, expected = flops(plainly)
    products, logsumexp = KeptProducts(), 2 * 4
    for num_kept in (5, 4):  # The output, and first the last product, which nothing needs.
        found_flops, found_kept, found = flops(products)
        assert found_flops == total
        assert all(map(torch.equal, found, expected))
        assert found_kept == 4 * (num_kept * 32 + logsumexp) < kept
    assert bytes_of_products(lambda: attending(torch.ones(4, 8))) == 4 * (3 * 32 + logsumexp)


def test_products_that_are_changed_or_differ_the_second_time_are_refused() -> None:
    turns = iter([lambda x: (x @ WEIGHT).exp(), lambda x: torch.addmm(x, x, WEIGHT).exp()])
    for function in (
        lambda hidden: (hidden @ WEIGHT).relu_().exp(),
        lambda hidden: next(turns)(hidden),
    ):
        output = KeptProducts()(function, torch.ones(4, 8, requires_grad=True))
        with pytest.raises(RuntimeError, match=r"mutated|not found"):
            output.sum().backward()
