"""Pull weights from the owners of slices into the plan, in order of need.

All of a pull is posted before the first layer runs, and a layer waits for its own weights only. Who
reads a weight elsewhere in a step, such as a penalty on weights, waits for it there. A
`torch.profiler` trace shows the ranges "pull.post" and "pull.wait" with their units.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.transfers import Message, Piece
from lightning_hetero.runtime.clock import traced
from lightning_hetero.runtime.exchange.messages import (
    ExchangeOptions,
    in_units,
    pack,
    split_works,
    wait_for_all,
)
from lightning_hetero.runtime.slices.known_by_shape import ASKS_FOR_NO_VALUE, show_values
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, narrow_rows

__all__ = ["Pull"]


class _Arriving(nn.Parameter):
    """A compute weight under way; whoever computes with it waits for it first."""

    _wait: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ASKS_FOR_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, _Arriving):
                item._wait()
        return func(*args, **kwargs)


def _mark(weights: Iterable[Any], wait: Callable[[], None]) -> None:
    for weight in weights:
        weight.__class__ = _Arriving
        weight._wait = wait


def _unmark(weights: Iterable[Any]) -> None:
    for weight in weights:
        # Or weight and pull would hold each other until Python looks for such cycles.
        vars(weight).pop("_wait", None)
        if type(weight) is _Arriving:
            show_values([weight])


@dataclass
class _Sending:
    """Rows that leave this rank for one or more peers, in one message each."""

    peers: list[int]
    rows: list[Tensor]


@dataclass(frozen=True)
class _Receiving:
    """One peer's message, and the places in shards that it fills."""

    peer: int
    targets: list[Tensor]
    sizes: list[int]
    """Elements of each target."""


@dataclass
class _PullUnit:
    """One unit's part in every pull: views into slices and compute weights, made once."""

    sending: dict[tuple[Piece, ...], _Sending]
    receiving: list[_Receiving]
    copies: list[tuple[Tensor, Tensor]]
    """(target, source) of what is owned and held here."""
    weights: dict[str, nn.Parameter]
    """The compute weights that it brings up to date."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, as slices and compute weights share their memory."""
        return not (self.sending or self.receiving or self.copies)


