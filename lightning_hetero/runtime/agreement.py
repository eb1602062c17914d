"""Agree between all ranks on what happened in an iteration, with two small collectives.

Every rank gives a few integers (did anything change?) and a row of sums (loss, target tokens,
logged values). Objects travel only when a rank's integers differ from the last iteration's, so the
usual cost is one all-gather of 40 bytes and one of a few hundred per rank.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_hetero.core.errors import BatchError
from lightning_hetero.runtime.step_logs import LogEntry

__all__ = ["Agreed", "Agreement", "Report", "fingerprint_of"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says about an iteration."""

    entries: tuple[LogEntry, ...]
    """What its steps logged."""
    missing: tuple[str, ...]
    """Parameters that it holds and for which its backward made no gradient."""


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know after the exchange, the same on each."""

    reports: tuple[Report, ...]
    """The ranks' reports, by global rank."""
    entries: tuple[LogEntry, ...]
    """All entries in one order."""
    num_samples: int
    """Weight of the iteration in an epoch's mean, summed over pipelines."""
    changed: bool
    """Whether a report differs from the last iteration's."""


class Agreement:
    """The exchange of one kind of step; remembers the reports of the last iteration.

    Args:
        group: Communicator of all ranks on CPU (gloo); None when there is only one.
        world_size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, world_size: int) -> None:
        self._group = group
        self._world_size = world_size
        self._digests: list[int] = []
        self._agreed: tuple[tuple[Report, ...], tuple[LogEntry, ...]] = ((), ())

    def exchange(
        self, report: Report, *, num_samples: int, pipeline_index: int, fingerprint: int
    ) -> Agreed:
        """Exchange reports; called by every rank once per iteration.

        Args:
            report: This rank's.
            num_samples: Weight of this rank's samples; only the first rank of a pipeline gives it.
            pipeline_index: This rank's pipeline, -1 if idle.
            fingerprint: Of this rank's batch; must agree inside a pipeline.

        Raises:
            BatchError: Ranks of one pipeline have different batches.
        """
        digest = zlib.crc32(repr(report).encode())
        mine = torch.tensor([digest, num_samples, pipeline_index, fingerprint])
        rows = self._gather_integers(mine)
        _check_fingerprints(rows)
        digests = [row[0] for row in rows]
        changed = digests != self._digests
        if changed:
            reports = self._gather_reports(report)
            entries = tuple(dict.fromkeys(e for item in reports for e in item.entries))
            self._digests, self._agreed = digests, (reports, entries)
        reports, entries = self._agreed
        return Agreed(
            reports=reports,
            entries=entries,
            num_samples=sum(row[1] for row in rows),
            changed=changed,
        )

    def gather_rows(self, row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return every rank's row of equal length, (num_ranks, length)."""
        if self._world_size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self._world_size)]
        dist.all_gather(rows, row, group=group)
        return torch.stack(rows)

    def _gather_integers(self, mine: Tensor) -> list[list[int]]:
        if self._world_size == 1:
            return [mine.tolist()]
        rows = [torch.empty_like(mine) for _ in range(self._world_size)]
        dist.all_gather(rows, mine, group=self._group)
        return [row.tolist() for row in rows]

    def _gather_reports(self, report: Report) -> tuple[Report, ...]:
        if self._world_size == 1:
            return (report,)
        reports: list[Report | None] = [None] * self._world_size
        dist.all_gather_object(reports, report, group=self._group)
        return tuple(item for item in reports if item is not None)


def _check_fingerprints(rows: Sequence[Sequence[int]]) -> None:
    seen: dict[int, tuple[int, int]] = {}
    for global_rank, (_, _, pipeline_index, fingerprint) in enumerate(rows):
        first_rank, first = seen.setdefault(pipeline_index, (global_rank, fingerprint))
        if pipeline_index >= 0 and first != fingerprint:
            raise BatchError(
                f"Ranks {first_rank} and {global_rank} of pipeline {pipeline_index} got different "
                "batches, but the stages of a pipeline work on the same samples. Give every rank "
                "the same data loader: the same order (seed_everything, or a seeded generator), "
                "and no sharding by global rank, which the strategy does itself."
            )


def fingerprint_of(batch: object) -> int:
    """Return a checksum of a batch's shapes and, where it costs no wait, of its first values."""
    leaves = tree_flatten(vars(batch) if hasattr(batch, "__dict__") else batch)[0]
    digest = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest = zlib.crc32(repr(tuple(leaf.shape)).encode(), digest)
            if leaf.device.type == "cpu" and leaf.numel():
                head = leaf.detach().reshape(-1)[:64].contiguous()
                digest = zlib.crc32(head.view(torch.uint8).numpy().tobytes(), digest)
    return digest
