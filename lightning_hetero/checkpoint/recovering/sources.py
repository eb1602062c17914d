"""Who reads which bytes for whom, from where: a table that all ranks compute alike.

Each byte range gets its cheapest source: memory and disk of the own node, a peer's memory or disk,
the remote store (AutoHet §IV-C). Among peers that cost the same the least loaded one sends, in
chunks, so that several share even one large range.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.checkpoint.manifest import PartManifest, name_of_unit
from lightning_hetero.checkpoint.parts import align_to_blocks
from lightning_hetero.checkpoint.tiers import Holder, Source, source_of
from lightning_hetero.checkpoint.transport import take_turns
from lightning_hetero.core.errors import CheckpointError

__all__ = ["CHUNK_BYTES", "Fetch", "FileRange", "assign_sources", "whole_blocks"]

CHUNK_BYTES = 16 << 20
"""Largest fetch: what a sender, a link and a receiver hold at a time."""


@dataclass(frozen=True, order=True, slots=True)
class FileRange:
    """Bytes [start, stop) of one file of one part."""

    part: int
    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """One byte range for one rank: who reads it, from where."""

    receiver: int
    reader: int
    """The rank that reads it: the receiver itself, or a rank of the node that has it."""
    holder: Holder
    source: Source
    range: FileRange


def whole_blocks(
    ranges: Collection[FileRange], manifests: Mapping[int, PartManifest]
) -> list[FileRange]:
    """Return the fewest runs of whole blocks that hold all ranges, each byte once."""
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
    """Give every needed byte range its source; the same list on every rank.

    The fetches between two ranks are in an order in which blocking sends and receives can't
    deadlock, and in which ranks work side by side: by rounds, a rank at most once in each.

    Args:
        needs: For each rank runs of whole blocks, each byte at most once.
        manifests: The parts of the checkpoint.
        holders: Which tiers hold each (part, file).
        node_of_rank: Name of each rank's node.
        chunk_bytes: Largest fetch; rounded to whole blocks, one at least.

    Raises:
        CheckpointError: Nobody has a file; the message names the layer.
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
    """Choose each range's sender by what its node reads already, and order them by rounds."""
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
    """Return all chunks, the ranks taking turns."""
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
    """Return all holders that cost the least."""
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
