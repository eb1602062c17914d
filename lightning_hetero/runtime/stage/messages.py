"""Pack tensors end to end as bytes, and unpack them by their forms (shape, dtype and the like).

A message begins with a `Header`, from which the receiver learns what the message contains. A
receive must be posted before its message's length is known. So its buffer is as long as the longest
message of earlier iterations, a length that sender and receiver both remember. If a message is
longer, its rest follows as a second message. Example: after messages of 8 KB, one of 10 KB goes as
8 KB and 2 KB, and buffers of the next iteration have 10 KB.
"""

import io
import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.runtime.clock import ComputeClock

_ALIGNMENT_BYTES = 64
"""Alignment of packed tensors: each can be viewed in its own dtype, and kernels find it aligned."""


class Form(NamedTuple):
    """The form of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def form_of(tensor: Tensor) -> Form:
    """Return a tensor's form."""
    return Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def packed(tensors: Sequence[Tensor], start: Tensor | None = None) -> Tensor:
    """Return the bytes of tensors at the places of `bounds_of`, behind those of `start`."""
    parts, length = ([] if start is None else [start]), 0
    for tensor in tensors:
        part = tensor.detach().reshape(-1).view(torch.uint8)
        if length % _ALIGNMENT_BYTES:
            parts.append(part.new_zeros(-length % _ALIGNMENT_BYTES))
            length += parts[-1].numel()
        parts.append(part)
        length += part.numel()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(message: Tensor, forms: tuple[Form, ...], *, behind: int = 0) -> list[Tensor]:
    """Return a message's tensors, which have these forms and follow its first `behind` bytes."""
    pairs = zip(bounds_of(forms), forms, strict=True)
    parts = [(message[behind + start : behind + stop], form) for (start, stop), form in pairs]
    # `data` hides from autograd that they are views: changing one in place doesn't affect others.
    return [part.view(form.dtype).view(form.shape).data for part, form in parts]


@lru_cache(maxsize=256)
def bounds_of(forms: tuple[Form, ...]) -> tuple[tuple[int, int], ...]:
    """Return the bytes [first, last + 1) of each packed tensor."""
    bounds, start = [], 0
    for form in forms:
        bounds.append((start, start + form.num_bytes))
        start = -(-bounds[-1][1] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(bounds)


def num_packed_bytes(forms: tuple[Form, ...]) -> int:
    """Return the bytes of all packed tensors together."""
    return bounds_of(forms)[-1][1] if forms else 0


def pickled(value: Any, name_of: Callable[[Any], Any]) -> bytes | None:
    """Pickle a value, with a name in place of each object for which `name_of` isn't None.

    Returns None if the value can't be pickled.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = name_of  # type: ignore[method-assign]
    try:
        pickler.dump(value)
    except Exception:  # An object's own pickling may raise anything.
        return None
    return file.getvalue()


def unpickled(data: bytes, object_of: Callable[[Any], Any]) -> Any:
    """Return the value that was pickled, with the object of each name."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = object_of  # type: ignore[method-assign]
    return unpickler.load()


HEADER_BYTES = 512
"""The size of a header is a multiple of this."""
_LENGTHS = struct.Struct("<QQ")
"""The start of each message: the bytes of its header's content and of the whole message."""
LENGTHS_BYTES = _LENGTHS.size
"""Bytes of the two lengths with which each message begins."""

HiddenForm = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a hidden state."""


class Header(NamedTuple):
    """A handover without the values of its tensors."""

    tensors: tuple[Form, ...]
    layer_outputs: tuple[bytes, ...]
    forms: tuple[HiddenForm, ...]
    changes_input: bool


class Inbox:
    """The receiving end of messages that begin with a header."""

    def __init__(self) -> None:
        self._capacity = self._longest = LENGTHS_BYTES
        self.header_bytes = 0
        """Bytes of the last message before its tensors."""
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self._last: tuple[bytes, Header] | None = None

    @property
    def num_posted(self) -> int:
        """Number of posted receives that nobody has waited for."""
        return len(self._posted)

    def post(self, peer: int, group: dist.ProcessGroup | None, tag: int = 0) -> None:
        """Post the receive of a message."""
        buffer = torch.empty(self._capacity, dtype=torch.uint8)
        work = dist.irecv(buffer, peer, group=group, tag=tag)
        assert work is not None
        self._posted.append((work, buffer))

    def receive(
        self,
        peer: int,
        group: dist.ProcessGroup | None,
        clock: ComputeClock,
        *,
        counts: bool,
        tag: int = 0,
    ) -> tuple[Header, Tensor]:
        """Wait for the message posted first; return its header, and the whole message.

        Its bytes count as payload for the clock, which looks for slow links, if it `counts`;
        headers don't. The tag of what doesn't fit into a posted buffer is one more than `tag`.
        """
        work, message = self._posted.popleft()
        # A message of two lengths alone, whose rest follows, carries no payload.
        is_payload = counts and message.numel() > LENGTHS_BYTES
        clock.wait_for(work, peer=peer, num_bytes=message.numel() if is_payload else 0)
        header_length, length = _LENGTHS.unpack_from(message.numpy().data)
        if length > message.numel():
            beginning, message = message, torch.empty(length, dtype=torch.uint8)
            rest = message[beginning.numel() :]
            message[: beginning.numel()] = beginning
            of_rest = dist.irecv(rest, peer, group=group, tag=tag + 1)
            assert of_rest is not None
            clock.wait_for(of_rest, peer=peer, num_bytes=rest.numel() if counts else 0)
        self._longest = max(self._longest, length)
        content = bytes(message.numpy().data[LENGTHS_BYTES : LENGTHS_BYTES + header_length])
        if self._last is None or self._last[0] != content:
            self._last = content, Header(*pickle.loads(content))
            self.header_bytes = _header_bytes(content)
        return self._last[1], message

    def finish(self) -> None:
        """Remember the longest message of this iteration, for the buffers of the next one."""
        self._capacity = self._longest


class Outbox:
    """The sending end of messages that begin with a header."""

    def __init__(self) -> None:
        self._capacity = self._longest = LENGTHS_BYTES
        self._last: tuple[Header, Tensor] | None = None

    def messages(self, header: Header, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the message of a header and tensors, or its beginning and the rest."""
        if self._last is None or self._last[0] != header:
            self._last = header, _first_bytes(header, has_tensors=bool(tensors))
        message = packed(tensors, self._last[1])
        self._longest = max(self._longest, message.numel())
        if message.numel() <= self._capacity:
            return [message]
        return [message[: self._capacity], message[self._capacity :]]

    def finish(self) -> None:
        """Remember the longest message of this iteration, for the buffers of the next one."""
        self._capacity = self._longest


def _first_bytes(header: Header, *, has_tensors: bool) -> Tensor:
    """Return the beginning of a message: lengths and header."""
    content = pickle.dumps(tuple(header))
    start = _header_bytes(content)
    length = start + num_packed_bytes(header.tensors) if has_tensors else start
    made = torch.empty(start, dtype=torch.uint8)
    made.numpy().data[: LENGTHS_BYTES + len(content)] = (
        _LENGTHS.pack(len(content), length) + content
    )
    return made


def _header_bytes(content: bytes) -> int:
    """Return the bytes that a header with this content takes."""
    return -(-(LENGTHS_BYTES + len(content)) // HEADER_BYTES) * HEADER_BYTES
