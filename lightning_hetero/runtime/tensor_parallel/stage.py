"""What the sharded modules of a stage share while it runs: the group, and the tokens at work.

Under sequence parallelism a hidden state is cut along its tokens where the stage begins, and put
together where it ends; tokens needn't be divisible by the degree.
"""

from typing import Any, Self

from torch import Tensor

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.tensor_parallel.collectives import (
    TPGroup,
    gather_shards,
    piece_sizes,
    split_shards,
    sum_gradients,
)

__all__ = ["TOKENS", "StageGroup"]

TOKENS = -2
"""Dim of the tokens in a hidden state, (…, tokens, features)."""


class StageGroup:
    """A rank's tensor-parallel group under the plan that runs, and the micro-batch at work in it.

    Args:
        sequence_parallel: Whether hidden states between sharded regions are cut along tokens.
    """

    def __init__(self, *, sequence_parallel: bool) -> None:
        self.peers: TPGroup | None = None
        """None where the stage has one rank."""
        self._sequence_parallel = sequence_parallel
        self._num_tokens = 0
        self._copied: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        # Copies of a module, such as averaged weights, run in the same group.
        return self

    def cuts_tokens(self) -> bool:
        """Return whether each rank of the group has some of the tokens between sharded regions."""
        return self.peers is not None and self._sequence_parallel

    def enter(self, hidden: Tensor) -> Tensor:
        """Return what the stage's first layer gets of a whole hidden state."""
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
        """Return the whole hidden state that the stage's last layer made."""
        self._copied = None
        if self.peers is None or not self.cuts_tokens():
            return hidden
        num_tokens = self._num_tokens
        sizes = piece_sizes(num_tokens, self.peers.degree)
        whole = gather_shards(hidden, TOKENS, sizes, self.peers)

        def restore(_: Tensor) -> None:
            # Layers that are computed again in backward must find their own micro-batch's length.
            self._num_tokens = num_tokens

        if whole.requires_grad:
            whole.register_hook(restore)  # type: ignore[no-untyped-call]
        return whole

    def token_sizes(self, tensor: Tensor, *, whole: bool) -> list[int]:
        """Return the ranks' tokens where rows are tokens, or several sequences' tokens."""
        assert self.peers is not None
        sizes = piece_sizes(self._num_tokens, self.peers.degree)
        own = self._num_tokens if whole else sizes[self.peers.tp_rank]
        # Experts see sequences end to end, (sequences · tokens, features).
        return [size * (tensor.shape[TOKENS] // own) for size in sizes]

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a whole input for sharded weights; siblings with one input share its gradient."""
        assert self.peers is not None
        if self._copied is None or self._copied[0] is not tensor:
            self._copied = tensor, sum_gradients(tensor, self.peers)
        return self._copied[1]
