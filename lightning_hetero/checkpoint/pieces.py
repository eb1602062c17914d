"""Rows of a parameter with their optimizer state, as ranks hand them to each other.

State of the slice's shape is cut like it. What can't be cut goes whole, with the rows that it is
of, and serves whoever needs just those; a count serves everybody.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero.checkpoint.content import RestoredSlice, SliceContent, SliceNeed, num_rows
from lightning_hetero.checkpoint.manifest import WEIGHT, Scalar
from lightning_hetero.core.errors import CheckpointError

__all__ = ["Piece", "cut_piece", "is_followed", "joined", "pack", "unpack"]

_TENSORS = "rows", "whole"
"""The fields of a piece that hold tensors."""
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
        is_all = not tensor.ndim or count == tensor.shape[piece.dim]
        tensors.append(tensor if is_all else tensor.narrow(piece.dim, first, count))
    if len(tensors) > 1 and tensors[0].ndim:
        return torch.cat(tensors, parts[0][0].dim)
    return tensors[0].clone(memory_format=torch.contiguous_format)


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
    and the bytes of tensors, those of one dtype after those of another.

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
    facts, by_dtype = [], defaultdict[torch.dtype, list[Tensor]](list)
    for piece in pieces:
        fields = dict(vars(piece))
        for name in _TENSORS:
            fields[name] = {key: (t.dtype, tuple(t.shape)) for key, t in fields[name].items()}
            for tensor in getattr(piece, name).values():
                by_dtype[tensor.dtype].append(tensor)
        facts.append(fields)
    sizes = {dtype: [tensor.numel() for tensor in found] for dtype, found in by_dtype.items()}
    flat = [t.reshape(-1).view(torch.uint8) for found in by_dtype.values() for t in found]
    data = torch.cat(flat).numpy().tobytes() if flat else b""
    return _framed(pickle.dumps((facts, sizes)), data, has_more=has_more)


def _framed(head: bytes, data: bytes = b"", *, has_more: bool) -> bytes:
    return b"".join([bytes([has_more]), len(head).to_bytes(8, "little"), head, data])


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
    facts, sizes = head
    data, tensors = torch.frombuffer(bytearray(message), dtype=torch.uint8), {}
    for dtype, numels in sizes.items():
        start, stop = stop, stop + sum(numels) * dtype.itemsize
        # Copied, so that each begins where its dtype must.
        tensors[dtype] = iter(torch.split(data[start:stop].clone().view(dtype), numels))
    pieces = []
    for fields in facts:
        for name in _TENSORS:
            kinds = fields[name].items()
            fields[name] = {key: next(tensors[dtype]).view(shape) for key, (dtype, shape) in kinds}
        pieces.append(Piece(**fields))
    return pieces
