"""Rows of a parameter with their optimizer state, as ranks hand them to each other.

State of the slice's shape is cut like it. What can't be cut goes whole, with the rows that it is
of, and serves whoever needs just those; a count serves everybody.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hetero.checkpoint.content import RestoredSlice, SliceContent, SliceNeed, num_rows
from lightning_hetero.checkpoint.manifest import WEIGHT, Scalar
from lightning_hetero.core.errors import CheckpointError

__all__ = ["Piece", "cut_piece", "is_followed", "joined", "pack", "unpack"]

_MESSAGE_BYTES = 64 << 20
"""About the most that one message holds, unless a piece alone is larger."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows [start, stop) of a parameter along `dim`."""

    parameter: str
    dim: int
    start: int
    stop: int
    rows: Mapping[str, Tensor]
    """The weight, under `WEIGHT`, and what of the optimizer's state is cut like it."""
    whole: Mapping[str, Tensor]
    """State that can't be cut."""
    whole_of: tuple[int, int]
    """The rows that it is of."""
    scalars: Mapping[str, Scalar]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(item.nbytes for item in (*self.rows.values(), *self.whole.values()))


def cut_piece(content: SliceContent, start: int, stop: int) -> Piece:
    """Return rows of a slice; its tensors are views."""
    like = content.weight.shape
    by_rows = {key: item for key, item in content.state.items() if item.shape == like}
    rows = {WEIGHT: content.weight, **by_rows}
    if (start, stop) != (content.start, content.stop):
        first, count = start - content.start, stop - start
        rows = {key: item.narrow(content.dim, first, count) for key, item in rows.items()}
    others = {key: item for key, item in content.state.items() if key not in by_rows}
    return Piece(
        parameter=content.parameter,
        dim=content.dim,
        start=start,
        stop=stop,
        rows=rows,
        whole={**others, **content.whole_state},
        whole_of=(content.start, content.stop),
        scalars=content.scalars,
    )


def joined(need: SliceNeed, pieces: Sequence[Piece]) -> RestoredSlice:
    """Return the slice that is needed, in memory of its own.

    Args:
        need: The slice.
        pieces: Rows of the parameter, cut along one dim; all that are needed at least.

    Raises:
        CheckpointError: Rows are missing, or state can't be cut as it is needed.
    """
    dim = pieces[0].dim if pieces else need.dim
    is_same_dim = dim == need.dim
    start, stop = (need.start, need.stop) if is_same_dim else (0, num_rows(need.shape, dim))
    parts, position = [], start
    for piece in sorted(pieces, key=lambda item: item.start):
        if piece.start <= position < min(piece.stop, stop):
            first, position = position - piece.start, min(piece.stop, stop)
            parts.append((piece, first, position - piece.start - first))
    if position < stop:
        raise CheckpointError(f"Rows [{position}, {stop}) of {need.parameter} didn't come.")
    found = {key: _by_rows(need, key, parts) for key in parts[0][0].rows}
    if not is_same_dim:
        count = need.stop - need.start
        found = {k: v.narrow(need.dim, need.start, count).clone() for k, v in found.items()}
    state = {key: tensor for key, tensor in found.items() if key != WEIGHT}
    for key in dict.fromkeys(key for piece, _, _ in parts for key in piece.whole):
        state[key] = _whole(need, key, [piece for piece, _, _ in parts]).clone()
    return RestoredSlice(
        parameter=need.parameter,
        weight=found[WEIGHT],
        state=state,
        scalars=parts[0][0].scalars,
    )


def _by_rows(need: SliceNeed, key: str, parts: Sequence[tuple[Piece, int, int]]) -> Tensor:
    tensors = []
    for piece, first, count in parts:
        tensor = piece.rows.get(key)
        if tensor is None or tensor.dtype != parts[0][0].rows[key].dtype:
            raise CheckpointError(f"Some rows of {need.parameter} have another {key} than others.")
        tensors.append(tensor.narrow(piece.dim, first, count) if tensor.ndim else tensor)
    return torch.cat(tensors, parts[0][0].dim) if tensors[0].ndim else tensors[0].clone()


def _whole(need: SliceNeed, key: str, pieces: Sequence[Piece]) -> Tensor:
    for piece in pieces:
        if key not in piece.whole:
            continue
        tensor, (start, stop) = piece.whole[key], piece.whole_of
        if need.is_just(piece.dim, start, stop) or tensor.numel() == 1:
            return tensor
    raise CheckpointError(
        f"Optimizer state {key!r} of {need.parameter} is of other rows than [{need.start}, "
        f"{need.stop}) and can't be cut. Use ownership='parameter' for optimizers whose state "
        "isn't element by element."
    )


def pack(cut: Callable[[], Sequence[Piece]]) -> Iterator[bytes]:
    """Yield the messages that hold some pieces, one or more.

    A message is a byte that says whether another one follows, the size of a head and the head,
    and the bytes of tensors.

    Args:
        cut: Returns the pieces; whatever it raises, `unpack` raises.
    """
    try:
        pieces, first = cut(), 0
        while first < len(pieces) or not first:
            last, size = first, 0
            while last < len(pieces) and (last == first or size < _MESSAGE_BYTES):
                size += pieces[last].num_bytes
                last += 1
            message = _message(pieces[first:last], has_more=last < len(pieces))
            first = max(last, 1)
            yield message
    except Exception as error:
        yield _framed(pickle.dumps(repr(error)), has_more=False)


def _message(pieces: Sequence[Piece], *, has_more: bool) -> bytes:
    tensors = [item for piece in pieces for item in (*piece.rows.values(), *piece.whole.values())]
    nothing = torch.empty(0)
    empty = [
        replace(
            piece,
            rows=dict.fromkeys(piece.rows, nothing),
            whole=dict.fromkeys(piece.whole, nothing),
        )
        for piece in pieces
    ]
    head = pickle.dumps((empty, [(item.dtype, tuple(item.shape)) for item in tensors]))
    return _framed(head, *map(_bytes_of, tensors), has_more=has_more)


def _framed(head: bytes, *data: bytes, has_more: bool) -> bytes:
    return b"".join([bytes([has_more]), len(head).to_bytes(8, "little"), head, *data])


def is_followed(message: bytes) -> bool:
    """Whether another message follows this one."""
    return bool(message[0])


def unpack(message: bytes) -> list[Piece]:
    """Return the pieces of a message.

    Raises:
        CheckpointError: The sender couldn't make it.
    """
    stop = 9 + int.from_bytes(message[1:9], "little")
    head = pickle.loads(message[9:stop])
    if isinstance(head, str):
        raise CheckpointError(f"The sender couldn't give all: {head}")
    pieces, kinds = head
    data, tensors = torch.frombuffer(bytearray(message), dtype=torch.uint8), []
    for dtype, shape in kinds:
        start, stop = stop, stop + torch.Size(shape).numel() * dtype.itemsize
        # Copied, so that each begins where its dtype must.
        tensors.append(data[start:stop].clone().view(dtype).reshape(shape))
    each = iter(tensors)
    return [
        replace(
            piece,
            rows={key: next(each) for key in piece.rows},
            whole={key: next(each) for key in piece.whole},
        )
        for piece in pieces
    ]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
