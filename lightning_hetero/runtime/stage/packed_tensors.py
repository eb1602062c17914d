"""Tensors as bytes, end to end, and their forms, without which the bytes say nothing."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Form", "form_of", "offsets_of", "pack", "payload_of", "payload_sizes", "unpack"]

_ALIGNMENT_BYTES = 64
"""Of packed tensors, so that each can be viewed in its own dtype, and kernels find it aligned."""


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
    if tensors[1:]:
        forms = [form_of(tensor) for tensor in tensors[1:]]
        parts.append(parts[0].new_empty(offsets_of(forms)[-1]))
        pack(tensors[1:], forms, parts[1])
    return parts


def payload_sizes(forms: Sequence[Form]) -> list[int]:
    """Return the bytes of each part of a payload; see `payload_of`."""
    sizes = [form.num_bytes for form in forms[:1]]
    return sizes + ([offsets_of(forms[1:])[-1]] if forms[1:] else [])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def pack(tensors: Sequence[Tensor], forms: Sequence[Form], packed: Tensor) -> None:
    """Write tensors of these forms into the bytes of `packed`."""
    for start, form, tensor in zip(offsets_of(forms), forms, tensors, strict=False):
        packed[start : start + form.num_bytes] = _bytes_of(tensor)


def unpack(packed: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Return the tensors of these forms that lie in `packed`."""
    tensors = []
    for start, form in zip(offsets_of(forms), forms, strict=False):
        found = packed[start : start + form.num_bytes].view(form.dtype).view(form.shape)
        # No view: what changes one of them in place has changed no other.
        whole = torch.empty(0, dtype=form.dtype, device=packed.device)
        tensors.append(whole.set_(found))  # type: ignore[call-overload]
    return tensors


def offsets_of(forms: Sequence[Form]) -> tuple[int, ...]:
    """Return where each packed tensor begins, and the length of all."""
    return _offsets_of(tuple(forms))


@lru_cache(maxsize=256)
def _offsets_of(forms: tuple[Form, ...]) -> tuple[int, ...]:
    offsets = [0]
    for form in forms:
        offsets.append(offsets[-1] + -(-form.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    return tuple(offsets)
