"""Carry activations forward and their gradients backward between the stages of a pipeline.

Each pair of ranks that exchange activations has one communicator for each direction. Under NCCL's
rules the operations of a communicator run in order, and a send ends only with its receive: if two
stages shared one, each would wait for the other's messages.

Only the sender knows what its layers returned, so a header goes with each activation: shapes,
dtypes, and a description of the side tensors (see `side_tensors`). Among CPUs, header, activation
and side tensors are one message (for its length see `messages`). On accelerators, and where pieces
are sent, headers are messages among hosts: a host that reads a header from its device would wait
for all that the device has yet to compute.

A send never waits until its receiver is ready to compute. The receive of a gradient is posted as
soon as the activation has left. Receives of activations (on accelerators, of their headers) are
posted for as many micro-batches as the previous stage may hold between forward and backward, since
it can't be further ahead. Sent tensors are kept as long: older ones have arrived by then.
Forward-only passes keep at most `MAX_KEPT_SENDS`, so a fast stage can't run far ahead.

All ranks of a tensor-parallel group have the same activation, so a rank receives from one rank of
the other stage's group (`exchange.neighbours`). A rank that runs several stages has a link for
each; *channels* tell apart what it sends to one rank. Neighbouring stages of the same rank hand
each other copies.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.actions import MAX_KEPT_SENDS
from lightning_hetero.exchange.neighbours import Neighbour, SentPiece
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.ranks.communicators import Communicators, all_gather_single
from lightning_hetero.runtime.stage.messages import (
    Form,
    Header,
    HiddenForm,
    Inbox,
    Outbox,
    form_of,
    num_packed_bytes,
    packed,
    unpack,
)
from lightning_hetero.schedules import Edge


@dataclass
class Handover:
    """Everything that a stage hands to the next one for one micro-batch."""

    tensors: list[Tensor] = field(default_factory=list)
    """The activation, then the side tensors of all layers so far; see `side_tensors`."""
    layer_outputs: list[bytes] = field(default_factory=list)
    """For each earlier layer, what it returned and recorded, pickled. In place of a tensor it has
    the tensor's index in `tensors`."""
    forms: list[HiddenForm] = field(default_factory=list)
    """For each earlier layer the shape and dtype of the hidden state that it returned."""
    changes_input: bool = False
    """Whether the model's first layer changes its input in place: later stages can't see that."""

    def copy(self) -> "Handover":
        """Return a copy, to which this stage adds what its layers return."""
        return Handover([*self.tensors], [*self.layer_outputs], [*self.forms], self.changes_input)


@dataclass
class Mailbox:
    """Passes tensors between two neighbouring stages of the same rank, forward and back."""

    activations: deque[Handover] = field(default_factory=deque)
    gradients: deque[Sequence[Tensor]] = field(default_factory=deque)


class _Posted(NamedTuple):
    """The posted receive of packed tensors."""

    forms: tuple[Form, ...]
    piece: SentPiece
    """The piece that this rank receives of the message."""
    buffer: Tensor
    work: dist.Work | None
    """None if the piece is empty."""


