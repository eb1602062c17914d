"""Wrap the forwards of sharded modules.

A wrapper checks the module's present weights. If they are whole (degree 1, a stub of another stage,
a probe), the module runs unchanged. If they are shards, inputs and outputs go through the group's
collectives, so that activations outside sharded modules are the same on all of its ranks.

Under sequence parallelism the activation outside sharded regions is cut along the tokens: a
region gathers them where it begins, and reduce-scatters where it ends, instead of an all-reduce.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.exchange.slices import ParameterSpec, piece_of
from lightning_hetero.runtime.setup.layout import ModelLayout, Slot
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
from lightning_hetero.runtime.tensor_parallel.heads import Heads
from lightning_hetero.runtime.tensor_parallel.styles import ROWS, TPStyle, layer_of


class _GroupForward:
    """Replaces a module's forward where its weights are shards; an object, so it can be pickled."""

    _run: Callable[..., Any]
    """Runs the module on this rank of a group."""

    def __init__(
        self, stage: StageGroup, layout: ModelLayout, module: nn.Module, anchored_at: str
    ) -> None:
        self._stage = stage
        self._module = module
        self._forward = module.forward
        self._anchor = _Anchor.of(layout, anchored_at)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module for this rank of its group if its weights are shards, else unchanged."""
        peers = self._stage.peers
        if peers is None or not self._anchor.is_cut:
            return self._forward(*args, **kwargs)
        return self._run(peers, *args, **kwargs)


class ShardedForward(_GroupForward):
    """Runs a sharded module as its style says."""

    def __init__(
        self, stage: StageGroup, layout: ModelLayout, item: ShardedModule, *, in_region: bool
    ) -> None:
        is_beside = item.style in (TPStyle.DROPOUT, TPStyle.DORA)
        super().__init__(
            stage, layout, item.module, layer_of(item.name) if is_beside else item.name
        )
        self._item = item
        self._in_region = in_region
        forwards: dict[TPStyle, Callable[..., Any]] = {
            TPStyle.COLWISE: self._colwise,
            TPStyle.GATHERED: self._gathered,
            TPStyle.ROWWISE: self._rowwise,
            TPStyle.SPLIT: self._split,
            TPStyle.EMBEDDING: self._embedding,
            TPStyle.EMBEDDING_FEATURES: self._embedding_features,
            TPStyle.EXPERTS: self._experts,
            TPStyle.LOCAL_SIZES: self._local_sizes,
            TPStyle.DROPOUT: self._dropout,
            TPStyle.DORA: self._dora,
        }
        self._run = forwards[item.style]

    @property
    def _length(self) -> int:
        return self._anchor.spec.cut_length

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor if self._in_region else self._stage.copied(tensor)

    def _summed(self, tensor: Tensor, peers: TPGroup) -> Tensor:
        if not self._in_region:
            return reduce_partial(tensor, peers)
        sizes = self._stage.token_sizes(tensor, whole=True)
        return reduce_to_tokens(tensor, TOKENS, sizes, peers)

    def _linear(self, tensor: Tensor, *, bias: bool = True) -> Tensor:
        """Run the module's own forward on its shard, without its bias if `bias` is False."""
        module: Any = self._module
        with _attributes(module, {} if bias else {"bias": None}):
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

    def _rowwise(self, peers: TPGroup, tensor: Tensor) -> Tensor:
        output = self._summed(self._linear(tensor, bias=False), peers)
        bias = self._module._parameters.get("bias")
        return output if bias is None else output + bias

    def _split(self, peers: TPGroup, tensor: Tensor) -> Tensor:
        sizes = piece_sizes(self._length, peers.degree)
        return self._rowwise(peers, split_shards(tensor, -1, sizes, peers))

    def _embedding(self, peers: TPGroup, ids: Tensor) -> Tensor:
        start, stop = piece_of(self._length, peers.tp_rank, peers.degree)
        own_ids, foreign = local_index(ids, self._length, peers)
        module: Any = self._module
        padding = None if module.padding_idx is None else module.padding_idx - start
        is_here = padding is not None and 0 <= padding < stop - start
        with _attributes(module, {"padding_idx": padding if is_here else None}):
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
        module = self._module
        sizes = {name: getattr(module, name) // peers.degree for name in self._item.local_sizes}
        with _attributes(module, sizes):
            return self._forward(*args, **kwargs)

    def _dropout(self, peers: TPGroup, tensor: Tensor) -> Tensor:
        """Apply dropout to this rank's features, as it would apply to the whole input."""
        spec = self._anchor.spec
        kept = self._forward(tensor.new_ones(*tensor.shape[:-1], spec.cut_length))
        own = [kept[..., slice(*rows)] for rows in spec.rows_of(peers.tp_rank, peers.degree)]
        return tensor * torch.cat(own, -1)

    def _dora(
        self,
        peers: TPGroup,
        tensor: Tensor,
        *,
        base_layer: Any,
        base_result: Tensor | None = None,
        **adapter: Any,
    ) -> Tensor:
        """Return what DoRA adds to the base layer's output (Liu et al. 2024, section 4.3).

        Norms are those of whole rows of the changed weight.
        """
        style = base_layer.forward.style
        first, second, scaling = (adapter[name] for name in ("lora_A", "lora_B", "scaling"))
        with torch.no_grad():
            weight = base_layer.weight.to(tensor.dtype)
            weight = weight.T if is_transposed(base_layer) else weight
            change = (second.weight @ first.weight).to(tensor.dtype)
            squares = (weight + scaling * change).square().sum(1)
            if style in ROWS:
                squares = reduce_partial(squares, peers)
            norm = self._outside(squares.sqrt(), style, peers)
        scale = self._module.get_parameter("weight") / norm
        result: Tensor = base_layer(tensor) if base_result is None else base_result
        if base_layer.bias is not None:
            result = result - self._outside(base_layer.bias, style, peers)
        added: Tensor = (scale - 1) * result + scale * second(first(tensor)) * scaling
        return added

    def _outside(self, rows: Tensor, style: TPStyle, peers: TPGroup) -> Tensor:
        """Return a vector of output features, cut or gathered as the layer's outputs are."""
        if style is not TPStyle.GATHERED:
            return rows
        return gather_shards(rows, 0, piece_sizes(self._length, peers.degree), peers)

    @property
    def style(self) -> TPStyle:
        """The module's style."""
        return self._item.style


class SharedHeadsForward(_GroupForward):
    """Runs a layer with shared heads, or the attention module around it, on the rank's heads.

    The layer's output then repeats each head as often as `Heads.read` says, so that the same number
    of query heads reads each copy, as the attention module expects.
    """

    def __init__(
        self,
        stage: StageGroup,
        layout: ModelLayout,
        heads: Heads,
        module: nn.Module,
        *,
        outer: bool,
    ) -> None:
        super().__init__(stage, layout, module, heads.attention)
        self._heads = heads
        self._outer = outer

    def _run(self, peers: TPGroup, *args: Any, **kwargs: Any) -> Any:
        index, run = self._heads.read(peers.tp_rank, peers.degree)
        if not self._outer:
            return self._heads.repeat(self._forward(*args, **kwargs), index)
        assert self._heads.attribute is not None
        with _attributes(self._module, {self._heads.attribute: run}):
            return self._forward(*args, **kwargs)


class RegionForward(_GroupForward):
    """Runs a sharded region on all tokens: gathers those of its inputs first."""

    def _run(self, peers: TPGroup, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Tensor):
            tensors = (n for n, v in kwargs.items() if isinstance(v, Tensor))
            name = next(n for n in tensors if kwargs[n].is_floating_point())
            return self._forward(*args, **{**kwargs, name: self._gather(kwargs[name], peers)})
        # Experts also get the routes of tokens, which have as many rows.
        rows = args[0].shape[TOKENS]
        gathered = (
            self._gather(arg, peers)
            if isinstance(arg, Tensor) and arg.ndim > 1 and arg.shape[TOKENS] == rows
            else arg
            for arg in args
        )
        return self._forward(*gathered, **kwargs)

    def _gather(self, tensor: Tensor, peers: TPGroup) -> Tensor:
        return gather_tokens(tensor, TOKENS, self._stage.token_sizes(tensor, whole=False), peers)


@dataclass(frozen=True)
class _Anchor:
    """A weight that shows whether a module computes with shards."""

    module: nn.Module
    attribute: str
    spec: ParameterSpec

    @classmethod
    def of(cls, layout: ModelLayout, name: str) -> "_Anchor":
        """Find the weight that belongs to a module, or else to the nearest module around it.

        A weight with shared heads may be whole on every rank, and doesn't tell.

        Raises:
            ModelError: The module has no sharded weight.
        """
        sharded = [spec for spec in layout.specs if spec.tp_dim is not None]
        cut = [(slot, spec) for spec in sharded for slot in layout.slots[spec.name]]
        found = _inside(cut, name)
        if not found:
            raise ModelError(
                f"The tensor-parallel plan gives {name} a style, but shards none of its "
                "parameters. Give them styles too, or leave it out."
            )
        while not (clear := [pair for pair in found if pair[1].tp_readers == 1]):
            name = name.rpartition(".")[0]
            found = _inside(cut, name)
        slot, spec = min(clear, key=lambda pair: pair[0].attribute != "weight")
        return cls(slot.module, slot.attribute, spec)

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds a shard of the weight."""
        weight = self.module._parameters[self.attribute]
        return weight is not None and weight.shape[self.spec.cut_dim] != self.spec.cut_length


def _inside(
    cut: Sequence[tuple[Slot, ParameterSpec]], name: str
) -> list[tuple[Slot, ParameterSpec]]:
    return [pair for pair in cut if not name or pair[0].name.startswith(f"{name}.")]


@contextmanager
def _attributes(module: nn.Module, values: Mapping[str, int | None]) -> Iterator[None]:
    """Context in which a module's attributes have other values."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
