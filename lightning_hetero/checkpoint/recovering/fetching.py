"""Decide which rank reads which bytes from where for which rank, and carry out one rank's share.

All ranks compute the same table. Each byte range gets its cheapest source: memory or disk of the
own node, a peer's memory or disk, the remote store (AutoHet §IV-C). Of peers at the same cost the
least loaded one sends, in chunks, so that several can share even one large range.

Threads read from the own node's tiers and from the remote store. Meanwhile the calling thread
exchanges peers' bytes in lockstep, while each reader's next chunks are read ahead.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hetero.checkpoint.deadlines import BackgroundThread, Progress
from lightning_hetero.checkpoint.lockstep import Lockstep
from lightning_hetero.checkpoint.manifest import PartManifest, name_of_unit
from lightning_hetero.checkpoint.parts import align_to_blocks, fault_in
from lightning_hetero.checkpoint.store import Buffer
from lightning_hetero.checkpoint.tiers import Holder, Source, Tier, source_of
from lightning_hetero.checkpoint.transport import Rounds, Transport, take_turns
from lightning_hetero.core.errors import CheckpointError

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = [
    "CHUNK_BYTES",
    "Failure",
    "Fetch",
    "Fetcher",
    "FileRange",
    "assign_sources",
    "whole_blocks",
]

CHUNK_BYTES = 16 << 20
"""Largest fetch: the bytes that a sender, a link and a receiver hold at a time."""


@dataclass(frozen=True, order=True, slots=True)
class FileRange:
    """Bytes [start, stop) of one file of one part."""

    part: int
    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """One byte range that a rank needs, with its reader and source."""

    receiver: int
    reader: int
    """The rank that reads it: the receiver itself, or a rank of the node that has it."""
    holder: Holder
    source: Source
    range: FileRange


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


def assign_sources(
    needs: Mapping[int, Sequence[FileRange]],
    manifests: Mapping[int, PartManifest],
    holders: Mapping[tuple[int, str], Sequence[Holder]],
    node_of_rank: Sequence[str],
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Fetch]:
    """Return the fetches of all needed byte ranges, each with its source; the same on every rank.

    Fetches between ranks are ordered by rounds, in each of which a rank takes part at most once: so
    blocking sends and receives can't deadlock, and ranks work in parallel.

    Args:
        needs: For each rank ranges of whole blocks, each byte at most once.
        manifests: The parts of the checkpoint.
        holders: Which tiers hold each (part, file).
        node_of_rank: Name of each rank's node.
        chunk_bytes: Largest fetch; rounded to whole blocks, at least one.

    Raises:
        CheckpointError: No tier has a file; the message names the layer.
    """
    own: list[Fetch] = []
    peers: list[tuple[int, FileRange, list[Holder]]] = []
    load: dict[Holder, int] = defaultdict(int)
    for receiver, item in _interleave(needs, manifests, chunk_bytes):
        node = node_of_rank[receiver]
        cheapest = _cheapest(item, manifests, holders, node)
        source = source_of(cheapest[0], node)
        if source in (Source.PEER_MEMORY, Source.PEER_DISK):
            peers.append((receiver, item, cheapest))
        else:
            load[cheapest[0]] += item.stop - item.start
            own.append(Fetch(receiver, receiver, cheapest[0], source, item))
    return own + _spread_over_peers(peers, load, node_of_rank)


def _spread_over_peers(
    peers: Sequence[tuple[int, FileRange, list[Holder]]],
    load: dict[Holder, int],
    node_of_rank: Sequence[str],
) -> list[Fetch]:
    """Choose each range's reader by the load of holders and ranks; order fetches by rounds."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(node_of_rank):
        ranks_of[node].append(rank)
    sent: dict[int, int] = defaultdict(int)
    fetches: list[Fetch] = []
    for receiver, item, options in peers:
        holder = min(options, key=lambda option: (load[option], option))
        reader = min(ranks_of[holder.node], key=lambda rank: (sent[rank], rank))
        load[holder] += item.stop - item.start
        sent[reader] += item.stop - item.start
        source = source_of(holder, node_of_rank[receiver])
        fetches.append(Fetch(receiver, reader, holder, source, item))
    turns = take_turns([(fetch.reader, fetch.receiver) for fetch in fetches])
    return [fetches[index] for index in turns]


