"""Split the backward of layers: the input's gradient at once, the weights' gradients later.

No stage waits for the gradients of weights, so they can be computed while the stage would otherwise
wait (Qi et al. 2023, "Zero Bubble"). During an iteration's passes `LayerSplitter.active()` replaces
`torch.nn.functional.linear` and `embedding`, which `nn.Linear` and `nn.Embedding` call. If a call
uses one of this rank's trainable weights, or a part of one such as an expert's matrix, it then
keeps its input and the gradient of its output until `run_weights`. The backward of everything else,
such as frozen weights and experts' grouped products, isn't split.

The products are those that autograd computes, and gradients go through the parameters' own
`AccumulateGrad`, so sums and hooks are the same bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_linear, _embedding = F.linear, F.embedding


class _Place(NamedTuple):
    """A parameter, or a part of one."""

    parameter: nn.Parameter
    part: tuple[Sequence[int], Sequence[int], int] | None
    """Size, strides and offset of the part; None if it is the whole parameter."""


_Waiting = tuple[tuple[_Place, ...], Callable[[], Sequence[Tensor]]]
"""Parameters, and a function that returns their gradients."""


class LayerSplitter:
    """Collects, for each stage and micro-batch, what the gradients of weights are computed from.

    Args:
        names: The name of each weight and bias that may be split.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._pass: tuple[int, int] = (-1, -1)
        self._waiting: dict[tuple[int, int], list[_Waiting]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Split layers that run forward in this context."""
        assert F.linear is _linear, "another iteration runs in this process"
        F.linear = self._call_linear  # type: ignore[assignment]
        F.embedding = self._call_embedding  # type: ignore[assignment]
        try:
            yield
        finally:
            F.linear, F.embedding = _linear, _embedding
            self._waiting.clear()

    @contextmanager
    def collecting(self, key: tuple[int, int]) -> Iterator[None]:
        """Keep what a micro-batch's backward needs later for its weights."""
        self._pass = key
        self._waiting[key] = []
        try:
            yield
        finally:
            self._pass = (-1, -1)

    def leave(self, places: tuple[_Place, ...], gradients: Callable[[], Sequence[Tensor]]) -> None:
        """Leave some gradients to be computed by `run_weights`."""
        self._waiting[self._pass].append((places, gradients))

    def names_waiting(self, key: tuple[int, int]) -> set[str]:
        """Return the parameters whose gradients wait for `run_weights`."""
        return {self._names[i.parameter] for places, _ in self._waiting[key] for i in places}

    def run_weights(self, key: tuple[int, int]) -> None:
        """Compute the gradients of weights that wait, and add them to the weights' `grad`."""
        # A weight that a step uses twice gets one sum, as from autograd: under autocast in the
        # dtype of its cast copy, which is made once; parts are cast each time.
        sums: dict[tuple[nn.Parameter, torch.dtype], Tensor] = {}
        for places, gradients in self._waiting.pop(key):
            for (parameter, part), gradient in zip(places, gradients(), strict=True):
                if part is not None:
                    own = parameter, parameter.dtype
                    if own not in sums:
                        sums[own] = torch.zeros_like(parameter)
                    sums[own].as_strided(*part).add_(gradient)
                else:
                    own = parameter, gradient.dtype
                    sums[own] = sums[own] + gradient if own in sums else gradient
        found: dict[nn.Parameter, Tensor] = {}
        for (parameter, _), total in sums.items():
            own_sum = total.to(parameter.dtype)
            found[parameter] = found[parameter] + own_sum if parameter in found else own_sum
        if found:
            torch.autograd.backward([*found], [*found.values()])

    def _call_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() and value.requires_grad:
            given = (weight,) if bias is None else (weight, bias)
            places = tuple(filter(None, map(self._place_of, given)))
            if len(places) == len(given):
                result: Tensor = _SplitLinear.apply(  # type: ignore[no-untyped-call]
                    value, weight.detach(), None if bias is None else bias.detach(), self, places
                )
                return result
        return _linear(value, weight, bias)

    def _call_embedding(  # noqa: PLR0913 - torch's signature
        self,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002
        sparse: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        place = self._place_of(weight) if torch.is_grad_enabled() else None
        if place is None or max_norm is not None or sparse:
            return _embedding(
                ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
            )
        at = -1 if padding_idx is None else padding_idx % len(weight)
        result: Tensor = _SplitEmbedding.apply(  # type: ignore[no-untyped-call]
            weight, ids, (at, scale_grad_by_freq), self, place
        )
        return result

    def _place_of(self, weight: Tensor) -> _Place | None:
        """Return where a weight's gradient goes; None if its backward isn't split."""
        if not weight.requires_grad:
            return None
        if weight in self._names:
            return _Place(cast("nn.Parameter", weight), None)
        base = weight._base
        if base is None or base not in self._names or not base.is_contiguous():
            return None
        offset = int(weight.storage_offset() - base.storage_offset())
        return _Place(cast("nn.Parameter", base), (weight.size(), weight.stride(), offset))


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose backward leaves the weight's gradient to a `LayerSplitter`."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        splitter: LayerSplitter,
        places: tuple[_Place, ...],
    ) -> Tensor:
        result = _linear(value, weight, bias)
        # Under autocast the product is of another dtype than its factors.
        ctx.save_for_backward(value.to(result.dtype))
        ctx.weight, ctx.dtype, ctx.splitter, ctx.places = weight, value.dtype, splitter, places
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        (value,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        weight, has_bias = ctx.weight, len(ctx.places) > 1

        def of_weights() -> list[Tensor]:
            given = value.reshape(-1, value.shape[-1])
            # For parts whose rows are apart, autograd makes the transposed product.
            is_whole = weight.stride() == (weight.shape[-1], 1)
            of_weight = rows.t().mm(given) if is_whole else given.t().mm(rows).t()
            return [of_weight, rows.sum(0)] if has_bias else [of_weight]

        ctx.splitter.leave(ctx.places, of_weights)
        of_value = rows.mm(weight.to(gradient.dtype)).view(value.shape)
        return of_value.to(ctx.dtype), None, None, None, None


class _SplitEmbedding(torch.autograd.Function):
    """The same for an embedding, whose weight is passed only so that there is a backward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        options: tuple[int, bool],
        splitter: LayerSplitter,
        place: _Place,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.options, ctx.splitter, ctx.place = len(weight), options, splitter, place
        return torch.embedding(weight.detach(), ids, *options, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        (gradient,) = gradients
        (ids,) = ctx.saved_tensors
        num_rows, options = ctx.num_rows, ctx.options

        def of_weight() -> list[Tensor]:
            backward = torch.ops.aten.embedding_dense_backward
            return [backward(gradient, ids, num_rows, *options)]

        ctx.splitter.leave((ctx.place,), of_weight)
        return (None,) * 5
