"""Let all ranks agree on what happened in an iteration, by one small row from each.

A row has a few integers, which show whether anything has changed, and sums: loss, target tokens and
logged values. Rank 0 gathers the rows and sends all of them to all ranks. A row is sent as soon as
the rank's schedule ends and is read after the push, so the exchange adds little waiting. Python
objects are gathered only if a rank reports something new. On an accelerator the sums are gathered
on the device, apart from the integers, so that the host doesn't wait for its device.

With standbys rows are sent only after the push, so a rank that has all rows knows that all ranks
have their gradients. If a rank is lost before it has sent its row, no rank makes the optimizer
step. If rank 0 is lost while it sends all rows to the others, some ranks may make the step and
others not; then the run goes on from its newest checkpoint.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag, auto
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import BatchError
from lightning_hetero.runtime.iteration.buffers import BufferChange
from lightning_hetero.runtime.iteration.recomputation_choice import MeasuredBytes
from lightning_hetero.runtime.ranks.communicators import Communicators, Rows, all_gather_single
from lightning_hetero.runtime.results.step_logs import LogEntry

_NUM_INTEGERS = 5
_MAX_KNOWN = 64


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank reports of an iteration as Python objects, which seldom change."""

    entries: tuple[LogEntry, ...]
    """The names and options of the values that its steps logged."""
    missing: tuple[str, ...]
    """Trainable parameters that it holds and that got no gradient in its backward passes."""
    buffers: tuple[BufferChange, ...] = ()
    """Buffers that its steps changed."""
    reads: tuple[str, ...] = ()
    """Parameters outside the layers that it used; empty in iterations that don't record this."""
    measured: MeasuredBytes | None = None
    """The bytes that one of its layers keeps for backward, if they were counted."""


class Reports:
    """The reports of all ranks, merged once and used in many iterations."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.entries = tuple(dict.fromkeys(entry for item in reports for entry in item.entries))
        """The entries of all ranks, in the same order everywhere."""
        self.num_missing = Counter(name for item in reports for name in item.missing)
        """For each parameter the number of holders without a gradient of it."""
        self.buffers = {rank: item.buffers for rank, item in enumerate(reports) if item.buffers}
        """By global rank, the buffers that it has changed."""
        self.reads = {rank: item.reads for rank, item in enumerate(reports) if item.reads}
        """By global rank, the parameters outside the layers that it has used."""
        self.measured = [item.measured for item in reports if item.measured is not None]
        """What ranks have counted of their layers."""


class Flag(IntFlag):
    """What a rank may have to tell."""

    LEAVES = auto()
    """Its machine is about to be taken away."""
    SEES_JOINERS = auto()
    """It knows of processes that wait to join."""
    RETURNS = auto()
    """Its steps returned outputs, or appended items to lists, that other ranks must get."""


class Header(NamedTuple):
    """The integers of a rank's row."""

    num_samples: int
    """Weight of the pipeline's samples in an epoch's mean, from its first rank; else 0."""
    pipeline_index: int
    """This rank's pipeline, -1 if idle."""
    fingerprint: int
    """Hash of this rank's batch, 0 if idle; it must be the same on all ranks of a pipeline."""
    flags: Flag


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The outcome of the exchange, the same on each rank."""

    reports: Reports
    num_samples: int
    """Weight of the iteration in an epoch's mean, summed over pipelines."""
    leaving: frozenset[int]
    """Ranks whose machines are about to be taken away."""
    has_joiners: bool
    """Whether processes wait to join."""
    returns: bool
    """Whether any rank's steps returned or appended anything that other ranks must get."""
    sums: Tensor
    """The sums of each rank: shape (num_ranks, length), float64."""


