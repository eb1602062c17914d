"""Carry activations forward and their gradients backward between the stages of a pipeline.

Forward and backward use communicators of their own, and each carries micro-batches in the order of
the schedule, so under NCCL's rules (in order per communicator, a send ends with its receive) no
stage waits for one that waits for it.

Only the sender knows what its layers made of a micro-batch, so a header goes ahead of each
activation, on the CPU: shapes, dtypes and what layers left. A micro-batch costs two messages
forward and one backward at each boundary; where side tensors travel too, they are packed into one
more each way. The gradient that the next action needs is received while the current one still
computes: it looks like what was sent.

What is sent is let go once it has arrived: at most `MAX_KEPT_SENDS` are kept in each direction,
however many micro-batches there are. In 1F1B the older ones have arrived by then, so waiting for
them costs nothing; in passes forward only it keeps a fast stage from running ahead.
"""

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.actions import MAX_KEPT_SENDS
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.ranks.communicators import Communicators

__all__ = ["ActivationLink", "Handover"]

HEADER_BYTES = 512
"""Of a header; a longer one takes a second message."""
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 16
"""Of packed tensors, so that each can be viewed in its own dtype."""


class _Form(NamedTuple):
    """The form of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Handover:
    """All that a stage hands to the next one for one micro-batch."""

    tensors: list[Tensor] = field(default_factory=list)
    """The activation, then side tensors of all layers before; see `side_tensors`."""
    left: list[bytes] = field(default_factory=list)
    """For each layer before, what it left; refers to side tensors by their index."""
    forms: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    """For each layer before, shape and dtype of the hidden state that it returned."""
    changes_input: bool = False
    """Whether the model's first layer changes its input in place, which later stages don't see."""

    def copy(self) -> "Handover":
        """Return one to which a stage adds its own."""
        return Handover([*self.tensors], [*self.left], [*self.forms], self.changes_input)


@dataclass
class _Posted:
    """Receives under way: the first tensor by itself, the others packed."""

    forms: tuple[_Form, ...]
    works: list[tuple[dist.Work, Tensor]]
    buffers: list[Tensor]

    def tensors(self) -> list[Tensor]:
        if not self.forms:
            return []
        first = self.buffers[0].view(self.forms[0].dtype).view(self.forms[0].shape)
        return [first, *_unpack(self.buffers[1:], self.forms[1:])]


class ActivationLink:
    """One rank's two neighbours in its pipeline.

    Args:
        previous: Global rank that holds the stage before with the same `tp_rank`; None if first.
        following: The same for the next stage; None if last.
        comms: Forward and backward carry activations and gradients, control the headers.
        device: Where activations lie.
        clock: Times the waits.
    """

    def __init__(
        self,
        *,
        previous: int | None,
        following: int | None,
        comms: Communicators,
        device: torch.device,
        clock: ComputeClock,
    ) -> None:
        self.previous = previous
        self.following = following
        self._comms = comms
        self._device = device
        self._clock = clock
        self._gradients: dict[int, _Posted] = {}
        self._sent_forward = _Sends()
        self._sent_backward = _Sends()

    def receive_activation(self) -> Handover:
        """Return what the stage before hands on for its next micro-batch.

        The tensors ask for gradients where those sent did.
        """
        assert self.previous is not None
        forms, *rest = self._receive_header(self.previous)
        received = self._wait(self._post(forms, self.previous, self._comms.forward), self.previous)
        for tensor, form in zip(received, forms, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return Handover(received, *rest)

    def send_activation(self, sent: Handover) -> None:
        """Hand a micro-batch on to the next stage, without waiting for it."""
        assert self.following is not None
        self._clock.before_send()
        forms = tuple(map(_form_of, sent.tensors))
        header = pickle.dumps((forms, sent.left, sent.forms, sent.changes_input))
        self._sent_forward.make_room(self._clock)
        sends = [(self._comms.control, part) for part in _frame(header)]
        sends += [(self._comms.forward, part) for part in _payload(sent.tensors)]
        self._sent_forward.add(sends, self.following)

    def expect_gradient(self, microbatch_index: int, sent: Sequence[Tensor]) -> None:
        """Begin to receive the gradients of what was sent, if that hasn't begun yet."""
        assert self.following is not None
        if microbatch_index not in self._gradients:
            forms = tuple(map(_form_of, sent))
            posted = self._post(forms, self.following, self._comms.backward)
            self._gradients[microbatch_index] = posted

    def receive_gradient(self, microbatch_index: int) -> list[Tensor]:
        """Return the gradients of what was sent, in its order."""
        assert self.following is not None
        return self._wait(self._gradients.pop(microbatch_index), self.following)

    def send_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of what was received back, without waiting for them."""
        assert self.previous is not None
        self._clock.before_send()
        self._sent_backward.make_room(self._clock)
        sends = [(self._comms.backward, part) for part in _payload(gradients)]
        self._sent_backward.add(sends, self.previous)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._sent_forward.clear()
        self._sent_backward.clear()

    def _receive_header(self, peer: int) -> Any:
        frame = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._wait_for_header(frame, peer)
        data = frame.numpy().tobytes()
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        data = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(data) < length:
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._wait_for_header(rest, peer)
            data += rest.numpy().tobytes()
        return pickle.loads(data)

    def _wait_for_header(self, buffer: Tensor, peer: int) -> None:
        work = dist.irecv(buffer, peer, group=self._comms.control)
        assert work is not None
        self._clock.wait_for(work, peer=peer, num_bytes=0)

    def _wait(self, posted: _Posted, peer: int) -> list[Tensor]:
        for work, buffer in posted.works:
            self._clock.wait_for(work, peer=peer, num_bytes=buffer.nbytes)
        return posted.tensors()

    def _post(
        self, forms: tuple[_Form, ...], peer: int, group: dist.ProcessGroup | None
    ) -> _Posted:
        sizes = [form.num_bytes for form in forms[:1]]
        sizes += [_offsets(forms[1:])[-1]] if forms[1:] else []
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        works = []
        for buffer in filter(Tensor.numel, buffers):
            work = dist.irecv(buffer, peer, group=group)
            assert work is not None
            works.append((work, buffer))
        return _Posted(forms, works, buffers)


class _Sends:
    """Sends in one direction that may not have arrived."""

    def __init__(self) -> None:
        self._kept: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def make_room(self, clock: ComputeClock) -> None:
        """Let go of all but the newest, which another send may join."""
        while len(self._kept) >= MAX_KEPT_SENDS:
            with clock.waiting():
                self._let_go()

    def add(self, parts: Sequence[tuple[dist.ProcessGroup | None, Tensor]], peer: int) -> None:
        """Send tensors to a peer and keep them."""
        sends = []
        for group, part in parts:
            if part.numel():
                work = dist.isend(part, peer, group=group)
                assert work is not None
                sends.append((work, part))
        self._kept.append(sends)

    def clear(self) -> None:
        """Wait until everything has arrived."""
        while self._kept:
            self._let_go()

    def _let_go(self) -> None:
        for work, _ in self._kept[0]:
            work.wait()
        self._kept.popleft()


def _form_of(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _frame(data: bytes) -> list[Tensor]:
    """Return a header in one message of a fixed length, and a second one for what is too long."""
    framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    parts = [framed[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), framed[HEADER_BYTES:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]


def _payload(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the bytes of the first tensor, and those of the others end to end."""
    parts = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors]
    if len(parts) < 2:
        return parts
    first, *others = parts
    offsets = _offsets([_form_of(tensor) for tensor in tensors[1:]])
    packed = torch.empty(offsets[-1], dtype=torch.uint8, device=first.device)
    for start, part in zip(offsets, others, strict=False):
        packed[start : start + part.numel()] = part
    return [first, packed]


def _unpack(packed: Sequence[Tensor], forms: Sequence[_Form]) -> list[Tensor]:
    return [
        packed[0][start : start + form.num_bytes].view(form.dtype).view(form.shape)
        for start, form in zip(_offsets(forms), forms, strict=False)
    ]


def _offsets(forms: Sequence[_Form]) -> list[int]:
    """Return where each packed tensor begins, and the length of all."""
    offsets = [0]
    for form in forms:
        offsets.append(offsets[-1] + -(-form.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    return offsets
