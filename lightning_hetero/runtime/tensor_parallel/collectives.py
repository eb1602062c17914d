"""Differentiable collectives of a tensor-parallel group, and the group's state on a rank.

On a rank of the group a tensor is *whole* (the same on all ranks), a *shard* (the rank's piece
along one dim) or *partial* (a summand). Each function converts one kind into another, and its
backward converts the gradient: the gradient of a whole tensor that is used with shards of weights
is partial, the gradient of a sum is whole. (These are Megatron-LM's operators f and g, and their
versions for sharded tokens.) All ranks of the group call them in the same order.

A length need not be divisible by the group's size: see `exchange.slices.piece_of`. Under sequence
parallelism an activation is cut along its tokens where a stage begins, and gathered where it ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.errors import ModelError
from lightning_hetero.exchange.slices import piece_of
from lightning_hetero.runtime.ranks.communicators import all_gather_single, reduce_scatter_single

_Step = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class TPGroup:
    """One stage's tensor-parallel group as one of its ranks sees it."""

    group: dist.ProcessGroup | None
    degree: int
    tp_rank: int
    positions: tuple[int, ...]
    """For each `tp_rank` the rank in the communicator, where members are in order of global
    rank."""


def piece_sizes(length: int, count: int) -> list[int]:
    """Return the sizes of `count` pieces of a length."""
    pieces = (piece_of(length, index, count) for index in range(count))
    return [stop - start for start, stop in pieces]


def local_index(index: Tensor, length: int, peers: TPGroup) -> tuple[Tensor, Tensor]:
    """Return indices into this rank's piece of a length, and a mask of those in others' pieces.

    Masked indices are 0. Indices outside of the length stay out of range on every rank, so that a
    lookup refuses them, as it does without tensor parallelism.

    Raises:
        IndexError: An index is outside of the length; only on a CPU, where checking needs no wait.
    """
    start, stop = piece_of(length, peers.tp_rank, peers.degree)
    exists = (index >= 0) & (index < length)
    if index.is_cpu and not exists.all():
        raise IndexError(f"Index {int(index[~exists][0])} is out of range: there are {length}.")
    foreign = exists & ((index < start) | (index >= stop))
    return (index - start).masked_fill(foreign, 0), foreign


def _all_reduce(tensor: Tensor, peers: TPGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=peers.group)
    return total


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _all_gather(tensor: Tensor, dim: int, sizes: Sequence[int], peers: TPGroup) -> Tensor:
    own = _padded(tensor, dim, max(sizes)).contiguous()
    stacked = own.new_empty((peers.degree, *own.shape))
    all_gather_single(stacked.view(-1), own.view(-1), peers.group)
    pieces = zip(peers.positions, sizes, strict=True)
    return torch.cat([stacked[place].narrow(dim, 0, size) for place, size in pieces], dim)


def _reduce_scatter(tensor: Tensor, dim: int, sizes: Sequence[int], peers: TPGroup) -> Tensor:
    largest = max(sizes)
    pieces = torch.split(tensor, list(sizes), dim)
    by_place = sorted(zip(peers.positions, pieces, strict=True), key=lambda pair: pair[0])
    stacked = torch.stack([_padded(piece, dim, largest) for _, piece in by_place])
    own = torch.empty_like(stacked[0], memory_format=torch.contiguous_format)
    reduce_scatter_single(own.view(-1), stacked.view(-1), peers.group)
    return own.narrow(dim, 0, sizes[peers.tp_rank])


def _own_piece(tensor: Tensor, dim: int, sizes: Sequence[int], peers: TPGroup) -> Tensor:
    start = sum(sizes[: peers.tp_rank])
    return tensor.narrow(dim, start, sizes[peers.tp_rank]).contiguous()


def _as_it_is(tensor: Tensor, _peers: TPGroup) -> Tensor:
    return tensor.view_as(tensor)


class _Move(torch.autograd.Function):
    """Applies one function to a tensor in forward, and another to its gradient in backward.

    Both get the same arguments after the tensor.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Step, back: _Step, *arguments: Any) -> Tensor:
        ctx.back, ctx.arguments = back, arguments
        return there(tensor, *arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, *ctx.arguments), None, None, *[None for _ in ctx.arguments]


def _run_move(tensor: Tensor, there: _Step, back: _Step, *arguments: Any) -> Tensor:
    return _Move.apply(tensor, there, back, *arguments)  # type: ignore[no-any-return, no-untyped-call]


# torch 2.11 would compile the sums in backward, too, and compute different gradients.
_move: Callable[..., Tensor] = torch.compiler.disable(_run_move)  # type: ignore[no-untyped-call]


def sum_gradients(tensor: Tensor, peers: TPGroup) -> Tensor:
    """Return a whole tensor unchanged; backward sums its partial gradients over the group."""
    return _move(tensor, _as_it_is, _all_reduce, peers)


def reduce_partial(tensor: Tensor, peers: TPGroup) -> Tensor:
    """Return the whole sum of the ranks' partial tensors."""
    return _move(tensor, _all_reduce, _as_it_is, peers)