class ActivationLink:
    """Sends to and receives from the neighbours of a rank's stage in its pipeline.

    `comms.control` carries headers that are messages of their own. Ranks of the tensor-parallel
    `group` put pieces together. `before` and `after` are the mailboxes from and to neighbouring
    stages that run on this rank.
    """

    def __init__(  # noqa: PLR0913 - what connects a stage
        self,
        *,
        previous: Neighbour | None,
        following: Neighbour | None,
        comms: Communicators,
        device: torch.device,
        clock: ComputeClock,
        group: dist.ProcessGroup | None = None,
        before: Mailbox | None = None,
        after: Mailbox | None = None,
    ) -> None:
        self.previous = previous
        self._before, self._after = before, after
        self.following = following
        self._group = group
        self.comms = comms
        self.device = device
        self._clock = clock
        self._inbox = Inbox()
        self._outbox = Outbox()
        self.num_sent_bytes = self.num_received_bytes = 0
        """Bytes of the tensors of the last handover to the next stage, and from the one before."""
        self._gradients: dict[int, _Posted] = {}
        self._most_expected = 1
        self._sent_forward = _Sends()
        self._sent_backward = _Sends()
        self._gets_headers_apart = previous is not None and self._is_apart(previous.received)
        self._sends_headers_apart = any(map(self._is_apart, following.sent if following else ()))

    def begin(self, held: int, held_before: int) -> None:
        """Begin an iteration; the arguments say how far stages run ahead.

        Args:
            held: Most micro-batches that this stage holds between forward and backward.
            held_before: The same number for the stage before.
        """
        # At least 1: also a stage without micro-batches sends those of the next check of the loss.
        self._sent_forward.most = max(1, held)
        self._sent_backward.most = self._most_expected = max(1, held_before)

    def expect_activations(self, num_left: int) -> None:
        """Post receives of the next handovers, of which `num_left` will come in this iteration."""
        assert self.previous is not None
        if self._before is not None:
            return
        piece = self.previous.received
        group = self._first_group(piece, is_apart=self._gets_headers_apart)
        for _ in range(min(num_left, self._most_expected) - self._inbox.num_posted):
            self._inbox.post(piece.sender, group, 2 * piece.channel)

    def receive_activation(self) -> Handover:
        """Wait for the next handover from the stage before, and return it.

        Its tensors require gradients if those sent did.
        """
        assert self.previous is not None
        if self._before is not None:
            return self._before.activations.popleft()
        inbox, piece = self._inbox, self.previous.received
        is_apart = self._gets_headers_apart
        self.expect_activations(max(1, inbox.num_posted))
        group = self._first_group(piece, is_apart=is_apart)
        header, message = inbox.receive(
            piece.sender, group, self._clock, counts=not is_apart, tag=2 * piece.channel
        )
        if is_apart:
            received = self._wait(self._post(header.tensors, piece))
        else:
            received = unpack(message, header.tensors, behind=inbox.header_bytes)
        for tensor, form in zip(received, header.tensors, strict=True):
            tensor.requires_grad_(form.requires_grad)
        self.num_received_bytes = sum(tensor.nbytes for tensor in received)
        return Handover(received, [*header.layer_outputs], [*header.forms], header.changes_input)

    def send_activation(self, sent: Handover) -> None:
        """Send a micro-batch's handover to the next stage, without waiting for its arrival."""
        assert self.following is not None
        if not self.following.sent:
            return
        self._clock.before_send()
        if self._after is not None:
            kept = sent.copy()
            # A copy, since the next stage may change its input in place.
            kept.tensors = [
                i.detach().clone().requires_grad_(i.requires_grad) for i in sent.tensors
            ]
            self._after.activations.append(kept)
            return
        self._sent_forward.make_room(self._clock)
        is_apart = self._sends_headers_apart
        self.num_sent_bytes = sum(tensor.nbytes for tensor in sent.tensors)
        forms = tuple(map(form_of, sent.tensors))
        header = Header(forms, (*sent.layer_outputs,), (*sent.forms,), sent.changes_input)
        messages = self._outbox.messages(header, [] if is_apart else sent.tensors)
        payload = packed(sent.tensors) if is_apart else None
        for piece in self.following.sent:
            first_group = self._first_group(piece, is_apart=is_apart)
            # Several messages share a queue on CPUs only, because gloo has tags.
            for tag, message in enumerate(messages, start=2 * piece.channel):
                self._sent_forward.add(message, piece.receiver, first_group, tag)
            if payload is not None:
                self._sent_forward.add(_cut(payload, piece), piece.receiver, self._edge(piece))

    def expect_gradient(self, microbatch_index: int, sent: Sequence[Tensor]) -> None:
        """Post the receive of the gradients of sent tensors, unless it is posted."""
        assert self.following is not None
        if microbatch_index not in self._gradients and self._after is None:
            forms = tuple(map(form_of, sent))
            posted = self._post(forms, self.following.received)
            self._gradients[microbatch_index] = posted

    def receive_gradient(self, microbatch_index: int) -> Sequence[Tensor]:
        """Wait for the gradients of a micro-batch's sent tensors, and return them in order."""
        if self._after is not None:
            return self._after.gradients.popleft()
        return self._wait(self._gradients.pop(microbatch_index))

    def send_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Send back the gradients of received tensors, without waiting for their arrival."""
        assert self.previous is not None
        if not self.previous.sent:
            return
        self._clock.before_send()
        if self._before is not None:
            self._before.gradients.append(gradients)
            return
        if not gradients:
            return
        self._sent_backward.make_room(self._clock)
        payload = packed(gradients)
        for piece in self.previous.sent:
            self._sent_backward.add(_cut(payload, piece), piece.receiver, self._edge(piece))

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._sent_forward.clear()
        self._sent_backward.clear()
        self._inbox.finish()
        self._outbox.finish()
        self._most_expected = 1

    def _edge(self, piece: SentPiece) -> dist.ProcessGroup:
        return self.comms.edge(piece.edge)

    def _first_group(self, piece: SentPiece, *, is_apart: bool) -> dist.ProcessGroup | None:
        """Return the group that carries the first message of an activation."""
        return self.comms.control if is_apart else self._edge(piece)

    def _is_apart(self, piece: SentPiece) -> bool:
        """Whether the header is a message of its own: on accelerators, and if pieces are sent."""
        return self.device.type != "cpu" or piece.count > 1

    def _wait(self, posted: _Posted) -> list[Tensor]:
        forms, piece, message, work = posted
        if work is not None:
            self._clock.wait_for(work, peer=piece.sender, num_bytes=message.nbytes)
        if piece.count > 1:
            message = self._whole(message, piece.count, num_packed_bytes(forms))
        return unpack(message, forms)

    def _whole(self, own: Tensor, count: int, size: int) -> Tensor:
        """Return a message's bytes, gathered from the group's ranks, which have received pieces."""
        if not size:
            return own
        padded = own.new_zeros(-(-size // count))
        padded[: own.numel()] = own
        whole = own.new_empty(count * padded.numel())
        all_gather_single(whole, padded, self._group)
        return whole[:size]

    def _post(self, forms: tuple[Form, ...], piece: SentPiece) -> _Posted:
        start, stop = piece.bounds(num_packed_bytes(forms))
        buffer, work = torch.empty(stop - start, dtype=torch.uint8, device=self.device), None
        if start < stop:
            work = dist.irecv(buffer, piece.sender, group=self._edge(piece))
            assert work is not None
        return _Posted(forms, piece, buffer, work)


class _Sends:
    """Sends in one direction that may not have arrived."""

    def __init__(self) -> None:
        self.most = MAX_KEPT_SENDS
        """Most micro-batches whose messages are kept."""
        self._kept: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def make_room(self, clock: ComputeClock) -> None:
        """Wait for and free all but the newest sends, and begin a micro-batch's."""
        while len(self._kept) >= self.most:
            clock.wait_together([work for work, _ in self._kept[0]], (), is_exchange=False)
            self._kept.popleft()
        self._kept.append([])

    def add(
        self, message: Tensor, receiver: int, group: dist.ProcessGroup | None, tag: int = 0
    ) -> None:
        """Send a message of the micro-batch, and keep it."""
        if message.numel():
            work = dist.isend(message, receiver, group=group, tag=tag)
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


