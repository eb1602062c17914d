"""Recover a state: every rank reads the bytes that it needs, each from its cheapest source.

A source is the memory or disk of the rank's own node, of another node, or the remote store (AutoHet
§IV-C). Each rank decides alone from where it reads. Among places of equal cost, ranks and chunks
take turns. The checksum of every block is compared before the block is used. If a place fails, it
isn't used again for that file, and the next place is tried.

Each needed byte is read once, from all sources at the same time. Either all ranks go on from the
state, or none does.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_hetero.checkpoint.assembly import Assembly, FileRange
from lightning_hetero.checkpoint.content import RestoredSlice, SliceNeed
from lightning_hetero.checkpoint.deadlines import map_on_threads
from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    PartManifest,
    fault_in,
    name_of_unit,
)
from lightning_hetero.checkpoint.serving import Readable
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.tiers import Location, Source, source_of
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process import Progress

_log = logging.getLogger(__name__)

_READERS = 8
"""Threads that read: one connection to an object store carries much less than the link could."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The recovered state of one rank; as text, what was done for it."""

    id: CheckpointId
    """The checkpoint that it comes from."""
    world_size: int
    """Number of ranks that saved it."""
    plan: ParallelPlan | None
    """The plan under which it was saved."""
    slices: tuple[RestoredSlice, ...]
    """The slices that were asked for, in the same order."""
    metadata: Mapping[str, Any]
    """Rank 0's shared metadata."""
    rank_metadata: Mapping[str, Any] | None
    """This rank's own state; None if another number of ranks saved the checkpoint."""
    bytes_by_source: Mapping[Source, int]
    """Bytes that this rank got from each kind of source, counted in whole blocks."""
    failures: tuple[str, ...]
    """Sources that failed, and why."""
    attempt: int
    """Number of the next attempt: each start of the run saves its checkpoints under its own."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that couldn't be used, and why."""

    def __str__(self) -> str:
        sources = ", ".join(
            f"{count / 1e6:.1f} MB from {source.name.lower().replace('_', ' ')}"
            for source, count in sorted(self.bytes_by_source.items())
        )
        text = f"recovered {self.id}: {sources or 'nothing needed'}"
        if self.failures:
            text += f"; {len(self.failures)} sources failed"
        if self.skipped:
            text += f"; {len(self.skipped)} newer checkpoints couldn't be used"
        return text


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one state, and how this rank reaches them."""

    manifests: Mapping[int, PartManifest]
    """The manifests of all parts."""
    locations: Mapping[tuple[int, str], Sequence[Location]]
    """Which places have each (part, file)."""
    own_part: int | None
    """The part that this rank itself saved, or has in memory; None if it has none."""
    node: str
    """Name of this rank's node, by which its own places are known."""
    reach: Callable[[Location], Readable | None]
    """Returns what to read a location's files from; None if this rank can't reach it."""
    attempt: int
    """Number of the next attempt, see `Recovered`."""


def take(needs: Sequence[SliceNeed], parts: Parts, peers: Peers) -> Recovered | str:
    """Return what this rank needs; or, if any rank can't get all it needs, the reason, on all.

    Every rank calls it. Communicates.

    Raises:
        CheckpointError: The state is that of another model or optimizer; all ranks raise it.
        PeerError: Another rank is gone.
    """
    assembly, refusal = None, ""
    try:
        assembly = Assembly(needs, parts.manifests, parts.own_part)
    except CheckpointError as error:
        refusal = f"Rank {peers.global_rank}: {error}"
    for text in peers.gather(refusal):
        if text:
            raise CheckpointError(text)
    assert assembly is not None
    fetcher = Fetcher(parts, turn=peers.global_rank)
    fetching, answers = peers.do(partial(fetcher.run, assembly), may_fail=True)
    errors = [str(answer["error"]) for answer in answers if "error" in answer]
    return errors[0] if errors else fetching.result()


class Fetcher:
    """Gets the bytes of one state for one rank, in memory of at most readers × chunk bytes.

    Args:
        parts: The state's parts.
        turn: This rank's number; ranks with different numbers begin at different places.
    """

    def __init__(self, parts: Parts, *, turn: int) -> None:
        self._parts = parts
        self._turn = turn
        self._bytes_by_source: dict[Source, int] = defaultdict(int)
        self._failures: list[str] = []
        self._left = {key: list(items) for key, items in parts.locations.items()}
        """The places that haven't failed."""
        self._lock = threading.Lock()

    def run(self, assembly: Assembly, progress: Progress) -> Recovered:
        """Get all that is needed; `progress` is notified of each chunk.

        Raises:
            CheckpointError: No location of a file is left; the message names the layer. Or the
                state isn't finite.
        """
        chunks = enumerate(assembly.ranges(), self._turn)
        try:
            map_on_threads(
                lambda item: assembly.deliver(item[1], self._fetch(item[1], item[0])),
                chunks,
                count=_READERS,
                progress=progress,
            )
            slices, metadata, rank_metadata = assembly.finish()
        except CheckpointError as error:
            tried = f" Tried: {'; '.join(self._failures)}." if self._failures else ""
            raise CheckpointError(f"{error}{tried}") from error
        first = next(iter(self._parts.manifests.values()))
        return Recovered(
            id=first.id,
            world_size=first.world_size,
            plan=None if first.plan is None else ParallelPlan.from_dict(first.plan),
            slices=slices,
            metadata=metadata,
            rank_metadata=rank_metadata,
            bytes_by_source=dict(self._bytes_by_source),
            failures=tuple(self._failures),
            attempt=self._parts.attempt,
        )

    def _fetch(self, item: FileRange, turn: int) -> bytes:
        """Get a range from the cheapest place; if that fails from the next one, and so on."""
        manifest = self._parts.manifests[item.part]
        entry, left = manifest.file(item.file), self._left.get((item.part, item.file), [])
        while places := left.copy():
            location = cheapest(places, self._parts.node, turn)
            try:
                files = self._parts.reach(location)
                if files is None:
                    raise OSError("this rank doesn't reach it")
                data = files.read(f"{manifest.id.folder}/{item.file}", item.start, item.stop)
                why = fault_in(data, item.start, item.stop, entry, manifest.block_bytes)
            except Exception as error:
                # Stores raise their client library's own types; another source is tried anyway.
                why = f"{type(error).__name__}: {error}"
            with self._lock:
                if not why:
                    source = source_of(location, self._parts.node)
                    self._bytes_by_source[source] += item.stop - item.start
                    return data
                if location in left:
                    left.remove(location)
                    self._failures.append(f"{location}: {item.file}: {why}")
                    _log.warning("%s of %s in %s: %s", item.file, manifest.id, location, why)
        what = "metadata" if entry.unit is None else name_of_unit(entry.unit, manifest.num_layers)
        raise CheckpointError(
            f"No tier has an intact copy of {what} ({item.file}) of {manifest.id}. Bring back "
            "a node that had one, or delete this checkpoint to go on from an older one."
        )


def cheapest(places: Sequence[Location], node: str, turn: int) -> Location:
    """Return from which of some places a node reads: of the cheapest kind, in turn."""
    best = min(source_of(at, node) for at in places)
    options = [at for at in places if source_of(at, node) is best]
    return options[turn % len(options)]
