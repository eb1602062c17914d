"""Run a layer with quantized weights where it has none of them, for the shapes that it returns."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["without_quantized_values"]


@contextmanager
def without_quantized_values(layer: nn.Module) -> Iterator[None]:
    """Let quantized linear modules inside a layer multiply by zeros, whatever they hold."""
    parts = [
        part
        for part in layer.modules()
        if isinstance(part, nn.Linear) and not part.weight.is_floating_point()
    ]
    before = [part.__dict__.get("forward") for part in parts]
    for part in parts:
        part.__dict__["forward"] = partial(_multiply_zeros, part)
    try:
        yield
    finally:
        for part, forward in zip(parts, before, strict=True):
            part.__dict__.pop("forward")
            if forward is not None:
                part.__dict__["forward"] = forward


def _multiply_zeros(part: nn.Linear, x: Tensor) -> Tensor:
    shape = part.out_features, part.in_features
    return F.linear(x, torch.zeros(shape, dtype=x.dtype, device=x.device), part.bias)