_NUM_MEASURED = 3
"""Round trips of each size, of which the shortest counts."""


def measure_edges(links: Mapping[int, ActivationLink]) -> dict[int, Edge]:
    """Measure the link from each of a rank's stages to the next, with messages as long as the last.

    Takes the rank's links by stage. The first rank of each stage of a pipeline calls it at the same
    time. Links behind stages of even index come first, so no stage must answer two neighbours at
    once.
    """
    found = {}
    ends = {end for stage in links for end in (stage - 1, stage)}
    for stage in sorted(ends, key=lambda end: (end % 2, end)):
        sender, receiver = links.get(stage), links.get(stage + 1)
        if sender is not None and receiver is not None:
            continue
        if sender is not None and sender.following is not None:
            sizes = 1, sender.num_sent_bytes
            trips_s = (
                [_trip_s(sender, sender.following, size) for _ in range(_NUM_MEASURED)]
                for size in sizes
            )
            latency_s, whole_s = (min(seconds) / 2 for seconds in trips_s)
            found[stage] = Edge(latency_s=latency_s, transfer_s=max(0.0, whole_s - latency_s))
        elif receiver is not None and receiver.previous is not None:
            for size in (1, receiver.num_received_bytes):
                for _ in range(_NUM_MEASURED):
                    _trip_s(receiver, receiver.previous, size, answers=True)
    return found


def _trip_s(link: ActivationLink, peer: Neighbour, size: int, *, answers: bool = False) -> float:
    """Send a message to a stage, which answers, or answer its message; return the seconds."""
    sent = torch.empty(max(size, 1), dtype=torch.uint8, device=link.device)
    received, there, back = torch.empty_like(sent), peer.sent[0], peer.received
    expected = dist.irecv(received, back.sender, group=link.comms.edge(back.edge))
    start = time.perf_counter()
    if answers:
        _wait(expected, received)
    _wait(dist.isend(sent, there.receiver, group=link.comms.edge(there.edge)), sent)
    if not answers:
        _wait(expected, received)
    return time.perf_counter() - start


def _wait(work: dist.Work | None, message: torch.Tensor) -> None:
    """Wait on the host until a message has left or arrived."""
    assert work is not None
    work.wait()
    if message.is_cuda:
        torch.cuda.current_stream(message.device).synchronize()
