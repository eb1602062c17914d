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
  the forward pass, so hosts run as far ahead of their devices as without it. A micro-batch costs
  one more message, the header, and side tensors are packed into another one each way.

While an action still computes, the next receive is already posted: of the gradient, whose form is
that of what was sent, and of the next activation's message or, on accelerators, its header. It
follows the send that precedes it in the communicator's order anyway.

All ranks of a tensor-parallel group have the same activation, so a rank receives from one rank of
the other stage's group, and the groups may differ in size (`core.neighbours`). If a larger group
receives pieces, headers are messages of their own among CPUs, too.

What is sent is freed once it has arrived: at most `MAX_KEPT_SENDS` are kept in each direction,
however many micro-batches there are. In 1F1B older ones have arrived by then, so waiting for them
costs nothing; in forward-only passes the wait keeps a fast stage from running ahead.
"""

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    tensor_of,
    unpack,
)

__all__ = ["ActivationLink", "Handover", "HiddenForm"]

HEADER_BYTES = 512
"""The size of a header is a multiple of this."""
_LENGTHS = struct.Struct("<QQ")
"""The start of each message: the bytes of its header's content and of the whole message."""
LENGTHS_BYTES = _LENGTHS.size

HiddenForm = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a hidden state."""


class _Header(NamedTuple):
    """A handover without the values of its tensors."""

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
    """Everything that a stage hands to the next one for one micro-batch."""

    tensors: list[Tensor] = field(default_factory=list)
    """The activation, then side tensors of all layers before; see `side_tensors`."""
    left: list[bytes] = field(default_factory=list)
    """For each earlier layer what it returned and left, pickled; it gives tensors by index."""
    forms: list[HiddenForm] = field(default_factory=list)
    """For each earlier layer the form of the hidden state that it returned."""
    changes_input: bool = False
    """Whether the model's first layer changes its input in place, which later stages don't see."""

    def copy(self) -> "Handover":
        """Return a copy to which this stage adds what its layers leave."""
        return Handover([*self.tensors], [*self.left], [*self.forms], self.changes_input)


@dataclass
class _Posted:
    """Receives under way: the first tensor by itself, the others packed."""

    forms: tuple[Form, ...]
    piece: SentPiece
    """The piece that this rank receives of each message."""
    works: list[tuple[dist.Work, Tensor]]
    buffers: list[Tensor]

    def tensors(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Return the received tensors, from the whole messages' bytes."""
        if not self.forms:
            return []
        others = unpack(whole[1], self.forms[1:]) if self.forms[1:] else []
        return [tensor_of(whole[0], self.forms[0]), *others]


class ActivationLink:
    """Sends to and receives from one rank's neighbouring stages in its pipeline.

    Args:
        previous: The stage before; None on the first stage.
        following: The next stage; None on the last stage.
        comms: `forward` and `backward` carry activations and gradients, `control` the headers that
            are messages of their own.
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
        """Post the receive of the next handover from the stage before, unless it is posted."""
        assert self.previous is not None
        if self._inbox.work is None:
            group = self._comms.control if self._gets_headers_apart else self._comms.forward
            self._inbox.post(self.previous.received.sender, group)

    def receive_activation(self) -> Handover:
        """Wait for the next handover from the stage before, and return it.

        Its tensors require gradients if those sent did.
        """
        assert self.previous is not None
        inbox, piece = self._inbox, self.previous.received
        is_apart, opened = self._gets_headers_apart, None
        while opened is None:
            self.expect_activation()
            assert inbox.work is not None
            # A message that only announces a longer one counts as no bytes.
            is_payload = not is_apart and inbox.capacity > LENGTHS_BYTES
            num_bytes = inbox.capacity if is_payload else 0
            self._clock.wait_for(inbox.work, peer=piece.sender, num_bytes=num_bytes)
            opened = inbox.open()
        header, message = opened
        if is_apart:
            received = self._wait(self._post(header.tensors, piece, self._comms.forward))
        else:
            received = unpack(message, header.tensors, behind=inbox.header_bytes)
        for tensor, form in zip(received, header.tensors, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return Handover(received, [*header.left], [*header.forms], header.changes_input)

    def send_activation(self, sent: Handover) -> None:
        """Send a micro-batch's handover to the next stage, without waiting for its arrival."""
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
        """Post the receive of the gradients of sent tensors, unless it is posted."""
        assert self.following is not None
        if microbatch_index not in self._gradients:
            forms = tuple(map(form_of, sent))
            posted = self._post(forms, self.following.received, self._comms.backward)
            self._gradients[microbatch_index] = posted

    def receive_gradient(self, microbatch_index: int) -> list[Tensor]:
        """Wait for the gradients of a micro-batch's sent tensors, and return them in order."""
        return self._wait(self._gradients.pop(microbatch_index))

    def send_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Send back the gradients of received tensors, without waiting for their arrival."""
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
        """Whether headers are messages of their own, for messages of which this is a piece."""
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
        """Return a message's bytes, gathered from the group's ranks, which have received pieces."""
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
    """The receiving end of messages that begin with a header."""

    def __init__(self) -> None:
        self.capacity = LENGTHS_BYTES
        """Bytes of the next message's buffer; the sender counts the same."""
        self.work: dist.Work | None = None
        """The posted receive; None without one."""
        self.header_bytes = 0
        """Bytes of the last message before its tensors."""
        self._buffer: Tensor | None = None
        self._last: tuple[bytes, _Header] | None = None

    def post(self, peer: int, group: dist.ProcessGroup | None) -> None:
        """Post the receive of a message."""
        self._buffer = torch.empty(self.capacity, dtype=torch.uint8)
        self.work = dist.irecv(self._buffer, peer, group=group)

    def open(self) -> tuple[_Header, Tensor] | None:
        """Return the header of the message that has arrived, and the whole message.

        None if the message only announces a longer one.
        """
        buffer, self.work, self._buffer = self._buffer, None, None
        assert buffer is not None
        message = buffer.numpy().data
        header_length, length = _LENGTHS.unpack_from(message)
        if length > self.capacity:
            self.capacity = length
            return None
        content = bytes(message[LENGTHS_BYTES : LENGTHS_BYTES + header_length])
        if self._last is None or self._last[0] != content:
            self._last = content, _Header(*pickle.loads(content))
            self.header_bytes = _header_bytes(content)
        return self._last[1], buffer


class _Outbox:
    """The sending end of messages that begin with a header."""

    def __init__(self) -> None:
        self._capacity = LENGTHS_BYTES
        self._last: tuple[_Header, Tensor] | None = None

    def messages(self, header: _Header, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the message of a header and tensors, after one that announces it if needed."""
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
    """Return the beginning of a message: lengths and header."""
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
        """Wait for and free all but the newest sends, and begin a micro-batch's."""
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
    """Return the bytes that a header with this content takes."""
    return -(-(LENGTHS_BYTES + len(content)) // HEADER_BYTES) * HEADER_BYTES