class Pull:
    """Bring the stage's weights up to date: posted at once, waited for unit by unit.

    Called by every rank once per iteration: `start`, then `wait_unit` before a unit computes, then
    `finish`. Moves something only where `mark_stale` was called since; at first all is stale.
    """

    def __init__(
        self,
        store: SliceStore,
        weights: ComputeWeights,
        options: ExchangeOptions,
    ) -> None:
        self._store = store
        self._weights = weights
        self._options = options
        rank = store.global_rank
        self._all = self._prepare(weights.table.pull(rank))
        self._trainable = self._prepare(weights.table.pull(rank, trainable_only=True))
        self._stale: dict[int, _PullUnit] | None = self._all
        """Units that the next pull moves; None if nothing has changed."""
        self._arriving: dict[int, tuple[list[dist.Work], list[tuple[_Receiving, Tensor]]]] = {}
        self._posted: dict[int, torch.cuda.Event | None] = {}
        """Units under way; on CUDA, the end of their packing and local copies."""
        self._sent: list[tuple[list[dist.Work], list[Tensor]]] = []
        self._seen: dict[str, tuple[int, int]] = {}
        """How slices were when the last pull ended."""
        self._arrived: dict[str, int] = {}
        """How often each compute weight had been changed in place when it arrived."""

    def _prepare(self, messages: Sequence[Message]) -> dict[int, _PullUnit]:
        units = {}
        for unit, items in in_units(messages).items():
            prepared = units[unit] = _PullUnit({}, [], [], {})
            for message in items:
                self._prepare_message(prepared, message)
        return {unit: prepared for unit, prepared in units.items() if not prepared.is_empty}

    def _prepare_message(self, unit: _PullUnit, message: Message) -> None:
        rank, rows = self._store.global_rank, self._weights.rows
        if message.source == rank == message.destination:
            for piece in message.pieces:
                if piece.parameter not in self._weights.shared:
                    target = rows(piece.parameter, piece.start, piece.stop)
                    unit.copies.append((target, self._own_rows(piece)))
                    unit.weights[piece.parameter] = self._weights.shards[piece.parameter]
        elif message.source == rank:
            # Peers that need the same pieces share one buffer.
            own = [self._own_rows(piece) for piece in message.pieces]
            sending = unit.sending.setdefault(message.pieces, _Sending([], own))
            sending.peers.append(message.destination)
        else:
            targets = [rows(piece.parameter, piece.start, piece.stop) for piece in message.pieces]
            shards = self._weights.shards
            unit.weights |= {piece.parameter: shards[piece.parameter] for piece in message.pieces}
            sizes = [target.numel() for target in targets]
            unit.receiving.append(_Receiving(message.source, targets, sizes))

    def _own_rows(self, piece: Piece) -> Tensor:
        first, _ = self._store.intervals[piece.parameter]
        master = self._store.masters[piece.parameter].detach()
        spec = self._store.specs[piece.parameter]
        return narrow_rows(master, spec, piece.start - first, piece.stop - first)

    def mark_stale(self, *, only_trainable: bool = False) -> None:
        """Say that slices have changed, or only those of trainable parameters."""
        trainable = only_trainable and self._stale is not self._all
        self._stale = self._trainable if trainable else self._all

    def start(self) -> None:
        """Post every message of this rank, units ascending, and make the local copies.

        Raises:
            ModelError: A slice has changed that isn't stale.
        """
        self._check_unchanged()
        self._arrived = _versions_of(self._weights.shards)
        if self._stale is None:
            return
        self._weights.take_back()
        with self._options.side_stream.after_compute():
            for index, unit in self._stale.items():
                with traced(f"pull.post {index}"):
                    self._post(index, unit)
                self._posted[index] = self._options.side_stream.mark()
                _mark(unit.weights.values(), partial(self.wait_unit, index))

    def _check_unchanged(self) -> None:
        """Refuse weights that were changed where no pull is due: others would have old ones."""
        if self._stale is self._all:
            return
        for name, before in self._seen.items():
            master = self._store.masters[name]
            is_due = self._stale is not None and master.requires_grad
            if not is_due and before != _mark_of(master):
                raise ModelError(
                    f"Parameter {name} was changed between steps, without an optimizer's step on "
                    "it, as a hook does that averages weights into frozen ones. Let it require "
                    "gradients and use it under torch.no_grad(): then it travels in each step."
                )

    def _post(self, index: int, unit: _PullUnit) -> None:
        operations, arrivals, buffers = [], [], []
        for target, source in unit.copies:
            target.copy_(source)
        for sending in unit.sending.values():
            buffer = pack(sending.rows, self._options.dtype)
            buffers.append(buffer)
            for peer in sending.peers:
                operations.append(dist.P2POp(dist.isend, buffer, peer, self._options.group))
        for receiving in unit.receiving:
            buffer = torch.empty(
                sum(receiving.sizes), dtype=self._options.dtype, device=self._store.device
            )
            arrivals.append((receiving, buffer))
            operations.append(dist.P2POp(dist.irecv, buffer, receiving.peer, self._options.group))
        if operations:
            receives, sends = split_works(operations, dist.batch_isend_irecv(operations))
            self._sent.append((sends, buffers))
            if arrivals:
                self._arriving[index] = receives, arrivals

    def wait_unit(self, unit: int) -> None:
        """Wait until a unit's weights are here; returns at once if they are already."""
        if unit not in self._posted:
            return
        with self._options.clock.waiting():
            self._options.side_stream.join(self._posted.pop(unit))
            if unit in self._arriving:
                with traced(f"pull.wait {unit}"):
                    self._unpack(*self._arriving.pop(unit))
        assert self._stale is not None
        weights = self._stale[unit].weights
        self._arrived |= _versions_of(weights)
        _unmark(weights.values())

    def _unpack(
        self, works: Sequence[dist.Work], arrivals: Sequence[tuple[_Receiving, Tensor]]
    ) -> None:
        senders = [(receiving.peer, buffer.nbytes) for receiving, buffer in arrivals]
        wait_for_all(self._options.clock, works, senders)
        for receiving, buffer in arrivals:
            parts = torch.split(buffer, receiving.sizes)
            for target, part in zip(receiving.targets, parts, strict=True):
                target.copy_(part.view(target.shape))

    def finish(self) -> None:
        """Wait for everything that is left, also for what other ranks fetch from here.

        Raises:
            ModelError: The step has changed a weight.
        """
        for unit in tuple(self._posted):
            self.wait_unit(unit)
        for name, version in _versions_of(self._weights.shards).items():
            if self._arrived[name] != version:
                raise ModelError(
                    f"A step changes parameter {name} in place, which each micro-batch does, and "
                    "to this rank's copy only. Change it in on_train_batch_end, leave max_norm of "
                    "embeddings out, or register what isn't optimized as a buffer."
                )
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent.clear()
        self._stale = None
        self._seen = {name: _mark_of(item) for name, item in self._store.masters.items()}


def _versions_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    with torch._C.DisableTorchFunctionSubclass():  # It asks for no values.
        return {name: weight._version for name, weight in weights.items()}


def _mark_of(master: Tensor) -> tuple[int, int]:
    """Return what differs after most changes; not after `master.data.mul_(...)`."""
    return master._version, master.data_ptr()
