"""Carry activations forward and their gradients backward between the stages of a pipeline.

Forward and backward use communicators of their own, and each carries micro-batches in the order of
the schedule, so under NCCL's rules (in order per communicator, a send ends with its receive) no
stage waits for one that waits for it.

Only the sender knows what its layers made of a micro-batch, so a header goes with each activation:
shapes, dtypes and what layers left.

* Among CPUs it is the beginning of the activation's own message, together with the side tensors: a
  micro-batch costs one message forward and one backward at each boundary, in buffers as long as the
  longest message so far. A longer one is announced by a message of `LENGTHS_BYTES` before it.
* On accelerators the header stays on the CPUs, because a host that reads it from the device would
  wait for all that the device has yet to compute. It leaves when the sender's host has *enqueued*
  the forward pass, so hosts run as far ahead of their devices as before. A micro-batch costs a
  header more there, and side tensors are packed into one more message each way.

What comes next is received while the current action still computes: the gradient, which looks like
what was sent, and the message or, on accelerators, the header of the next activation. It is posted
after the send before it, where the order on the communicator has it anyway.

All ranks of a tensor-parallel group have the same activation, so a rank receives from one rank of
the other stage's group, and the groups may differ in size (`core.neighbours`). Where a larger group
receives pieces, headers are messages of their own among CPUs, too.

What is sent is let go once it has arrived: at most `MAX_KEPT_SENDS` are kept in each direction,
however many micro-batches there are. In 1F1B the older ones have arrived by then, so waiting for
them costs nothing; in passes forward only it keeps a fast stage from running ahead.
"""

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.actions import MAX_KEPT_SENDS
from lightning_hetero.core.neighbours import Neighbour, SentPiece
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.ranks.communicators import Communicators, all_gather_single
from lightning_hetero.runtime.stage.packed_tensors import (
    Form,
    form_of,
    offsets_of,
    packed_behind,
    payload_of,
    payload_sizes,
    unpack,
)

__all__ = ["ActivationLink", "Handover", "HiddenForm"]

HEADER_BYTES = 512
"""A header takes a multiple of them."""
_LENGTHS = struct.Struct("<QQ")
"""The start of each message: the bytes of its header's content and of the whole message."""
LENGTHS_BYTES = _LENGTHS.size