def _interleave(
    needs: Mapping[int, Sequence[FileRange]],
    manifests: Mapping[int, PartManifest],
    chunk_bytes: int,
) -> list[tuple[int, FileRange]]:
    """Return all chunks as (rank, range), with ranks taking turns."""
    queues = {
        rank: [
            FileRange(item.part, item.file, start, min(start + step, item.stop))
            for item in ranges
            for block_bytes in (manifests[item.part].block_bytes,)
            for step in (max(1, chunk_bytes // block_bytes) * block_bytes,)
            for start in range(item.start, item.stop, step)
        ]
        for rank, ranges in sorted(needs.items())
    }
    longest = max((len(chunks) for chunks in queues.values()), default=0)
    return [
        (rank, chunks[turn])
        for turn in range(longest)
        for rank, chunks in queues.items()
        if turn < len(chunks)
    ]


def _cheapest(
    item: FileRange,
    manifests: Mapping[int, PartManifest],
    holders: Mapping[tuple[int, str], Sequence[Holder]],
    node: str,
) -> list[Holder]:
    """Return all holders of the cheapest kind of source."""
    options = holders.get((item.part, item.file), ())
    if not options:
        manifest = manifests[item.part]
        unit = manifest.file(item.file).unit
        what = "metadata" if unit is None else name_of_unit(unit, manifest.num_layers)
        raise CheckpointError(
            f"No tier has an intact copy of {what} ({item.file}) of {manifest.id}. Bring back a "
            "node that had one, or delete this checkpoint to go on from an older one."
        )
    best = min(source_of(holder, node) for holder in options)
    return [holder for holder in options if source_of(holder, node) is best]


_LOCAL_READERS = 2
_REMOTE_READERS = 8
"""Several, because one connection to an object store carries much less than the link."""
_STALL_S = 300.0
"""Seconds without progress after which sources are given up."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A byte range that couldn't be read from a holder."""

    range: FileRange
    holder: Holder
    why: str


class Fetcher:
    """Carries out fetches for one rank; memory is bounded by readers × chunk."""

    def __init__(
        self,
        transport: Transport,
        tier_of: Callable[[Holder], Tier | None],
        manifests: Mapping[int, PartManifest],
        deliver: Callable[[FileRange, Buffer], None],
    ) -> None:
        self._transport = transport
        self._tier_of = tier_of
        self._manifests = manifests
        self._deliver = deliver
        self._late: set[Fetch] = set()
        self.bytes_by_source: dict[Source, int] = defaultdict(int)

    def run(self, fetches: Sequence[Fetch]) -> list[Failure]:
        """Carry out this rank's fetches; return those that failed. All ranks call it."""
        rank = self._transport.global_rank
        own = [f for f in fetches if f.receiver == rank and f.reader == rank]
        local = BackgroundThread("checkpoint-fetch", _LOCAL_READERS)
        remote = BackgroundThread("checkpoint-fetch", _REMOTE_READERS)
        results = {
            fetch: (remote if fetch.source is Source.REMOTE else local).submit(self._fetch, fetch)
            for fetch in own
        }
        failures = self._exchange([f for f in fetches if f.receiver != f.reader])
        failures += self._await_own(results)
        for threads in (local, remote):
            threads.finish()
        done = {failure.range for failure in failures}
        for fetch in fetches:
            if fetch.receiver == rank and fetch.range not in done:
                self.bytes_by_source[fetch.source] += fetch.range.stop - fetch.range.start
        return failures

    def _await_own(self, results: Mapping[Fetch, "Future[Failure | None]"]) -> list[Failure]:
        """Wait until all ranks have finished their own reads, however slow; return the failures."""
        thread = BackgroundThread("checkpoint-fetch")

        def collect() -> None:
            for result in results.values():
                result.exception()
                thread.progress.tick()

        rounds = Rounds(self._transport, Progress(), _STALL_S)
        rounds.finish(thread.submit(collect), thread, lambda _: {})
        thread.finish()
        late = f"didn't answer for {_STALL_S:g} s"
        self._late |= {fetch for fetch, result in results.items() if not result.done()}
        for result in results.values():
            result.cancel()
        outcomes = [
            Failure(fetch.range, fetch.holder, late) if fetch in self._late else result.result()
            for fetch, result in results.items()
        ]
        return [failure for failure in outcomes if failure is not None]

    def _fetch(self, fetch: Fetch) -> Failure | None:
        data, why = self._read(fetch)
        if fetch in self._late:
            # Another source has delivered it by now, and its buffer may be in use.
            why = "this came too late"
        return Failure(fetch.range, fetch.holder, why) if why else self._accept(fetch, data)

    def _exchange(self, fetches: Sequence[Fetch]) -> list[Failure]:
        """Read for peers, and take what they read for this rank; return the failures."""
        by_pair: dict[tuple[int, int], list[Fetch]] = defaultdict(list)
        for fetch in fetches:
            by_pair[fetch.reader, fetch.receiver].append(fetch)
        pairs = list(by_pair)
        outcomes: dict[Fetch, Failure | None] = {}

        def produce(index: int) -> Iterator[bytes]:
            for fetch in by_pair[pairs[index]]:
                data, why = self._read(fetch)
                # The first byte says whether the range follows, or the reason why it doesn't.
                yield b"!" + why.encode() if why else b"=" + data

        def consume(index: int, answers: Iterator[bytes]) -> None:
            for fetch, answer in zip(by_pair[pairs[index]], answers, strict=True):
                if answer.startswith(b"!"):
                    failure = Failure(fetch.range, fetch.holder, answer[1:].decode())
                    outcomes[fetch] = failure
                else:
                    outcomes[fetch] = self._accept(fetch, memoryview(answer)[1:])

        lockstep = Lockstep(self._transport, stall_s=_STALL_S, progress=Progress())
        why = lockstep.run(pairs, produce, consume)
        for index, pair in enumerate(pairs):
            if pair[1] == self._transport.global_rank:
                for fetch in by_pair[pair]:
                    missing = Failure(fetch.range, fetch.holder, why.get(index, "nothing came"))
                    outcomes.setdefault(fetch, missing)
        return [failure for failure in outcomes.values() if failure is not None]

    def _read(self, fetch: Fetch) -> tuple[bytes, str]:
        """Return (bytes, ""), or no bytes and what went wrong."""
        tier = self._tier_of(fetch.holder)
        if tier is None:
            return b"", "this rank doesn't reach it"
        item = fetch.range
        name = f"{self._manifests[item.part].id.folder}/{item.file}"
        try:
            return tier.store.read(name, item.start, item.stop), ""
        except Exception as error:
            # Stores raise their client library's own types; another source is tried in any case.
            return b"", f"{type(error).__name__}: {error}"

    def _accept(self, fetch: Fetch, data: Buffer) -> Failure | None:
        """Deliver the bytes if their checksums are right; return the failure if not."""
        item = fetch.range
        manifest = self._manifests[item.part]
        entry = manifest.file(item.file)
        why = fault_in(data, item.start, item.stop, entry, manifest.block_bytes)
        if why:
            return Failure(item, fetch.holder, why)
        self._deliver(item, data)
        return None
