"""Split the backward of linear layers: the input's gradient at once, the weights' gradients later.

A stage before waits for the gradient of a stage's input, but nobody waits for the gradients of its
weights, so they can fill the time in which a stage would wait (Qi et al. 2023, "Zero Bubble").
`LinearSplitter.active()` replaces `torch.nn.functional.linear`, which `nn.Linear` calls, for the
time of an iteration's passes. A call with a weight that this rank computes with then keeps its
input and the gradient of its output until `run_weights`. Everything else, frozen and tied weights
included, has its whole backward at once.

The products are those that autograd computes, and gradients go through the parameters' own
`AccumulateGrad`, so sums and hooks are the same bit for bit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LinearSplitter"]

_linear = F.linear


class LinearSplitter:
    """Collects what the gradients of linear layers' weights need, by stage and micro-batch.

    Args:
        names: The name of each weight and bias that may be split.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._pass: tuple[int, int] = (-1, -1)
        self._waiting: dict[
            tuple[int, int], list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]]
        ]
        self._waiting = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Split linear layers that run forward in this context."""
        assert F.linear is _linear, "another iteration runs in this process"
        F.linear = self._call  # type: ignore[assignment]
        try:
            yield
        finally:
            F.linear = _linear
            self._waiting.clear()

    @contextmanager
    def collecting(self, key: tuple[int, int]) -> Iterator[None]:
        """Keep what a micro-batch's backward leaves for its weights."""
        self._pass = key
        self._waiting[key] = []
        try:
            yield
        finally:
            self._pass = (-1, -1)

    def names_waiting(self, key: tuple[int, int]) -> set[str]:
        """Return the parameters whose gradients wait for `run_weights`."""
        return {
            self._names[item]
            for weight, bias, _, _ in self._waiting[key]
            for item in (weight, bias)
            if item is not None
        }

    def run_weights(self, key: tuple[int, int]) -> None:
        """Compute the gradients of weights that wait, and add them to the weights' `grad`."""
        found: dict[nn.Parameter, Tensor] = {}

        def add(parameter: nn.Parameter, gradient: Tensor) -> None:
            gradient = gradient.to(parameter.dtype)
            # A weight that a step uses twice gets one sum, as from autograd.
            known = found.get(parameter)
            found[parameter] = gradient if known is None else known + gradient

        for weight, bias, value, gradient in self._waiting.pop(key):
            rows = gradient.reshape(-1, gradient.shape[-1])
            add(weight, rows.t().mm(value.reshape(-1, value.shape[-1])))
            if bias is not None:
                add(bias, rows.sum(0))
        if found:
            torch.autograd.backward([*found], [*found.values()])

    def _call(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if (
            torch.is_grad_enabled()
            and value.requires_grad
            and self._waits(weight)
            and (bias is None or self._waits(bias))
        ):
            own_bias = None if bias is None else bias.detach()
            result: Tensor = _SplitLinear.apply(  # type: ignore[no-untyped-call]
                value, weight.detach(), own_bias, (self, weight, bias)
            )
            return result
        return _linear(value, weight, bias)

    def _waits(self, parameter: Tensor) -> bool:
        return parameter.requires_grad and parameter in self._names

    def _leave(self, owners: tuple[Any, ...], value: Tensor, gradient: Tensor) -> None:
        _, weight, bias = owners
        self._waiting[self._pass].append((weight, bias, value, gradient))


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose backward leaves the weight's gradient to a `LinearSplitter`."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, owners: tuple[Any, ...]
    ) -> Tensor:
        result = _linear(value, weight, bias)
        # Under autocast the product is of another dtype than its factors.
        ctx.save_for_backward(value.to(result.dtype))
        ctx.weight, ctx.owners, ctx.dtype = weight, owners, value.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        (value,) = ctx.saved_tensors
        ctx.owners[0]._leave(ctx.owners, value, gradient)
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_value = rows.mm(ctx.weight.to(gradient.dtype)).view(value.shape)
        return of_value.to(ctx.dtype), None, None, None
