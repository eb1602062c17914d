"""Agree between all ranks on what happened in an iteration, with one small all-gather.

Every rank gives a row: a few integers (did anything change?) and sums (loss, target tokens, logged
values). It is sent as soon as the rank's schedule ends and read after the push, so it costs no wait
of its own. Objects travel only when ranks report what they haven't before. On an
accelerator the sums are gathered there, apart from the integers, so nothing waits for the device.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.errors import BatchError
from lightning_hetero.runtime.iteration.buffers import BufferChange
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.results.number_kinds import Kind
from lightning_hetero.runtime.results.step_logs import LogEntry

__all__ = ["Agreed", "Agreement", "Header", "Report"]

_NUM_INTEGERS = 7
_BITS = {Kind.MEAN: 1, Kind.SUM: 2, Kind.UNKNOWN: 4, Kind.MIXED: 8}
_MAX_KNOWN = 64


@dataclass(frozen=True, kw_only=True)
class Report:
    """The part of a rank's account of an iteration that seldom changes."""

    entries: tuple[LogEntry, ...]
    """Logged by its steps."""
    missing: tuple[str, ...]
    """Parameters that it holds and for which its backward made no gradient."""
    buffers: tuple[BufferChange, ...] = ()
    """Buffers that its steps changed."""
    reads: tuple[str, ...] = ()
    """Parameters outside the layers that it used, if that was watched."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """A rank's integers."""

    num_samples: int
    """Weight of this rank's samples; only the first rank of a pipeline gives it."""
    pipeline_index: int
    """This rank's pipeline, -1 if idle."""
    fingerprint: int
    """Of this rank's batch, 0 if idle; must agree inside a pipeline."""
    is_leaving: bool
    """Whether this rank's machine is about to be taken away."""
    loss_kinds: frozenset[Kind]
    """Kinds of the losses of this rank's micro-batches."""
    returns: bool
    """Whether this rank's steps returned, or appended, what other ranks must get."""


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The outcome of the exchange, the same on each rank."""

    reports: tuple[Report, ...]
    """The ranks' reports, by global rank."""
    entries: tuple[LogEntry, ...]
    """All entries in one order."""
    num_samples: int
    """Weight of the iteration in an epoch's mean, summed over pipelines."""
    leaving: frozenset[int]
    """Ranks whose machines are about to be taken away."""
    loss_kinds: frozenset[Kind]
    """Kinds of the losses of all ranks."""
    returns: bool
    """Whether any rank's steps left behind what others must get."""
    sums: Tensor
    """Each rank's sums, (num_ranks, length)."""


class Agreement:
    """The exchange of one phase; remembers what ranks reported, for each plan they ran.

    Called by every rank once per iteration: `begin`, then `finish`.

    Args:
        comms: The communicators.
        device: Where sums are computed.
    """

    def __init__(self, comms: Communicators, device: torch.device) -> None:
        self._comms = comms
        self._device = device
        self._known: dict[tuple[int, ...], tuple[Report, ...]] = {}
        self._entries: tuple[LogEntry, ...] = ()

    def begin(
        self, report: Report, header: Header, sums_of: Callable[[Sequence[LogEntry]], Tensor]
    ) -> None:
        """Send this rank's row, without waiting for the others'.

        Args:
            report: What changed seldom.
            header: What changes each time.
            sums_of: Returns this rank's float64 sums for the given entries.
        """
        self._report, self._sums_of = report, sums_of
        digest = zlib.crc32(repr(report).encode())
        numbers = [
            digest,
            header.num_samples,
            header.pipeline_index,
            header.fingerprint,
            header.is_leaving,
            sum(bit for kind, bit in _BITS.items() if kind in header.loss_kinds),
            header.returns,
        ]
        integers = torch.tensor(numbers, dtype=torch.float64)
        sums = sums_of(self._entries)
        if self._device.type == "cpu":
            self._gathers = [_Gather(torch.cat([integers, sums]), self._comms.control, self._comms)]
        else:
            self._gathers = [
                _Gather(integers, self._comms.control, self._comms),
                _Gather(sums, self._comms.values, self._comms),
            ]

    def finish(self) -> Agreed:
        """Return what all ranks said.

        Raises:
            BatchError: Ranks of one pipeline have different batches.
        """
        parts = [gather.wait() for gather in self._gathers]
        integers = [[int(value) for value in row] for row in parts[0][:, :_NUM_INTEGERS].tolist()]
        sums = parts[1] if len(parts) > 1 else parts[0][:, _NUM_INTEGERS:]
        _check_fingerprints(integers)
        digests = tuple(row[0] for row in integers)
        if digests not in self._known:
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            self._known[digests] = tuple(self._comms.gather_objects(self._report))
        reports = self._known[digests]
        entries = tuple(dict.fromkeys(entry for report in reports for entry in report.entries))
        if entries != self._entries:
            self._entries = entries
            sums = _Gather(self._sums_of(entries), self._comms.values, self._comms).wait()
        del self._sums_of  # It holds the iteration, and that holds the plan's weights.
        return Agreed(
            reports=reports,
            entries=entries,
            num_samples=sum(row[1] for row in integers),
            leaving=frozenset(rank for rank, row in enumerate(integers) if row[4]),
            loss_kinds=frozenset(
                kind for kind, bit in _BITS.items() if any(row[5] & bit for row in integers)
            ),
            returns=any(row[6] for row in integers),
            sums=sums,
        )


class _Gather:
    """An all-gather of equal rows under way."""

    def __init__(self, row: Tensor, group: dist.ProcessGroup | None, comms: Communicators) -> None:
        self._work: dist.Work | None = None
        self._rows = row[None]
        if comms.world_size > 1:
            self._rows = row.new_empty(comms.world_size, len(row))
            parts = list(self._rows.unbind(0))
            self._work = dist.all_gather(parts, row, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return every rank's row, (num_ranks, length)."""
        if self._work is not None:
            self._work.wait()
        return self._rows


def _check_fingerprints(rows: Sequence[Sequence[int]]) -> None:
    seen: dict[int, tuple[int, int]] = {}
    for global_rank, (_, _, pipeline_index, fingerprint, *_) in enumerate(rows):
        first_rank, first = seen.setdefault(pipeline_index, (global_rank, fingerprint))
        if pipeline_index >= 0 and first != fingerprint:
            raise BatchError(
                f"Ranks {first_rank} and {global_rank} of pipeline {pipeline_index} got different "
                "batches, but the stages of a pipeline work on the same samples. Give every rank "
                "the same data loader: the same order (seed_everything, or a seeded generator), "
                "and no sharding by global rank, which the strategy does itself."
            )
