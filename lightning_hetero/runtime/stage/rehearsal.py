"""Call a layer once before other ranks wait for it: that compiles it and loads its kernels.

A joiner hasn't seen a batch. So the ranks that train describe a layer's call, with its tensors by
shape and dtype. The joiner makes such a call with zeros, forward and backward, before it joins.
Short integer tensors keep their values, because those that say where packed samples begin can't be
zeros. One call is enough for all layers, since they share their code. Under tensor parallelism, or
if the shapes of steps vary, the first real call may still compile.
"""

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.stage.messages import pickled, unpickled
from lightning_hetero.runtime.stage.recomputation import LayerCall

_MOST_VALUES = 1024
"""Largest number of integers in a tensor that keeps its values; longer ones become zeros."""


def describe_call(call: LayerCall) -> str:
    """Return a description of a call for `rehearse`; "" if an argument can't be pickled."""
    bare = call.without_caches()
    with torch._C.DisableTorchFunction():  # Modes that watch the step mustn't see this.
        found = pickled((bare.args, bare.kwargs), _described)
    return "" if found is None else found.hex()  # Then a joiner calls no layer.


def rehearse(
    layer: nn.Module, description: str, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Call a layer forward and backward with zeros, even for its weights; leave it unchanged."""
    with torch.device(device):
        args, kwargs = unpickled(bytes.fromhex(description), _made)
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


_Described = tuple[tuple[int, ...], torch.dtype, list[int] | None, bool]
"""A tensor's shape, dtype, values if they are kept, and whether it requires a gradient."""


def _described(value: Any) -> _Described | None:
    """Return a description of a tensor; None for other objects, which are pickled as they are."""
    if isinstance(value, nn.Module):
        raise pickle.PicklingError("A joiner has modules of its own.")
    if not isinstance(value, Tensor):
        return None
    is_short = value.dim() == 1 and value.dtype in (torch.int32, torch.int64)
    values = value.tolist() if is_short and len(value) <= _MOST_VALUES else None
    return tuple(value.shape), value.dtype, values, value.requires_grad


def _made(described: _Described) -> Tensor:
    """Return a tensor that fits a description, of zeros unless its values are kept."""
    shape, dtype, values, requires_grad = described
    if values is not None:
        return torch.tensor(values, dtype=dtype)
    return torch.zeros(shape, dtype=dtype).requires_grad_(requires_grad)
