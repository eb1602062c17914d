"""Get the byte ranges that a rank needs, each from its cheapest source (AutoHet §IV-C).

A source is the memory or disk of the rank's own node, of another node, or the remote store. Each
rank decides alone from where it reads. Among locations of equal cost, ranks and chunks take turns.
The checksum of every block is compared before the block is used. If a location fails, it isn't used
again for that file, and the next location is tried.

Each needed byte is read once, from all sources at the same time.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.checkpoint.deadlines import map_on_threads
from lightning_hetero.checkpoint.manifest import (
    Buffer,
    PartManifest,
    align_to_blocks,
    fault_in,
    name_of_unit,
)
from lightning_hetero.checkpoint.serving import Readable
from lightning_hetero.checkpoint.tiers import Location, Source, source_of
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

__all__ = ["CHUNK_BYTES", "Fetcher", "FileRange", "Locations", "cut_into_chunks", "whole_blocks"]

_log = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
"""Largest number of bytes of one fetch, which sender and receiver have in memory."""
_READERS = 8
"""Threads that read: one connection to an object store carries much less than the link could."""

Locations = Mapping[tuple[int, str], Sequence[Location]]
"""Which places have each (part, file)."""


@dataclass(frozen=True, order=True, slots=True)
class FileRange:
    """Bytes [start, stop) of one file of one part."""

    part: int
    file: str
    start: int
    stop: int


def whole_blocks(
    ranges: Collection[FileRange], manifests: Mapping[int, PartManifest]
) -> list[FileRange]:
    """Return the fewest ranges of whole blocks that contain all ranges, each byte once."""
    by_file: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for item in ranges:
        manifest = manifests[item.part]
        entry = manifest.file(item.file)
        by_file[item.part, item.file].append(
            align_to_blocks(
                item.start,
                item.stop,
                block_bytes=manifest.block_bytes,
                size_bytes=entry.size_bytes,
            )
        )
    runs = []
    for (part, file), intervals in sorted(by_file.items()):
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(intervals):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        runs += [FileRange(part, file, start, stop) for start, stop in merged]
    return runs


def cut_into_chunks(
    ranges: Sequence[FileRange],
    manifests: Mapping[int, PartManifest],
    chunk_bytes: int | None = None,
) -> Iterator[FileRange]:
    """Yield ranges of whole blocks in pieces of at most `chunk_bytes`, but at least one block."""
    most = chunk_bytes or CHUNK_BYTES
    for item in ranges:
        block_bytes = manifests[item.part].block_bytes
        step = max(1, most // block_bytes) * block_bytes
        for start in range(item.start, item.stop, step):
            yield FileRange(item.part, item.file, start, min(start + step, item.stop))


class Fetcher:
    """Gets byte ranges of one checkpoint for one rank, in memory of at most readers × chunk bytes.

    Args:
        manifests: The manifests of all parts.
        locations: Which places hold each file.
        node: Name of this rank's node, by which its own places are known.
        reach: Returns what to read a location's files from; None if this rank can't reach it.
        turn: This rank's number; ranks with different numbers begin at different locations.
    """

    def __init__(
        self,
        manifests: Mapping[int, PartManifest],
        locations: Locations,
        *,
        node: str,
        reach: Callable[[Location], Readable | None],
        turn: int,
    ) -> None:
        self.bytes_by_source: dict[Source, int] = defaultdict(int)
        self.failures: list[str] = []
        """Locations that failed and are no longer used, and why."""
        self._manifests = manifests
        self._holders = {key: list(items) for key, items in locations.items()}
        self._node = node
        self._reach = reach
        self._turn = turn
        self._lock = threading.Lock()

    def run(
        self,
        ranges: Sequence[FileRange],
        deliver: Callable[[FileRange, Buffer], None],
        progress: Progress,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        """Get ranges of whole blocks; `progress` is notified of each chunk.

        Raises:
            CheckpointError: No location of a file is left; the message names the layer.
        """
        chunks = enumerate(cut_into_chunks(ranges, self._manifests, chunk_bytes), self._turn)
        map_on_threads(
            lambda item: self._fetch(item[1], item[0], deliver),
            chunks,
            count=_READERS,
            progress=progress,
        )

    def choose(self, item: FileRange, turn: int) -> tuple[Source, Location]:
        """Return from where to read a range: the cheapest kind of source, its locations in turn.

        Raises:
            CheckpointError: No location is left.
        """
        options = list(self._holders.get((item.part, item.file), ()))
        if not options:
            manifest = self._manifests[item.part]
            unit = manifest.file(item.file).unit
            what = "metadata" if unit is None else name_of_unit(unit, manifest.num_layers)
            raise CheckpointError(
                f"No tier has an intact copy of {what} ({item.file}) of {manifest.id}. Bring back "
                "a node that had one, or delete this checkpoint to go on from an older one."
            )
        best = min(source_of(location, self._node) for location in options)
        cheapest = [at for at in options if source_of(at, self._node) is best]
        return best, cheapest[turn % len(cheapest)]

    def _fetch(
        self, item: FileRange, turn: int, deliver: Callable[[FileRange, Buffer], None]
    ) -> None:
        """Get a range from the cheapest location; if that fails from the next one, and so on."""
        while True:
            source, location = self.choose(item, turn)
            data, why = self._read(item, location)
            if not why:
                deliver(item, data)
                with self._lock:
                    self.bytes_by_source[source] += item.stop - item.start
                return
            self._strike(item, location, why)

    def _read(self, item: FileRange, location: Location) -> tuple[bytes, str]:
        """Return (bytes, ""), or no bytes and what went wrong."""
        manifest = self._manifests[item.part]
        try:
            files = self._reach(location)
            if files is None:
                return b"", "this rank doesn't reach it"
            data = files.read(f"{manifest.id.folder}/{item.file}", item.start, item.stop)
        except Exception as error:
            # Stores raise their client library's own types; another source is tried in any case.
            return b"", f"{type(error).__name__}: {error}"
        entry = manifest.file(item.file)
        return data, fault_in(data, item.start, item.stop, entry, manifest.block_bytes)

    def _strike(self, item: FileRange, location: Location, why: str) -> None:
        """Stop using a location for this file."""
        with self._lock:
            if location not in self._holders[item.part, item.file]:
                return
            self._holders[item.part, item.file].remove(location)
            self.failures.append(f"{location}: {item.file}: {why}")
        _log.warning("%s of %s in %s: %s", item.file, self._manifests[item.part].id, location, why)
