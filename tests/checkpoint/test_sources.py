"""Every needed byte once, from a cheapest source, peers loaded evenly."""

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.checkpoint import Location, Source, TierKind
from lightning_hetero.checkpoint.fetching import (
    Fetcher,
    FileRange,
    whole_blocks,
)
from lightning_hetero.checkpoint.manifest import CheckpointId, FileEntry, PartManifest
from lightning_hetero.checkpoint.tiers import source_of
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

BLOCK = 8
KINDS = (TierKind.MEMORY, TierKind.DISK)


def zeros(size: int) -> tuple[int, ...]:
    """Return the checksums of a file of zeros."""
    return tuple(zlib.crc32(bytes(min(BLOCK, size - i))) for i in range(0, size, BLOCK))


def manifest(part: int, sizes: list[int]) -> PartManifest:
    return PartManifest(
        id=CheckpointId(1),
        part=part,
        world_size=9,
        num_layers=9,
        block_bytes=BLOCK,
        files=tuple(FileEntry(f"f{i}", i, size, zeros(size)) for i, size in enumerate(sizes)),
        slices=(),
        plan=None,
        versions={},
    )


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 4)))]
    node_of_rank = [n for n in nodes for _ in range(draw(st.integers(1, 3)))]
    manifests = {
        part: manifest(part, draw(st.lists(st.integers(1, 100), min_size=1, max_size=3)))
        for part in range(draw(st.integers(1, 3)))
    }
    places = [Location(node, kind) for node in nodes for kind in KINDS]
    places.append(Location("", TierKind.REMOTE))
    locations = {
        (part, entry.name): tuple(sorted(draw(st.sets(st.sampled_from(places), min_size=1))))
        for part, item in manifests.items()
        for entry in item.files
    }
    needs = {}
    for rank in range(len(node_of_rank)):
        ranges = []
        for part, item in manifests.items():
            for entry in item.files:
                a, b = sorted(
                    (draw(st.integers(0, entry.size_bytes)), draw(st.integers(0, entry.size_bytes)))
                )
                if a < b:
                    ranges.append(FileRange(part, entry.name, a, b))
        needs[rank] = whole_blocks(ranges, manifests)
    return {
        "needs": needs,
        "manifests": manifests,
        "locations": locations,
        "node_of_rank": node_of_rank,
        "chunk_bytes": draw(st.sampled_from([1, 16, 1000])),
    }


class Recording:
    """Files of a location that hold their own positions, and note what is read."""

    def __init__(self, at: Location, reads: list[tuple[Location, str, int, int]]) -> None:
        self.at, self.reads = at, reads

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        assert stop is not None
        self.reads.append((self.at, name.rpartition("/")[2], start, stop))
        return bytes(stop - start)


def fetch_all(situation: dict[str, Any], rank: int) -> list[tuple[Location, FileRange]]:
    """Fetch what a rank needs; return what was delivered, and from where."""
    reads: list[tuple[Location, str, int, int]] = []
    delivered: list[FileRange] = []
    fetcher = Fetcher(
        situation["manifests"],
        situation["locations"],
        node=situation["node_of_rank"][rank],
        reach=lambda location: Recording(location, reads),
        turn=rank,
    )
    fetcher.run(
        situation["needs"][rank],
        lambda item, data: delivered.append(item),
        Progress(),
        chunk_bytes=situation["chunk_bytes"],
    )
    assert not fetcher.failures
    sources = {(name, start, stop): location for location, name, start, stop in reads}
    assert len(reads) >= len(delivered)
    return [(sources[item.file, item.start, item.stop], item) for item in delivered]


@settings(max_examples=40)
@given(situations())
def test_all_needed_bytes_are_fetched_exactly_once_in_whole_blocks_of_bounded_size(
    situation: dict[str, Any],
) -> None:
    for rank, ranges in situation["needs"].items():
        wanted = Counter((i.part, i.file, b) for i in ranges for b in range(i.start, i.stop))
        fetched: Counter[tuple[int, str, int]] = Counter()
        for _, item in fetch_all(situation, rank):
            fetched.update((item.part, item.file, b) for b in range(item.start, item.stop))
            entry = situation["manifests"][item.part].file(item.file)
            assert item.start % BLOCK == 0
            assert item.stop % BLOCK == 0 or item.stop == entry.size_bytes
            assert item.stop - item.start <= max(BLOCK, situation["chunk_bytes"])
        assert fetched == wanted
        assert set(wanted.values()) <= {1}


def one_file(size: int, locations: Sequence[Location], **more: Any) -> dict[str, Any]:
    return {
        "manifests": {0: manifest(0, [size])},
        "locations": {(0, "f0"): tuple(locations)},
        "needs": {0: [FileRange(0, "f0", 0, size)]},
        "node_of_rank": ["new"],
        "chunk_bytes": BLOCK,
        **more,
    }


@pytest.mark.parametrize("own", [0, 1, 2, 3])
def test_each_range_comes_from_a_cheapest_holder(own: int) -> None:
    places = [
        Location("new", TierKind.MEMORY),
        Location("new", TierKind.DISK),
        Location("other", TierKind.MEMORY),
        Location("other", TierKind.DISK),
        Location("", TierKind.REMOTE),
    ]
    found = fetch_all(one_file(10 * BLOCK, places[own:]), 0)
    assert {location for location, _ in found} == {places[own]}
    assert [source_of(place, "new") for place in places] == list(Source)


@settings(max_examples=40)
@given(num_senders=st.integers(1, 5), blocks=st.integers(1, 200), first=st.integers(0, 9))
def test_senders_that_hold_the_same_share_the_work(
    num_senders: int, blocks: int, first: int
) -> None:
    locations = [Location(f"n{i}", TierKind.DISK) for i in range(num_senders)]
    load = Counter(dict.fromkeys(locations, 0))
    situation = one_file(blocks * BLOCK, locations, node_of_rank=["new"] * 10)
    situation["needs"] = dict.fromkeys(range(10), situation["needs"][0])
    for location, item in fetch_all(situation, first):
        load[location] += item.stop - item.start
    assert max(load.values()) - min(load.values()) <= BLOCK


def test_a_file_that_nobody_has_is_named_with_its_layer() -> None:
    situation = one_file(8, ())
    with pytest.raises(CheckpointError, match=r"layer-0000 \(f0\) of step 1"):
        fetch_all(situation, 0)
