"""Call a layer once before other ranks wait for it: that compiles it and loads its kernels.

A joiner hasn't seen a batch. So the ranks that train describe a layer's call, its tensors by shape
and dtype, and the joiner makes such a call with zeros, forward and backward, before it is let in.
Short lists of integers keep their values, since packed samples have to begin and end somewhere.
Layers share their code, so one stands for all. Under tensor parallelism, or if a step's shapes
vary, the first real call may compile once more.
"""

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.stage.recomputation import LayerCall

__all__ = ["describe_call", "rehearse"]

_MOST_VALUES = 1024
"""Most integers of a tensor that keep their values; a longer one becomes zeros."""


def describe_call(call: LayerCall) -> str:
    """Return a description of a call for `rehearse`; "" if it can't be described."""
    plain, stream = call.without_caches(), io.BytesIO()
    try:
        with torch._C.DisableTorchFunction():  # No business of who watches the step.
            _Describing(stream).dump((plain.args, plain.kwargs))
    except Exception:
        # Whatever the pickling of a user's object raises: a joiner then rehearses nothing.
        return ""
    return stream.getvalue().hex()


def rehearse(
    layer: nn.Module, description: str, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Call a layer forward and backward with zeros, even for its weights; leave it unchanged.

    Args:
        layer: The layer; its weights may be on the meta device.
        description: The call, as `describe_call` returns it; from a rank of the run, which is
            trusted: reading it may run code.
        device: Where to compute.
        dtype: The dtype of the weights.
    """
    with torch.device(device):
        args, kwargs = pickle.loads(bytes.fromhex(description))
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


class _Describing(pickle.Pickler):
    """Pickles tensors, wherever they are, without their values."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        is_short = value.dim() == 1 and value.dtype in (torch.int32, torch.int64)
        values = value.tolist() if is_short and len(value) <= _MOST_VALUES else None
        return _tensor, (tuple(value.shape), value.dtype, values, int(value.requires_grad))


def _tensor(
    shape: tuple[int, ...], dtype: torch.dtype, values: list[int] | None, requires_grad: int
) -> Tensor:
    if values is not None:
        return torch.tensor(values, dtype=dtype)
    return torch.zeros(shape, dtype=dtype).requires_grad_(bool(requires_grad))