HiddenForm = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a hidden state."""


class _Header(NamedTuple):
    """All of a handover but the values of its tensors."""

    tensors: tuple[Form, ...]
    left: tuple[bytes, ...]
    forms: tuple[HiddenForm, ...]
    changes_input: bool

    @classmethod
    def of(cls, sent: "Handover") -> "_Header":
        forms = tuple(map(form_of, sent.tensors))
        return cls(forms, tuple(sent.left), tuple(sent.forms), sent.changes_input)


@dataclass
class Handover:
    """All that a stage hands to the next one for one micro-batch."""

    tensors: list[Tensor] = field(default_factory=list)
    """The activation, then side tensors of all layers before; see `side_tensors`."""
    left: list[bytes] = field(default_factory=list)
    """For each layer before, what it left; refers to side tensors by their index."""
    forms: list[HiddenForm] = field(default_factory=list)
    """For each layer before, the form of the hidden state that it returned."""
    changes_input: bool = False
    """Whether the model's first layer changes its input in place, which later stages don't see."""
    kept: tuple[Any, ...] = ()
    """What the last layer returned besides, if that is too large to travel unless it is taken."""

    def copy(self) -> "Handover":
        """Return one to which a stage adds its own."""
        return Handover([*self.tensors], [*self.left], [*self.forms], self.changes_input)


@dataclass
class _Posted:
    """Receives under way: the first tensor by itself, the others packed."""

    forms: tuple[Form, ...]
    piece: SentPiece
    """This rank's part of each."""
    works: list[tuple[dist.Work, Tensor]]
    buffers: list[Tensor]

    def tensors(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, given the whole buffers."""
        if not self.forms:
            return []
        others = unpack(whole[1], self.forms[1:]) if self.forms[1:] else []
        return [*unpack(whole[0], self.forms[:1]), *others]


class ActivationLink:
    """One rank's two neighbours in its pipeline.

    Args:
        previous: The stage before; None if this rank's is the first.
        following: The next stage; None if this rank's is the last.
        comms: Forward and backward carry activations and gradients, control the headers that travel
            apart.
        device: Where activations lie.
        clock: Times the waits.
        group: The stage's tensor-parallel group, whose ranks put pieces together; None without one.
    """

    def __init__(
        self,
        *,
        previous: Neighbour | None,
        following: Neighbour | None,
        comms: Communicators,
        device: torch.device,
        clock: ComputeClock,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.previous = previous
        self.following = following
        self._group = group
        self._comms = comms
        self._device = device
        self._clock = clock
        self._inbox = _Inbox()
        self._outbox = _Outbox()
        self._gradients: dict[int, _Posted] = {}
        self._sent_forward = _Sends()
        self._sent_backward = _Sends()
        self._gets_headers_apart = previous is not None and self._is_apart(previous.received)
        self._sends_headers_apart = any(map(self._is_apart, following.sent if following else ()))

    def expect_activation(self) -> None:
        """Begin to receive what the stage before hands on next, if that hasn't begun yet."""
        assert self.previous is not None
        if self._inbox.work is None:
            group = self._comms.control if self._gets_headers_apart else self._comms.forward
            self._inbox.post(self.previous.received.sender, group)

    def receive_activation(self) -> Handover:
        """Return what the stage before hands on for its next micro-batch.

        The tensors ask for gradients where those sent did.
        """
        assert self.previous is not None
        inbox, piece = self._inbox, self.previous.received
        is_apart, opened = self._gets_headers_apart, None
        while opened is None:
            self.expect_activation()
            assert inbox.work is not None
            # What only announces counts no bytes of its own.
            is_payload = not is_apart and inbox.capacity > LENGTHS_BYTES
            num_bytes = inbox.capacity if is_payload else 0
            self._clock.wait_for(inbox.work, peer=piece.sender, num_bytes=num_bytes)
            opened = inbox.open()
        header, payload = opened
        if is_apart:
            received = self._wait(self._post(header.tensors, piece, self._comms.forward))
        else:
            received = unpack(payload, header.tensors)
        for tensor, form in zip(received, header.tensors, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return Handover(received, [*header.left], [*header.forms], header.changes_input)

    def send_activation(self, sent: Handover) -> None:
        """Hand a micro-batch on to the next stage, without waiting for it."""
        assert self.following is not None
        if not self.following.sent:
            return
        self._clock.before_send()
        self._sent_forward.make_room(self._clock)
        is_apart = self._sends_headers_apart
        first_group = self._comms.control if is_apart else self._comms.forward
        headers = self._outbox.messages(_Header.of(sent), [] if is_apart else sent.tensors)
        payload = payload_of(sent.tensors) if is_apart else []
        for piece in self.following.sent:
            for header in headers:
                self._sent_forward.add(header, piece.receiver, first_group)
            for part in payload:
                self._sent_forward.add(_cut(part, piece), piece.receiver, self._comms.forward)

    def expect_gradient(self, microbatch_index: int, sent: Sequence[Tensor]) -> None:
        """Begin to receive the gradients of what was sent, if that hasn't begun yet."""
        assert self.following is not None
        if microbatch_index not in self._gradients:
            forms = tuple(map(form_of, sent))
            posted = self._post(forms, self.following.received, self._comms.backward)
            self._gradients[microbatch_index] = posted

    def receive_gradient(self, microbatch_index: int) -> list[Tensor]:
        """Return the gradients of what was sent, in its order."""
        return self._wait(self._gradients.pop(microbatch_index))

    def send_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of what was received back, without waiting for them."""
        assert self.previous is not None
        if not self.previous.sent:
            return
        self._clock.before_send()
        self._sent_backward.make_room(self._clock)
        payload = payload_of(gradients)
        for piece in self.previous.sent:
            for part in payload:
                self._sent_backward.add(_cut(part, piece), piece.receiver, self._comms.backward)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._sent_forward.clear()
        self._sent_backward.clear()

    def _is_apart(self, piece: SentPiece) -> bool:
        """Whether the header of a message, of which this is a piece, is a message of its own."""
        return self._device.type != "cpu" or piece.count > 1

    def _wait(self, posted: _Posted) -> list[Tensor]:
        piece = posted.piece
        for work, buffer in posted.works:
            self._clock.wait_for(work, peer=piece.sender, num_bytes=buffer.nbytes)
        if piece.count == 1:
            return posted.tensors(posted.buffers)
        pairs = zip(posted.buffers, payload_sizes(posted.forms), strict=True)
        return posted.tensors([self._whole(own, piece.count, size) for own, size in pairs])

    def _whole(self, own: Tensor, count: int, size: int) -> Tensor:
        """Return all bytes of a message of which each rank of the group has received a piece."""
        if not size:
            return own
        padded = own.new_zeros(-(-size // count))
        padded[: own.numel()] = own
        whole = own.new_empty(count * padded.numel())
        all_gather_single(whole, padded, self._group)
        return whole[:size]

    def _post(
        self, forms: tuple[Form, ...], piece: SentPiece, group: dist.ProcessGroup | None
    ) -> _Posted:
        works, buffers = [], []
        for size in payload_sizes(forms):
            start, stop = piece.bounds(size)
            buffer = torch.empty(stop - start, dtype=torch.uint8, device=self._device)
            buffers.append(buffer)
            if start < stop:
                work = dist.irecv(buffer, piece.sender, group=group)
                assert work is not None
                works.append((work, buffer))
        return _Posted(forms, piece, works, buffers)


class _Inbox:
    """The receiver's end of the messages that begin with headers."""

    def __init__(self) -> None:
        self.capacity = LENGTHS_BYTES
        """Of the next message's buffer; the sender knows it, too."""
        self.work: dist.Work | None = None
        """The receive under way."""
        self._buffer = torch.empty(0)
        self._last: tuple[bytes, _Header] | None = None

    def post(self, peer: int, group: dist.ProcessGroup | None) -> None:
        """Begin to receive a message."""
        self._buffer = torch.empty(self.capacity, dtype=torch.uint8)
        self.work = dist.irecv(self._buffer, peer, group=group)

    def open(self) -> tuple[_Header, Tensor] | None:
        """Return the header of what has arrived, and the bytes after it.

        None if it only announces a longer message.
        """
        self.work = None
        message = self._buffer.numpy().data
        header_length, length = _LENGTHS.unpack_from(message)
        if length > self.capacity:
            self.capacity = length
            return None
        content = bytes(message[LENGTHS_BYTES : LENGTHS_BYTES + header_length])
        if self._last is None or self._last[0] != content:
            self._last = content, _Header(*pickle.loads(content))
        payload = self._buffer[_header_bytes(content) :]
        self._buffer = torch.empty(0)
        return self._last[1], payload


class _Outbox:
    """The sender's end of the messages that begin with headers."""

    def __init__(self) -> None:
        self._capacity = LENGTHS_BYTES
        self._last: tuple[_Header, Tensor] | None = None

    def messages(self, header: _Header, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the message of a header and tensors, after one that announces it if need be."""
        if self._last is None or self._last[0] != header:
            self._last = header, _first_bytes(header, has_tensors=bool(tensors))
        message = packed_behind(self._last[1], tensors) if tensors else self._last[1]
        length = message.numel()
        if length <= self._capacity:
            return [message]
        announced = message[: self._capacity].clone()
        self._capacity = length
        return [announced, message]


def _first_bytes(header: _Header, *, has_tensors: bool) -> Tensor:
    """Return a message up to its tensors."""
    content = pickle.dumps(tuple(header))
    start = _header_bytes(content)
    length = start + offsets_of(header.tensors)[-1] if has_tensors else start
    made = torch.empty(start, dtype=torch.uint8)
    made.numpy().data[: LENGTHS_BYTES + len(content)] = (
        _LENGTHS.pack(len(content), length) + content
    )
    return made


class _Sends:
    """Sends in one direction that may not have arrived."""

    def __init__(self) -> None:
        self._kept: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def make_room(self, clock: ComputeClock) -> None:
        """Let go of all but the newest, and begin a micro-batch's."""
        while len(self._kept) >= MAX_KEPT_SENDS:
            clock.wait_together([work for work, _ in self._kept[0]], (), is_exchange=False)
            self._kept.popleft()
        self._kept.append([])

    def add(self, message: Tensor, receiver: int, group: dist.ProcessGroup | None) -> None:
        """Send a message of the micro-batch, and keep it."""
        if message.numel():
            work = dist.isend(message, receiver, group=group)
            assert work is not None
            self._kept[-1].append((work, message))

    def clear(self) -> None:
        """Wait until everything has arrived."""
        while self._kept:
            for work, _ in self._kept[0]:
                work.wait()
            self._kept.popleft()


def _cut(part: Tensor, piece: SentPiece) -> Tensor:
    """Return a receiver's piece of a message."""
    return part if piece.count == 1 else part[slice(*piece.bounds(part.numel()))]


def _header_bytes(content: bytes) -> int:
    """Return how many bytes a header takes in its message."""
    return -(-(LENGTHS_BYTES + len(content)) // HEADER_BYTES) * HEADER_BYTES
