"""Every needed byte once, from a cheapest source, peers loaded evenly, without deadlock."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.checkpoint import Holder, Source, TierKind
from lightning_hetero.checkpoint.manifest import CheckpointId, FileEntry, PartManifest
from lightning_hetero.checkpoint.recovering.fetching import (
    Fetch,
    FileRange,
    assign_sources,
    source_of,
    whole_blocks,
)
from lightning_hetero.core.errors import CheckpointError

BLOCK = 8
KINDS = (TierKind.MEMORY, TierKind.DISK)


def manifest(part: int, sizes: list[int]) -> PartManifest:
    return PartManifest(
        id=CheckpointId(1),
        part=part,
        world_size=9,
        num_layers=9,
        block_bytes=BLOCK,
        files=tuple(
            FileEntry(f"f{i}", i, size, (0,) * -(-size // BLOCK)) for i, size in enumerate(sizes)
        ),
        slices=(),
        plan=None,
        versions={},
    )


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 4)))]
    node_of_rank = [n for n in nodes for _ in range(draw(st.integers(1, 3)))]
    manifests = {
        part: manifest(part, draw(st.lists(st.integers(1, 100), min_size=1, max_size=3)))
        for part in range(draw(st.integers(1, 3)))
    }
    places = [Holder(node, kind) for node in nodes for kind in KINDS]
    places.append(Holder("", TierKind.REMOTE))
    holders = {
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
        "holders": holders,
        "node_of_rank": node_of_rank,
        "chunk_bytes": draw(st.sampled_from([1, 16, 1000])),
    }


def plan(situation: dict[str, object]) -> list[Fetch]:
    return assign_sources(
        situation["needs"],  # type: ignore[arg-type]
        situation["manifests"],  # type: ignore[arg-type]
        situation["holders"],  # type: ignore[arg-type]
        situation["node_of_rank"],  # type: ignore[arg-type]
        chunk_bytes=situation["chunk_bytes"],  # type: ignore[arg-type]
    )


@given(situations())
def test_all_needed_bytes_are_fetched_exactly_once_and_no_others(
    situation: dict[str, object],
) -> None:
    wanted: Counter[tuple[int, int, str, int]] = Counter()
    for rank, ranges in situation["needs"].items():  # type: ignore[attr-defined]
        for item in ranges:
            wanted.update((rank, item.part, item.file, b) for b in range(item.start, item.stop))
    fetched: Counter[tuple[int, int, str, int]] = Counter()
    for fetch in plan(situation):
        item = fetch.range
        fetched.update(
            (fetch.receiver, item.part, item.file, b) for b in range(item.start, item.stop)
        )
    assert fetched == wanted
    assert set(wanted.values()) <= {1}


@given(situations())
def test_each_range_comes_from_a_cheapest_holder_that_its_reader_reaches(
    situation: dict[str, object],
) -> None:
    node_of_rank = situation["node_of_rank"]
    for fetch in plan(situation):
        node = node_of_rank[fetch.receiver]  # type: ignore[index]
        options = situation["holders"][fetch.range.part, fetch.range.file]  # type: ignore[index]
        assert fetch.holder in options
        assert fetch.source is min(source_of(option, node) for option in options)
        assert fetch.source is source_of(fetch.holder, node)
        if fetch.source in (Source.PEER_MEMORY, Source.PEER_DISK):
            assert node_of_rank[fetch.reader] == fetch.holder.node  # type: ignore[index]
        else:
            assert fetch.reader == fetch.receiver


@given(situations())
def test_chunks_are_whole_blocks_of_bounded_size(situation: dict[str, object]) -> None:
    for fetch in plan(situation):
        item = fetch.range
        entry = situation["manifests"][item.part].file(item.file)  # type: ignore[index]
        assert item.start % BLOCK == 0
        assert item.stop % BLOCK == 0 or item.stop == entry.size_bytes
        assert item.stop - item.start <= max(BLOCK, situation["chunk_bytes"])  # type: ignore[type-var]


@given(situations())
def test_blocking_transfers_in_this_order_never_deadlock(situation: dict[str, object]) -> None:
    queues: dict[int, list[Fetch]] = defaultdict(list)
    for fetch in plan(situation):
        if fetch.reader != fetch.receiver:
            queues[fetch.reader].append(fetch)
            queues[fetch.receiver].append(fetch)
    while any(queues.values()):
        ready = [
            q[0]
            for rank, q in queues.items()
            if q and rank == q[0].reader and queues[q[0].receiver][0] is q[0]
        ]
        assert ready, "every rank waits for another one"
        for fetch in ready:
            queues[fetch.reader].pop(0)
            queues[fetch.receiver].pop(0)


@given(
    num_senders=st.integers(1, 5),
    ranks_per_node=st.integers(1, 3),
    blocks=st.integers(1, 200),
    chunk_blocks=st.integers(1, 4),
)
def test_senders_that_hold_the_same_share_the_work(
    num_senders: int, ranks_per_node: int, blocks: int, chunk_blocks: int
) -> None:
    nodes = ["new", *(f"n{i}" for i in range(num_senders))]
    node_of_rank = ["new"] + [n for n in nodes[1:] for _ in range(ranks_per_node)]
    size = blocks * BLOCK
    fetches = assign_sources(
        {0: [FileRange(0, "f0", 0, size)]},
        {0: manifest(0, [size])},
        {(0, "f0"): tuple(Holder(node, TierKind.DISK) for node in nodes[1:])},
        node_of_rank,
        chunk_bytes=chunk_blocks * BLOCK,
    )
    load = dict.fromkeys(range(1, len(node_of_rank)), 0)
    node_load = dict.fromkeys(nodes[1:], 0)
    for fetch in fetches:
        load[fetch.reader] += fetch.range.stop - fetch.range.start
        node_load[node_of_rank[fetch.reader]] += fetch.range.stop - fetch.range.start
    chunk = chunk_blocks * BLOCK
    assert max(load.values()) - min(load.values()) <= chunk
    assert max(node_load.values()) - min(node_load.values()) <= chunk


def test_a_node_that_reads_for_itself_sends_less() -> None:
    size = 100 * BLOCK
    holders = (Holder("a", TierKind.DISK), Holder("b", TierKind.DISK))
    fetches = assign_sources(
        {0: [FileRange(0, "f0", 0, size // 2)], 2: [FileRange(0, "f0", 0, size)]},
        {0: manifest(0, [size])},
        {(0, "f0"): holders},
        ["a", "b", "c"],
        chunk_bytes=BLOCK,
    )
    load: Counter[str] = Counter()
    for fetch in fetches:
        load[fetch.holder.node] += fetch.range.stop - fetch.range.start
    assert abs(load["a"] - load["b"]) <= BLOCK


def test_a_file_that_nobody_has_is_named_with_its_layer() -> None:
    with pytest.raises(CheckpointError, match=r"layer-0001 \(f1\) of step 1"):
        assign_sources(
            {0: [FileRange(0, "f1", 0, 8)]}, {0: manifest(0, [8, 8])}, {(0, "f1"): ()}, ["a"]
        )