class Agreement:
    """The agreement in iterations of one phase, such as training.

    Every rank calls `begin`, then `finish`, once per iteration. Reports are remembered, so that
    equal ones needn't be sent again.
    """

    def __init__(self, comms: Communicators, device: torch.device) -> None:
        self._comms = comms
        self._device = device
        self._known: dict[bytes, Reports] = {}
        self._pipelines = b""
        self._first_ranks: IntArray = np.empty(0, np.int64)
        """For each global rank the first rank of its pipeline, under the plan that ran last."""
        self._entries: tuple[LogEntry, ...] = ()

    def begin(
        self, report: Report, header: Header, sums_of: Callable[[Sequence[LogEntry]], Tensor]
    ) -> None:
        """Send this rank's row, without waiting for the others'."""
        self._report, self._sums_of = report, sums_of
        digest = zlib.crc32(repr(report).encode())
        integers = torch.tensor([digest, *header], dtype=torch.float64)
        sums = sums_of(self._entries)
        self._on_device: _DeviceGather | None = None
        if self._device.type == "cpu":
            integers = torch.cat([integers, sums])
        else:
            self._on_device = _DeviceGather(sums, self._comms)
        self._rows = Rows(integers, self._comms.control)

    def finish(self) -> Agreed:
        """Wait for the rows of all ranks, and return the outcome.

        Raises:
            BatchError: On every rank, if ranks of one pipeline have different batches.
        """
        rows = self._rows.share()
        integers: IntArray = rows[:, :_NUM_INTEGERS].numpy().astype(np.int64)
        sums = rows[:, _NUM_INTEGERS:] if self._on_device is None else self._on_device.wait()
        digests, num_samples, pipelines, fingerprints, flags = integers.T
        if pipelines.tobytes() != self._pipelines:
            self._pipelines, self._first_ranks = pipelines.tobytes(), _first_ranks(pipelines)
        _check_fingerprints(pipelines, fingerprints, self._first_ranks)
        reports = self._reports_of(digests.tobytes())
        if reports.entries != self._entries:
            self._entries = reports.entries
            sums = self._gather(self._sums_of(reports.entries))
        del self._sums_of  # It refers to the iteration, which refers to the plan's weights.
        told = Flag(int(np.bitwise_or.reduce(flags)))
        return Agreed(
            reports=reports,
            num_samples=int(num_samples.sum()),
            leaving=frozenset((flags & Flag.LEAVES).nonzero()[0].tolist()),
            has_joiners=Flag.SEES_JOINERS in told,
            returns=Flag.RETURNS in told,
            sums=sums,
        )

    def _reports_of(self, digests: bytes) -> Reports:
        """Return the reports of all ranks.

        They are gathered only if their digests, which the rows contain, are new.
        """
        if digests not in self._known:
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            self._known[digests] = Reports(self._comms.gather_objects(self._report))
        return self._known[digests]

    def _gather(self, sums: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return Rows(sums, self._comms.control).share()
        return _DeviceGather(sums, self._comms).wait()


class _DeviceGather:
    """An asynchronous all-gather of equally long rows on an accelerator."""

    def __init__(self, row: Tensor, comms: Communicators) -> None:
        self._work: dist.Work | None = None
        self._rows = row[None]
        if comms.world_size > 1:
            self._rows = row.new_empty(comms.world_size, len(row))
            self._work = all_gather_single(self._rows, row, comms.values, async_op=True)

    def wait(self) -> Tensor:
        """Return the rows of all ranks: shape (num_ranks, length)."""
        if self._work is not None:
            self._work.wait()
        return self._rows


def _first_ranks(pipelines: IntArray) -> IntArray:
    """Return the first rank of each rank's pipeline, by global rank."""
    _, first_ranks, of_rank = np.unique(pipelines, return_index=True, return_inverse=True)
    found: IntArray = first_ranks[of_rank]
    return found


def _check_fingerprints(pipelines: IntArray, fingerprints: IntArray, first_ranks: IntArray) -> None:
    """Refuse different batches on the ranks of one pipeline; all arguments are by global rank."""
    wrong = (pipelines >= 0) & (fingerprints != fingerprints[first_ranks])
    if wrong.any():
        global_rank = int(wrong.argmax())
        raise BatchError(
            f"Ranks {first_ranks[global_rank]} and {global_rank} of pipeline "
            f"{pipelines[global_rank]} got different batches, but the stages of a pipeline work on "
            "the same samples. Give every rank the same data loader: the same samples (random ones "
            "need seed_everything first) in the same order (a seeded generator), and no sharding "
            "by global rank, which the strategy does itself."
        )
