"""Call a layer once before other ranks wait for it: that compiles it and loads its kernels.

A joiner hasn't seen a batch. So the ranks that train describe a layer's call, with its tensors by
shape and dtype. The joiner makes such a call with zeros, forward and backward, before it joins.
Short integer tensors keep their values, because those that say where packed samples begin can't be
zeros. One call is enough for all layers, since they share their code. Under tensor parallelism, or
if the shapes of steps vary, the first real call may still compile.
"""

import json
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.models import PackedBatch
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.stage.recomputation import LayerCall

__all__ = ["describe_call", "rehearse"]

_MOST_VALUES = 1024
"""Largest number of integers in a tensor that keeps its values; longer ones become zeros."""


def describe_call(call: LayerCall) -> str:
    """Return a description of a call for `rehearse`, as JSON; "" if an argument isn't plain data.

    Plain are numbers, texts, tensors, `PackedBatch`, and lists, tuples and dicts of these.
    """
    bare = call.without_caches()
    try:
        with torch._C.DisableTorchFunction():  # Modes that watch the step mustn't see this.
            return json.dumps([_plain(bare.args), _plain(bare.kwargs)])
    except (TypeError, RuntimeError):
        # RuntimeError: some kinds of tensors have no shape. Then joiners call no layer.
        return ""


def rehearse(
    layer: nn.Module, description: str, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Call a layer forward and backward with zeros, even for its weights; leave it unchanged.

    Args:
        layer: The layer; its weights may be on the meta device.
        description: The call, as `describe_call` returns it.
        device: Where to compute.
        dtype: The dtype of the weights.
    """
    with torch.device(device):
        args, kwargs = map(_made, json.loads(description))
        zeros: dict[str, Tensor] = {
            name: nn.Parameter(torch.zeros(item.shape, dtype=dtype))
            for name, item in layer.named_parameters()
        }
        zeros |= {
            name: torch.zeros(item.shape, dtype=item.dtype) for name, item in layer.named_buffers()
        }
    with PreservedRandomState(), torch.enable_grad():
        output = torch.func.functional_call(layer, zeros, args, kwargs)
        total = sum(
            item.sum() for item in tree_leaves(output) if isinstance(item, Tensor) and item.grad_fn
        )
        if isinstance(total, Tensor):
            total.backward()  # type: ignore[no-untyped-call]


def _plain(value: Any) -> Any:
    """Return a value for JSON: anything but numbers and texts as {kind: content}.

    Raises:
        TypeError: It isn't plain data.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        is_short = value.dim() == 1 and value.dtype in (torch.int32, torch.int64)
        values = value.tolist() if is_short and len(value) <= _MOST_VALUES else None
        return {"tensor": [list(value.shape), str(value.dtype), values, value.requires_grad]}
    if isinstance(value, PackedBatch):
        return {"packed": [[f.name, _plain(getattr(value, f.name))] for f in fields(value)]}
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(item) for item in value]}
    raise TypeError(f"{type(value)} is no plain data")


def _made(plain: Any) -> Any:
    """Return the value that `_plain` got, with zeros for long tensors."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        shape, name, values, requires_grad = content
        dtype = getattr(torch, name.removeprefix("torch."))
        if values is not None:
            return torch.tensor(values, dtype=dtype)
        return torch.zeros(shape, dtype=dtype).requires_grad_(requires_grad)
    if kind in ("packed", "dict"):
        pairs = {_made(key): _made(item) for key, item in content}
        return PackedBatch(**pairs) if kind == "packed" else pairs
    items = [_made(item) for item in content]
    return tuple(items) if kind == "tuple" else items
