"""Carry hidden states forward and their gradients backward between the stages of a pipeline.

Forward and backward use communicators of their own, and each carries micro-batches in the order of
the schedule, so under NCCL's rules (in order per communicator, a send ends with its receive) no
stage waits for one that waits for it. The gradient that the next action needs is received while
the current one still computes: its shape is that of the hidden state sent before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.runtime.clock import ComputeClock

__all__ = ["ActivationLink"]


@dataclass
class _Posted:
    """A receive under way."""

    buffer: Tensor
    work: dist.Work


class ActivationLink:
    """One rank's two neighbours in its pipeline.

    Args:
        previous: Global rank that holds the stage before with the same `tp_rank`; None if first.
        following: The same for the stage behind; None if last.
        forward_group: Communicator of hidden states.
        backward_group: Communicator of their gradients.
        clock: Times the waits.
    """

    def __init__(
        self,
        *,
        previous: int | None,
        following: int | None,
        forward_group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
        clock: ComputeClock,
    ) -> None:
        self.previous = previous
        self.following = following
        self._forward_group = forward_group
        self._backward_group = backward_group
        self._clock = clock
        self._gradients: dict[int, _Posted] = {}
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def receive_hidden(self, like: Tensor) -> Tensor:
        """Return the next hidden state, of the shape and dtype of `like`."""
        assert self.previous is not None
        posted = self._post(like.shape, like.dtype, like.device, forward=True)
        return self._wait(posted, self.previous)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send a hidden state to the stage behind, without waiting for it."""
        assert self.following is not None
        self._send(hidden, self.following, self._forward_group)

    def expect_gradient(self, microbatch_index: int, like: Tensor) -> None:
        """Begin to receive the gradient of a hidden state, if that hasn't begun yet."""
        if microbatch_index not in self._gradients:
            self._gradients[microbatch_index] = self._post(
                like.shape, like.dtype, like.device, forward=False
            )

    def receive_gradient(self, microbatch_index: int) -> Tensor:
        """Return the gradient of a hidden state that was sent."""
        assert self.following is not None
        return self._wait(self._gradients.pop(microbatch_index), self.following)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of a hidden state back, without waiting for it."""
        assert self.previous is not None
        self._send(gradient, self.previous, self._backward_group)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _wait(self, posted: _Posted, peer: int) -> Tensor:
        self._clock.wait_for(posted.work, peer=peer, num_bytes=posted.buffer.nbytes)
        return posted.buffer

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=group)
        assert work is not None
        self._sends.append((work, tensor))

    def _post(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, forward: bool
    ) -> _Posted:
        buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
        peer = self.previous if forward else self.following
        group = self._forward_group if forward else self._backward_group
        work = dist.irecv(buffer, peer, group=group)
        assert work is not None
        return _Posted(buffer, work)
