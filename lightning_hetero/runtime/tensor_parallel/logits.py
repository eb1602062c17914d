"""Keep logits sharded along the vocabulary until a function needs them whole.

A head of style `vocab_loss` returns `ShardedLogits`. Reshapes that keep the vocabulary as the last
dim, and `float`, keep the shards, and a cross entropy of class indices is computed on them: per
token the largest logit, the sum of exponentials and the target's logit are reduced over the group,
three numbers instead of a row of the vocabulary. Any other function gets the gathered logits, so
results are the same as without shards. Without gradients the head gathers at once, since
predictions leave the group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_hetero.models.packing import IGNORED_LABEL
from lightning_hetero.runtime.tensor_parallel.collectives import (
    TPGroup,
    gather_shards,
    local_index,
    piece_sizes,
    reduce_partial,
)

__all__ = ["ShardedLogits"]

_CASTS = {Tensor.float, Tensor.contiguous}
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape}


class ShardedLogits(Tensor):
    """A rank's columns of logits, (…, shard of the vocabulary), with the shape of the whole."""

    peers: TPGroup
    length: int
    """Size of the whole vocabulary."""

    @classmethod
    def wrap(cls, shard: Tensor, peers: TPGroup, length: int) -> "ShardedLogits":
        """Return a shard as logits over a vocabulary of `length`."""
        logits = shard.as_subclass(cls)
        logits.peers, logits.length = peers, length
        return logits

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Keep the shards where the function allows it, else gather them first."""
        kwargs = kwargs or {}
        logits = next((arg for arg in args if isinstance(arg, cls)), None)
        if logits is not None:
            with torch._C.DisableTorchFunctionSubclass():
                kept = _keep_sharded(logits, func, args, kwargs)
            if kept is not NotImplemented:
                return kept
        args, kwargs = tree_map_only(cls, _whole, (tuple(args), kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _whole(value: ShardedLogits) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        shard = value.as_subclass(Tensor)
        return gather_shards(shard, -1, piece_sizes(value.length, value.peers.degree), value.peers)


def _keep_sharded(
    logits: ShardedLogits, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the function's result on shards; NotImplemented if it needs the whole."""
    shard = logits.as_subclass(Tensor)
    shape = torch.Size((*shard.shape[:-1], logits.length))
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _attribute(shard, shape, func)
    if func is Tensor.size:
        return shape if len(args) == 1 and not kwargs else shape[(*args[1:], *kwargs.values())[0]]
    if func in (Tensor.dim, Tensor.numel, Tensor.is_floating_point):
        return shape.numel() if func is Tensor.numel else func(shard)
    if func in _CASTS:
        return ShardedLogits.wrap(func(shard), logits.peers, logits.length)
    if func in _RESHAPES and not kwargs:
        sizes = args[1] if isinstance(args[1], tuple | list | torch.Size) else args[1:]
        if len(sizes) and sizes[-1] in (logits.length, -1) and _keeps_rows(sizes, shape):
            whole = (*sizes[:-1], shard.shape[-1])
            return ShardedLogits.wrap(shard.reshape(whole), logits.peers, logits.length)
    if func is F.cross_entropy and args[0] is logits:
        return _cross_entropy(logits, *args[1:], **kwargs)
    return NotImplemented


def _keeps_rows(sizes: Sequence[int], shape: torch.Size) -> bool:
    """Whether the last size is the whole vocabulary: a last -1 must work out to that."""
    if sizes[-1] != -1:
        return True
    rows = 1
    for size in sizes[:-1]:
        rows *= size
    return -1 not in sizes[:-1] and rows * shape[-1] == shape.numel()


def _attribute(shard: Tensor, shape: torch.Size, func: Callable[..., Any]) -> Any:
    owner = getattr(func, "__self__", None)
    if owner is Tensor.shape:
        return shape
    for known in (Tensor.dtype, Tensor.device, Tensor.requires_grad, Tensor.ndim, Tensor.is_cuda):
        if owner is known:
            return func(shard)
    return NotImplemented


def _cross_entropy(
    logits: ShardedLogits,
    target: Tensor,
    *unusual: Any,
    ignore_index: int = IGNORED_LABEL,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Return the cross entropy of class indices; NotImplemented for other forms of it."""
    plain = [*unusual, *options.values()]
    is_usual = not any(isinstance(option, Tensor) or option for option in plain)
    if not is_usual or target.is_floating_point() or logits.ndim != 2:
        return NotImplemented
    counted = target != ignore_index
    losses = _token_losses(logits, target, counted)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted.sum()


def _token_losses(logits: ShardedLogits, target: Tensor, counted: Tensor) -> Tensor:
    """Return log(sum of exponentials) - the target's logit, 0 where not counted; (tokens,)."""
    peers, shard = logits.peers, logits.as_subclass(Tensor)
    largest = shard.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=peers.group)
    shifted = shard - largest[:, None]
    exponentials = reduce_partial(shifted.exp().sum(-1), peers)
    own_target, foreign = local_index(target.masked_fill(~counted, 0), logits.length, peers)
    own = shifted.gather(-1, own_target[:, None])[:, 0]
    at_target = reduce_partial(own.masked_fill(foreign, 0), peers)
    return (exponentials.log() - at_target).masked_fill(~counted, 0)
