"""Wrap the forwards of sharded modules.

A wrapper looks at the module's current weights. If they are whole (degree 1, a stub of another
stage, a probe), the module runs unchanged. If they are shards, inputs and outputs pass through the
group's collectives, so that activations outside sharded modules are the same on all its ranks.

Under sequence parallelism the activation outside sharded regions is cut along the tokens: a
region gathers them where it begins, and reduce-scatters where it ends, instead of an all-reduce.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.slices import piece_of
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.tensor_parallel.collectives import (
    TOKENS,
    StageGroup,
    TPGroup,
    gather_shards,
    gather_tokens,
    local_index,
    piece_sizes,
    reduce_partial,
    reduce_to_tokens,
    split_shards,
    sum_gradients,
)
from lightning_hetero.runtime.tensor_parallel.cuts import ShardedModule, is_transposed
from lightning_hetero.runtime.tensor_parallel.logits import ShardedLogits
from lightning_hetero.runtime.tensor_parallel.styles import TPStyle

__all__ = ["RegionForward", "ShardedForward"]


class ShardedForward:
    """Replaces the forward of a sharded module; an object, so that it can be pickled."""

    def __init__(
        self, stage: StageGroup, layout: ModelLayout, item: ShardedModule, *, in_region: bool
    ) -> None:
        self._stage = stage
        self._item = item
        self._in_region = in_region
        self._forward = item.module.forward
        self._anchor = _find_anchor(layout, item.name, item.module)
        self._run = {
            TPStyle.COLWISE: self._colwise,
            TPStyle.GATHERED: self._gathered,
            TPStyle.VOCAB_LOSS: self._vocab_loss,
            TPStyle.ROWWISE: self._rowwise,
            TPStyle.SPLIT: self._split,
            TPStyle.EMBEDDING: self._embedding,
            TPStyle.EMBEDDING_FEATURES: self._embedding_features,
            TPStyle.EXPERTS: self._experts,
            TPStyle.LOCAL_SIZES: self._local_sizes,
        }[item.style]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module by its style if its weights are shards, else unchanged."""
        peers = self._stage.peers
        if peers is None or not _is_sharded(self._anchor):
            return self._forward(*args, **kwargs)
        return self._run(peers, *args, **kwargs)

    @property
    def _length(self) -> int:
        return self._anchor[3]

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor if self._in_region else self._stage.copied(tensor)

    def _summed(self, tensor: Tensor, peers: TPGroup) -> Tensor:
        if not self._in_region:
            return reduce_partial(tensor, peers)
        sizes = self._stage.token_sizes(tensor, whole=True)
        return reduce_to_tokens(tensor, TOKENS, sizes, peers)

    def _linear(self, tensor: Tensor, *, bias: bool = True) -> Tensor:
        """Run the module's own forward on its shard, without its bias if `bias` is False."""
        module: Any = self._item.module
        with _without_bias(module, active=not bias):
            if is_transposed(module):
                output: Tensor = tensor @ module.weight
                return output if module.bias is None else output.add(module.bias)
            result: Tensor = self._forward(tensor)
            return result

    def _colwise(self, _peers: TPGroup, tensor: Tensor) -> Tensor:
        return self._linear(self._copied(tensor))

    def _gathered(self, peers: TPGroup, tensor: Tensor) -> Tensor:
        output = self._colwise(peers, tensor)
        return gather_shards(output, -1, piece_sizes(self._length, peers.degree), peers)

    def _vocab_loss(self, peers: TPGroup, tensor: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._gathered(peers, tensor)
        return ShardedLogits.wrap(self._colwise(peers, tensor), peers, self._length)

    def _rowwise(self, peers: TPGroup, tensor: Tensor) -> Tensor:
        output = self._summed(self._linear(tensor, bias=False), peers)
        bias = self._item.module._parameters.get("bias")
        return output if bias is None else output + bias

    def _split(self, peers: TPGroup, tensor: Tensor) -> Tensor:
        sizes = piece_sizes(self._length, peers.degree)
        return self._rowwise(peers, split_shards(tensor, -1, sizes, peers))

    def _embedding(self, peers: TPGroup, ids: Tensor) -> Tensor:
        start, stop = piece_of(self._length, peers.tp_rank, peers.degree)
        own_ids, foreign = local_index(ids, self._length, peers)
        with _local_padding(self._item.module, start, stop):
            vectors = self._forward(own_ids)
        return reduce_partial(vectors.masked_fill(foreign[..., None], 0), peers)

    def _embedding_features(self, peers: TPGroup, ids: Tensor) -> Tensor:
        sizes = piece_sizes(self._length, peers.degree)
        return gather_shards(self._forward(ids), -1, sizes, peers)

    def _experts(self, peers: TPGroup, *args: Any) -> Tensor:
        inputs = (
            sum_gradients(arg, peers)
            if isinstance(arg, Tensor) and arg.is_floating_point() and not self._in_region
            else arg
            for arg in args
        )
        return self._summed(self._forward(*inputs), peers)

    def _local_sizes(self, peers: TPGroup, *args: Any, **kwargs: Any) -> Any:
        module = self._item.module
        whole = {name: getattr(module, name) for name in self._item.local_sizes}
        try:
            for name, size in whole.items():
                setattr(module, name, size // peers.degree)
            return self._forward(*args, **kwargs)
        finally:
            for name, size in whole.items():
                setattr(module, name, size)


class RegionForward:
    """Replaces the forward of a sharded region: gathers the tokens of its inputs first."""

    def __init__(
        self, stage: StageGroup, layout: ModelLayout, name: str, module: nn.Module
    ) -> None:
        self._stage = stage
        self._forward = module.forward
        self._anchor = _find_anchor(layout, name, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the region on all tokens if its weights are shards, else unchanged."""
        peers = self._stage.peers
        if peers is None or not _is_sharded(self._anchor):
            return self._forward(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            # Experts also get the tokens' routes, with as many rows as their states.
            rows = args[0].shape[TOKENS]
            tokens = [
                isinstance(arg, Tensor) and arg.ndim > 1 and arg.shape[TOKENS] == rows
                for arg in args
            ]
            gathered = (
                self._gather(arg, peers) if is_tokens else arg
                for arg, is_tokens in zip(args, tokens, strict=True)
            )
            return self._forward(*gathered, **kwargs)
        name = next(n for n, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point())
        return self._forward(*args, **{**kwargs, name: self._gather(kwargs[name], peers)})

    def _gather(self, tensor: Tensor, peers: TPGroup) -> Tensor:
        return gather_tokens(tensor, TOKENS, self._stage.token_sizes(tensor, whole=False), peers)


_Anchor = tuple[nn.Module, str, int, int]
"""(module, attribute, dim, whole length) of a weight that shows whether shards are held."""


def _find_anchor(layout: ModelLayout, name: str, module: nn.Module) -> _Anchor:
    inside = {id(item) for item in module.modules()}
    best: _Anchor | None = None
    for spec in layout.specs:
        for slot in layout.slots[spec.name]:
            if spec.tp_dim is None or id(slot.module) not in inside:
                continue
            found = slot.module, slot.attribute, spec.tp_dim, spec.cut_length
            if slot.attribute == "weight":
                return found
            best = best or found
    if best is None:
        raise ModelError(
            f"The tensor-parallel plan gives {name} a style, but shards none of its parameters. "
            "Give them styles too, or leave it out."
        )
    return best


def _is_sharded(anchor: _Anchor) -> bool:
    module, attribute, dim, length = anchor
    weight = module._parameters[attribute]
    return weight is not None and weight.shape[dim] != length


@contextmanager
def _without_bias(module: nn.Module, *, active: bool) -> Iterator[None]:
    bias = module._parameters.get("bias")
    if bias is None or not active:
        yield
        return
    module._parameters["bias"] = None
    try:
        yield
    finally:
        module._parameters["bias"] = bias


@contextmanager
def _local_padding(module: Any, start: int, stop: int) -> Iterator[None]:
    """Shift `padding_idx` to the shard's rows in this context; None if it isn't one of them."""
    whole = module.padding_idx
    if whole is None:
        yield
        return
    module.padding_idx = whole - start if start <= whole < stop else None
    try:
        yield
    finally:
        module.padding_idx = whole