def gather_shards(tensor: Tensor, dim: int, sizes: Sequence[int], peers: TPGroup) -> Tensor:
    """Return the whole tensor of the ranks' shards, for uses that are the same on all ranks."""
    return _move(tensor, _all_gather, _own_piece, dim, sizes, peers)


def split_shards(tensor: Tensor, dim: int, sizes: Sequence[int], peers: TPGroup) -> Tensor:
    """Return this rank's shard of a whole tensor; backward gathers the gradient."""
    return _move(tensor, _own_piece, _all_gather, dim, sizes, peers)


def gather_tokens(tensor: Tensor, dim: int, sizes: Sequence[int], peers: TPGroup) -> Tensor:
    """Return all tokens from the ranks' shards of them, for uses with shards of weights."""
    return _move(tensor, _all_gather, _reduce_scatter, dim, sizes, peers)


def reduce_to_tokens(tensor: Tensor, dim: int, sizes: Sequence[int], peers: TPGroup) -> Tensor:
    """Return this rank's tokens of the sum of the ranks' partial tensors."""
    return _move(tensor, _reduce_scatter, _all_gather, dim, sizes, peers)


TOKENS = -2
"""Dim of the tokens in an activation, (…, tokens, features)."""


class StageGroup:
    """A rank's tensor-parallel group under the plan that runs, and its current micro-batch."""

    def __init__(self, *, sequence_parallel: bool) -> None:
        self.peers: TPGroup | None = None
        """The group; None if the stage has one rank."""
        self._sequence_parallel = sequence_parallel
        self._num_tokens = 0
        self._copied: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        # Copies of a module, such as averaged weights, run in the same group.
        return self

    def cuts_tokens(self) -> bool:
        """Return whether the group's ranks divide the tokens between sharded regions."""
        return self.peers is not None and self._sequence_parallel

    def enter(self, hidden: Tensor) -> Tensor:
        """Return what the first layer gets of a whole activation: all, or this rank's tokens."""
        self._copied = None
        if self.peers is None or not self.cuts_tokens():
            return hidden
        self._num_tokens = hidden.shape[TOKENS]
        if self._num_tokens < self.peers.degree:
            raise ModelError(
                f"Sequence parallelism of degree {self.peers.degree} needs at least as many tokens "
                f"in a sequence, but one has {self._num_tokens}. Drop shorter ones, or pack them."
            )
        sizes = piece_sizes(self._num_tokens, self.peers.degree)
        return split_shards(hidden, TOKENS, sizes, self.peers)

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the last layer's output as a whole activation; gathers tokens if they are cut."""
        self._copied = None
        if self.peers is None or not self.cuts_tokens():
            return hidden
        num_tokens = self._num_tokens
        sizes = piece_sizes(num_tokens, self.peers.degree)
        whole = gather_shards(hidden, TOKENS, sizes, self.peers)

        def restore(_: Tensor) -> None:
            # Layers that are recomputed in backward need their own micro-batch's length.
            self._num_tokens = num_tokens

        if whole.requires_grad:
            whole.register_hook(restore)  # type: ignore[no-untyped-call]
        return whole

    def form_of_whole(self, hidden: Tensor) -> Tensor:
        """Return a meta tensor with the shape and dtype of the whole activation of a piece."""
        shape = list(hidden.shape)
        shape[TOKENS] = self._num_tokens
        return torch.empty(shape, dtype=hidden.dtype, device="meta")

    def token_sizes(self, tensor: Tensor, *, whole: bool) -> list[int]:
        """Return each rank's number of rows along TOKENS; `whole` if `tensor` has those of all."""
        assert self.peers is not None
        sizes = piece_sizes(self._num_tokens, self.peers.degree)
        own = self._num_tokens if whole else sizes[self.peers.tp_rank]
        # Experts get sequences concatenated: (sequences · tokens, features).
        return [size * (tensor.shape[TOKENS] // own) for size in sizes]

    def copied(self, tensor: Tensor) -> Tensor:
        """Return `sum_gradients` of a tensor; modules with the same input share one all-reduce."""
        assert self.peers is not None
        if self._copied is None or self._copied[0] is not tensor:
            self._copied = tensor, sum_gradients(tensor, self.peers)
        return self._copied[1]
