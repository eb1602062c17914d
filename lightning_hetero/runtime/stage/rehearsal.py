"""Call a layer once before other ranks wait for it: that compiles it and loads its kernels.

A joiner hasn't seen a batch. So the ranks that train describe a layer's call, by shapes and
types, and the joiner makes such a call with zeros, forward and backward, before it is let in.
Short lists of integers travel with their values, since packed samples have to begin and end
somewhere. Layers share their code, so one stands for all.

Under tensor parallelism, or if a step's shapes vary, the first real call may compile once more.
"""

import importlib
import json
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.stage.layer_calls import LayerCall
from lightning_hetero.runtime.stage.quantized_calls import without_quantized_values

__all__ = ["describe_call", "rehearse"]

_MOST_VALUES = 1024
"""Most integers of a tensor that travel with its form; a longer one becomes zeros."""


def describe_call(call: LayerCall) -> str:
    """Return a description of a call for `rehearse`; "" if it can't be described."""
    plain = call.without_caches()
    try:
        return json.dumps([_form_of(plain.args), _form_of(plain.kwargs)])
    except TypeError:
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
    args, kwargs = (_made_of(form, device) for form in json.loads(description))
    zeros: dict[str, Tensor] = {}
    for name, parameter in layer.named_parameters():
        zeros[name] = nn.Parameter(torch.zeros(parameter.shape, dtype=dtype, device=device))
    for name, buffer in layer.named_buffers():
        zeros[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    with PreservedRandomState(), torch.enable_grad(), without_quantized_values(layer):
        output = torch.func.functional_call(layer, zeros, args, kwargs)
        total = sum(
            item.sum() for item in tree_leaves(output) if isinstance(item, Tensor) and item.grad_fn
        )
        if isinstance(total, Tensor):
            total.backward()  # type: ignore[no-untyped-call]


def _form_of(value: Any) -> Any:
    """Return a description of an argument that JSON can hold.

    Raises:
        TypeError: The argument is of a type that can't be made anew.
    """
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if value.dtype in (torch.int32, torch.int64) and value.dim() == 1:
            return ["integers", value[:_MOST_VALUES].tolist(), len(value), name]
        return ["tensor", list(value.shape), name, value.requires_grad]
    if is_dataclass(value) and not isinstance(value, type):
        kind, items = type(value), [item.name for item in fields(value) if item.init]
        forms = {name: _form_of(getattr(value, name)) for name in items}
        return ["dataclass", kind.__module__, kind.__qualname__, forms]
    if isinstance(value, dict):
        return ["dict", {str(key): _form_of(item) for key, item in value.items()}]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_form_of(item) for item in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise TypeError(f"a {type(value).__name__} can't be made anew")


def _made_of(form: Any, device: torch.device) -> Any:
    kind, *rest = form
    if kind == "tensor":
        shape, name, requires_grad = rest
        zeros = torch.zeros(shape, dtype=getattr(torch, name), device=device)
        return zeros.requires_grad_(requires_grad)
    if kind == "integers":
        values, length, name = rest
        given = values if len(values) == length else [0] * length
        return torch.tensor(given, dtype=getattr(torch, name), device=device)
    if kind == "dataclass":
        module, name, forms = rest
        root: Any = importlib.import_module(module)
        made = reduce(getattr, name.split("."), root)
        return made(**{key: _made_of(item, device) for key, item in forms.items()})
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {key: _made_of(item, device) for key, item in rest[0].items()}
    items = (_made_of(item, device) for item in rest[0])
    return list(items) if kind == "list" else tuple(items)
