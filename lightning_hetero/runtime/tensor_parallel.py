"""Run the layers of a stage on a tensor-parallel group, whatever its degree is.

The forward of every module that a `ShardingPlan` names is wrapped once. It looks at the weights it
finds: if they are whole (degree 1, a stub of another stage, a probe), the module runs as it is. If
they are shards, inputs and outputs pass through the group's collectives, so that everything outside
sharded modules is the same on all ranks of the group: Megatron-LM's scheme on plain local tensors.
So one run may mix degrees, and another plan needs no other module.

With sequence parallelism the hidden state between sharded regions (attention, MLP) is itself cut
along the tokens: a region gathers them where it begins and scatters the sum where it ends, in place
of an all-reduce, and gradients of norms outside the regions are summands of one rank's tokens.

Random numbers are drawn alike on all ranks of a group. So dropout on whole activations is the same
on all, and dropout inside a region (attention probabilities) draws the same numbers for the heads
of one rank as for those of another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.communicators import Communicators
from lightning_hetero.runtime.layout import ModelLayout
from lightning_hetero.runtime.tp_collectives import (
    TPGroup,
    gather_shards,
    gather_tokens,
    piece_of,
    piece_sizes,
    reduce_partial,
    reduce_to_tokens,
    split_shards,
    sum_gradients,
)
from lightning_hetero.runtime.tp_logits import ShardedLogits
from lightning_hetero.runtime.tp_plan import ShardedModule, ShardingPlan, TPStyle, is_transposed
from lightning_hetero.runtime.tp_regions import find_regions, with_partial_gradients

__all__ = ["TensorParallel"]

_TOKENS = -2
"""Hidden states are (…, tokens, features)."""
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
_UNWRAPPED = (TPStyle.PARTIAL, TPStyle.REPLICATE)


class TensorParallel:
    """The sharded modules of one model, and the group that this rank is in.

    Args:
        root: The user's module, its parameters still whole.
        layout: Its layers and parameters.
        option: A plan by names; None to take the module's own.
        sequence_parallel: Whether hidden states between sharded regions are cut along tokens.

    Raises:
        ModelError, ConfigurationError: See `ShardingPlan.of`.
    """

    def __init__(
        self,
        root: nn.Module,
        layout: ModelLayout,
        *,
        option: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        sharding = ShardingPlan.of(root, layout, option)
        self.layout = sharding.annotate(layout)
        self.sequence_parallel = sequence_parallel
        self.peers: TPGroup | None = None
        self.num_tokens = 0
        """Tokens of the micro-batch at work, for shards of them."""
        self._largest = _largest_degree(root, self.layout, sharding.modules)
        self._copied: tuple[Tensor, Tensor] | None = None
        self._wrapped: list[tuple[nn.Module, Any]] = []
        regions: dict[str, nn.Module] = {}
        if sequence_parallel:
            regions = find_regions(root, self.layout, sharding)
            self.layout = with_partial_gradients(self.layout, regions)
        for item in sharding.modules:
            inside = any(item.name == r or item.name.startswith(f"{r}.") for r in regions)
            if item.style not in _UNWRAPPED:
                self._wrap(item.module, _ShardedForward(self, item, in_region=inside))
        for name, module in regions.items():
            self._wrap(module, _RegionForward(self, name, module))

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        # Copies of a module, such as averaged weights, run in the same group.
        return self

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module, own in reversed(self._wrapped):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own
        self._wrapped.clear()

    def enter_plan(self, plan: ParallelPlan, comms: Communicators) -> None:
        """Take this rank's place in a plan; collective where the plan has new groups.

        Raises:
            ModelError: A degree doesn't divide heads or features.
        """
        self.check_degrees(plan)
        group = comms.tensor_parallel_group(plan)
        place = plan.place(comms.global_rank)
        self.peers = None
        if group is not None and place is not None:
            ranks = plan.pipelines[place.pipeline_index].stages[place.stage_index].ranks
            self.peers = TPGroup(
                group=group,
                degree=len(ranks),
                tp_rank=place.tp_rank,
                positions=tuple(sorted(ranks).index(rank) for rank in ranks),
            )

    def check_degrees(self, plan: ParallelPlan) -> None:
        """Raise ModelError unless every degree of the plan divides heads and features."""
        name, largest = self._largest
        for index, pipeline in enumerate(plan.pipelines):
            if largest % pipeline.tp_degree:
                able = [str(d) for d in range(1, largest + 1) if largest % d == 0]
                raise ModelError(
                    f"Pipeline {index} has tensor-parallel degree {pipeline.tp_degree}, which "
                    f"{name} can't be cut into. Degrees that work for this model: "
                    f"{', '.join(able)}."
                )

    # -- hidden states at the ends of a stage ---------------------------------------------------

    def enter_stage(self, hidden: Tensor) -> Tensor:
        """Return what the stage's first layer gets of a whole hidden state."""
        self._copied = None
        if self.peers is None or not self.sequence_parallel:
            return hidden
        self.num_tokens = hidden.shape[_TOKENS]
        if self.num_tokens < self.peers.degree:
            raise ModelError(
                f"Sequence parallelism of degree {self.peers.degree} needs at least as many tokens "
                f"in a sequence, but one has {self.num_tokens}. Drop shorter ones, or pack them."
            )
        sizes = piece_sizes(self.num_tokens, self.peers.degree)
        return split_shards(hidden, _TOKENS, sizes, self.peers)

    def leave_stage(self, hidden: Tensor) -> Tensor:
        """Return the whole hidden state that the stage's last layer made."""
        self._copied = None
        if self.peers is None or not self.sequence_parallel:
            return hidden
        num_tokens = self.num_tokens
        sizes = piece_sizes(num_tokens, self.peers.degree)
        whole = gather_shards(hidden, _TOKENS, sizes, self.peers)

        def restore(_: Tensor) -> None:
            # Layers that are computed again in backward must find their own micro-batch's length.
            self.num_tokens = num_tokens

        if whole.requires_grad:
            whole.register_hook(restore)  # type: ignore[no-untyped-call]
        return whole

    # -- what wrapped modules call --------------------------------------------------------------

    def token_sizes(self, tensor: Tensor, *, whole: bool) -> list[int]:
        """Return the ranks' tokens where rows are tokens, or several sequences' tokens."""
        assert self.peers is not None
        sizes = piece_sizes(self.num_tokens, self.peers.degree)
        own = self.num_tokens if whole else sizes[self.peers.tp_rank]
        # Experts see sequences end to end, (sequences · tokens, features).
        return [size * (tensor.shape[_TOKENS] // own) for size in sizes]

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a whole input for sharded weights; siblings with one input share its gradient."""
        assert self.peers is not None
        if self._copied is None or self._copied[0] is not tensor:
            self._copied = tensor, sum_gradients(tensor, self.peers)
        return self._copied[1]


def _largest_degree(
    root: nn.Module, layout: ModelLayout, modules: Sequence[ShardedModule]
) -> tuple[str, int]:
    """Return the largest possible degree, and the name of a parameter that limits it.

    A parameter limits it to its features, or to its heads where the module around it has heads.
    """
    styles = {item.name: item.style for item in modules}
    limits: dict[str, int] = {}
    for spec in layout.specs:
        if spec.tp_dim is None or spec.tp_uneven:
            continue
        features = spec.cut_length // spec.tp_blocks
        limits[spec.name] = features
        owner = spec.name.rpartition(".")[0]
        if styles.get(owner) is TPStyle.COLWISE:
            for what, count in _heads(root.get_submodule(owner.rpartition(".")[0]), features):
                limits[f"{spec.name} ({count} {what})"] = count
    largest = gcd(*limits.values()) if limits else 0
    name = min(limits, key=lambda item: (limits[item], item), default="")
    return name, largest


def _heads(attention: nn.Module, features: int) -> Iterator[tuple[str, int]]:
    size = next((s for n in _HEAD_DIMS if isinstance(s := getattr(attention, n, None), int)), None)
    if size is None:
        return
    if features % size == 0:
        yield "heads", features // size
    config = getattr(attention, "config", None)
    for attribute, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "KV heads")):
        count = getattr(config, attribute, None)
        if isinstance(count, int):
            yield what, count


class _ShardedForward:
    """Stands in for the forward of a sharded module; an object, so that it can be pickled."""

    def __init__(self, owner: TensorParallel, item: ShardedModule, *, in_region: bool) -> None:
        self._owner = owner
        self._item = item
        self._in_region = in_region
        self._forward = item.module.forward
        self._anchor = _find_anchor(owner.layout, item.name, item.module)
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
        peers = self._owner.peers
        if peers is None or not _is_sharded(self._anchor):
            return self._forward(*args, **kwargs)
        return self._run(peers, *args, **kwargs)

    @property
    def _length(self) -> int:
        return self._anchor[3]

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor if self._in_region else self._owner.copied(tensor)

    def _summed(self, tensor: Tensor, peers: TPGroup) -> Tensor:
        if not self._in_region:
            return reduce_partial(tensor, peers)
        sizes = self._owner.token_sizes(tensor, whole=True)
        return reduce_to_tokens(tensor, _TOKENS, sizes, peers)

    def _linear(self, tensor: Tensor, *, bias: bool = True) -> Tensor:
        """Run the module itself on its shard."""
        module: Any = self._item.module
        with _without_bias(module, active=not bias):
            if is_transposed(module):
                output: Tensor = tensor @ module.weight
                return output if module.bias is None else output.add(module.bias)
            result: Tensor = self._forward(tensor)
            return result

    def _colwise(self, peers: TPGroup, tensor: Tensor) -> Tensor:
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
        foreign = (ids < start) | (ids >= stop)
        with _local_padding(self._item.module, start, stop):
            vectors = self._forward((ids - start).masked_fill(foreign, 0))
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


class _RegionForward:
    """Gathers the tokens of a sharded region's inputs."""

    def __init__(self, owner: TensorParallel, name: str, module: nn.Module) -> None:
        self._owner = owner
        self._forward = module.forward
        self._anchor = _find_anchor(owner.layout, name, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        peers = self._owner.peers
        if peers is None or not _is_sharded(self._anchor):
            return self._forward(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            # Experts get the tokens' routes besides their states, as many rows of each.
            rows = args[0].shape[_TOKENS]
            tokens = [
                isinstance(arg, Tensor) and arg.ndim > 1 and arg.shape[_TOKENS] == rows
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
        return gather_tokens(tensor, _TOKENS, self._owner.token_sizes(tensor, whole=False), peers)


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
    """Count the padding index, whose vector gets no gradient, from the shard's first row."""
    whole = module.padding_idx
    if whole is None:
        yield
        return
    module.padding_idx = whole - start if start <= whole < stop else None
    try:
        yield
    finally:
        module.padding_idx = whole
