"""Pull and push units by proxies: holders gather and sum, and proxies exchange rows with owners.

See `core.proxies`. The *rows* between owners and proxies travel for a whole run of units, in one
message to each peer: in a pull before the run's first unit is gathered, in a push after its last
unit is summed. Ranks that own rows but hold none take part in that leg only.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hetero.runtime.exchange.even import EvenPieces, GatheredUnit, ScatteredUnit
from lightning_hetero.runtime.exchange.messages import Sums, TwoLegged
from lightning_hetero.runtime.exchange.parcel_table import Parcel, Part
from lightning_hetero.runtime.exchange.parcels import ParcelUnit, SentPart
from lightning_hetero.runtime.slices.weights import narrow_rows

__all__ = ["GatheredFromProxies", "PulledRows", "PushedRows", "ScatteredToProxies"]


@dataclass(eq=False)
class _Rows(ParcelUnit):
    """This rank's part in moving the rows of a run of units between owners and proxies."""

    pieces: Sequence[EvenPieces] = ()
    """The layout of this rank's piece of each unit; none if it is no proxy."""

    def _of_pieces(self, lines: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's piece of each parameter, as views of its piece of each unit."""
        pairs = zip(self.pieces, lines, strict=True)
        return [piece for pieces, line in pairs for piece in pieces.unpack_own(line)]

    def _of_piece(self, pieces: Sequence[Tensor], part: Part) -> Tensor:
        return narrow_rows(pieces[part.index], self._spec(part), *part.held)


@dataclass(eq=False)
class PulledRows(_Rows):
    """Weights on their way from owners to proxies."""

    lines: list[Tensor] = field(default_factory=list, init=False)
    """This rank's piece of each unit, from `post` to `finish`."""
    _buffers: list[Tensor] = field(default_factory=list, init=False)

    @property
    def arriving_weights(self) -> dict[str, nn.Parameter]:
        """None: what arrives here has yet to be gathered."""
        return {}

    def _of_slice(self, part: Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.weights.home(spec.name), spec, *part.owned)

    @cached_property
    def _sending(self) -> list[SentPart]:
        """What this rank sends; made once, since slices never move in memory."""
        return [
            SentPart([parcel.destination], parcel.numel, [*map(self._of_slice, parcel.parts)])
            for parcel in self.parcels.leaving
        ]

    def post(self) -> None:
        """Post sends and receives."""
        self.lines = [self._empty(pieces.numel) for pieces in self.pieces]
        self._buffers = self._exchange(self._sending)

    def arrive(self) -> None:
        """Wait for the rows of all units, and copy them into `lines`.

        On a device without streams the host waits.
        """
        for work in self._receives:
            work.wait()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        pieces = self._of_pieces(self.lines)
        for parcel, buffer in zip(self.parcels.arriving, self._buffers, strict=True):
            sources += parcel.split(buffer)
            targets += [self._of_piece(pieces, part) for part in parcel.parts]
        for parcel in self.parcels.kept:
            own = self._packed([self._of_slice(part) for part in parcel.parts])
            sources += parcel.split(own)
            targets += [self._of_piece(pieces, part) for part in parcel.parts]
        if targets:
            pairs = zip(sources, targets, strict=True)
            torch._foreach_copy_(targets, [source.view(target.shape) for source, target in pairs])
        self._receives, self._buffers = [], []

    def wait(self) -> None:
        """Do nothing: no layer of this rank uses the rows directly."""

    @override
    def finish(self) -> None:
        super().finish()
        self.lines = []


@dataclass(eq=False)
class GatheredFromProxies(GatheredUnit, TwoLegged):
    """A unit whose weights are gathered from its proxies."""

    rows: PulledRows = field(kw_only=True)
    place: int = field(kw_only=True)
    """The unit's place in its run."""

    @override
    def post(self) -> None:
        if self.place == 0:
            self.rows.post()

    @override
    def go_on(self) -> None:
        """Post the all-gather, once this rank's piece has arrived."""
        if self.place == 0:
            self.rows.arrive()
        self._gather(self.rows.lines[self.place])

    @override
    def finish(self) -> None:
        super().finish()
        if self.place == 0:
            self.rows.finish()


@dataclass(eq=False)
class PushedRows(_Rows, TwoLegged):
    """Sums on their way from proxies to owners and standbys."""

    sums: dict[int, Tensor] = field(default_factory=dict, init=False)
    """This rank's summed piece of each unit, by the unit's place in the run."""
    _kept_parcels: list[tuple[Parcel, Tensor]] = field(default_factory=list, init=False)
    _buffers: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        masters = (self.store.masters[spec.name].dtype for spec in self.unit.specs)
        dtype = reduce(torch.promote_types, masters, torch.float32)
        self.options = replace(self.options, dtype=dtype)

    @property
    def leaving(self) -> set[str]:
        """None: no gradients leave a rank that is no proxy."""
        return set()

    def gradients(self) -> list[Tensor]:
        """Return nothing, as no backward pass makes any."""
        return []

    def post(self) -> None:
        """Post nothing yet."""

    @override
    def go_on(self) -> None:
        """Post the sums, which must be final."""
        pieces = self._of_pieces([self.sums[place] for place in range(len(self.pieces))])

        def packed(parcel: Parcel) -> Tensor:
            return self._packed([self._of_piece(pieces, part) for part in parcel.parts])

        self._kept_parcels = [(parcel, packed(parcel)) for parcel in self.parcels.kept]
        sent = [
            SentPart([parcel.destination], parcel.numel, [packed(parcel)])
            for parcel in self.parcels.leaving
        ]
        self._buffers = self._exchange(sent)
        self.sums.clear()

    def wait(self) -> None:
        """Wait for the sums of what this rank keeps."""
        self._wait_for_arrivals()

    def sum(self) -> Sums:
        """Return the sums of what this rank keeps: each row comes from one proxy."""
        arrived = [*zip(self.parcels.arriving, self._buffers, strict=True), *self._kept_parcels]
        totals: dict[str, Tensor] = {}
        found: dict[str, list[tuple[Part, Tensor]]] = defaultdict(list)
        for parcel, buffer in arrived:
            for part, piece in zip(parcel.parts, parcel.split(buffer), strict=True):
                found[self._spec(part).name].append((part, piece))
        for name, parts in found.items():
            shape, spec = self.store.masters[name].shape, self.store.specs[name]
            if len(parts) == 1:
                totals[name] = parts[0][1].view(shape)
                continue
            total = totals[name] = self._empty(shape.numel()).view(shape)
            for part, piece in parts:
                rows = narrow_rows(total, spec, *part.owned)
                rows.copy_(piece.view(rows.shape))
        if all(len(parts) == 1 for parts in found.values()):
            return Sums(totals, [buffer for _, buffer in arrived])
        return Sums.of(totals)

    @override
    def finish(self) -> None:
        super().finish()
        self._buffers, self._kept_parcels = [], []


@dataclass(eq=False)
class ScatteredToProxies(ScatteredUnit, TwoLegged):
    """A unit whose gradients are summed by its proxies, and sent on to the owners."""

    rows: PushedRows = field(kw_only=True)
    place: int = field(kw_only=True)
    """The unit's place in its run; the first unit is summed last."""

    @override
    def go_on(self) -> None:
        """Wait for this rank's piece and sum it; after the run's last piece post all sums.

        On a device without streams the host waits.
        """
        assert self._work is not None
        self._work.wait()
        self.rows.sums[self.place] = self._sum_up()
        self._work = self._given = self._received = None
        if self.place == 0:
            self.rows.go_on()

    @override
    def wait(self) -> None:
        if self.place == 0:
            self.rows.wait()

    @override
    def sum(self) -> Sums:
        return self.rows.sum() if self.place == 0 else Sums({}, [])

    @override
    def finish(self) -> None:
        super().finish()
        if self.place == 0:
            self.rows.finish()
