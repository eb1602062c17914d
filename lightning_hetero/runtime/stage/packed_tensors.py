"""Pack tensors end to end as bytes, and unpack them by their forms (shape, dtype and the like)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Form",
    "form_of",
    "offsets_of",
    "packed_behind",
    "payload_of",
    "payload_sizes",
    "tensor_of",
    "unpack",
]

_ALIGNMENT_BYTES = 64
"""Alignment of packed tensors: each can be viewed in its own dtype, and kernels find it aligned."""


class Form(NamedTuple):
    """The form of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def form_of(tensor: Tensor) -> Form:
    """Return a tensor's form."""
    return Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def payload_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the bytes of the first tensor, and those of the others end to end."""
    parts = [_bytes_of(tensor) for tensor in tensors[:1]]
    return [*parts, packed_behind(parts[0].new_empty(0), tensors[1:])] if tensors[1:] else parts


@lru_cache(maxsize=256)
def payload_sizes(forms: tuple[Form, ...]) -> tuple[int, ...]:
    """Return the bytes of each part of a payload; see `payload_of`."""
    sizes = tuple(form.num_bytes for form in forms[:1])
    return (*sizes, offsets_of(forms[1:])[-1]) if forms[1:] else sizes


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def packed_behind(start: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of `start`, then those of the tensors at the offsets of `offsets_of`."""
    parts = [start]
    for tensor in tensors:
        part = _bytes_of(tensor)
        parts += (part,)
        if part.numel() % _ALIGNMENT_BYTES:
            parts += (part.new_zeros(-part.numel() % _ALIGNMENT_BYTES),)
    return torch.cat(parts)


def unpack(packed: Tensor, forms: tuple[Form, ...], *, behind: int = 0) -> list[Tensor]:
    """Return the tensors with these forms that are packed behind so many bytes of `packed`."""
    return [
        tensor_of(packed[behind + start : behind + stop], form)
        for (start, stop), form in zip(_bounds_of(forms), forms, strict=True)
    ]


def tensor_of(content: Tensor, form: Form) -> Tensor:
    """Return the tensor with this form whose bytes these are, such as the first of a payload."""
    # To autograd it is no view, so that changing one in place doesn't count for the others.
    return content.view(form.dtype).view(form.shape).data


@lru_cache(maxsize=256)
def _bounds_of(forms: tuple[Form, ...]) -> tuple[tuple[int, int], ...]:
    """Return the bytes [first, last + 1) of each packed tensor."""
    pairs = zip(offsets_of(forms), forms, strict=False)
    return tuple((start, start + form.num_bytes) for start, form in pairs)


@lru_cache(maxsize=256)
def offsets_of(forms: tuple[Form, ...]) -> tuple[int, ...]:
    """Return the offset of each packed tensor, and at the end the total length, in bytes."""
    offsets = [0]
    for form in forms:
        offsets.append(offsets[-1] + -(-form.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    return tuple(offsets)
