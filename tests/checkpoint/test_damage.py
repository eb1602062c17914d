"""Folders that are damaged, tiers that fail, at random: nothing usable is lost or mixed up."""

import contextlib
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    Peers,
    Recovered,
    Store,
    Tier,
    TierKind,
)
from lightning_hetero.checkpoint.inspection import prune
from lightning_hetero.checkpoint.inventory import (
    Inventory,
    complete_checkpoints,
    take_inventory,
)
from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    FileEntry,
    PartManifest,
    manifest_name,
)
from lightning_hetero.checkpoint.tiers import pull_part
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process import Progress
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore
from tests.checkpoint.states import (
    TWO,
    assert_is_state,
    contents,
    needs_of,
    recover,
    run_ranks,
    write,
)

PLAN = ParallelPlan.even(world_size=2, num_layers=4, num_stages=2)
STEPS = (1, 2, 3)
NEEDS = [needs_of(rank, PLAN, 2) for rank in range(2)]
Files = dict[str, bytes]


def save(
    stores: Sequence[Store], kind: TierKind, steps: Sequence[int], *, keep: int, attempt: int
) -> None:
    """Save steps by two ranks, each into its own store or both into the one."""

    def action(rank: int, writer: CheckpointWriter) -> None:
        for step in steps:
            saved = writer.save(contents(step, PLAN, 2, attempt=attempt)[rank])
            saved.wait_until_confirmed(20)

    tiers = [[Tier(kind=kind, store=stores[rank % len(stores)], keep=keep)] for rank in range(2)]
    write(tiers, action)


def recover_all(stores: Sequence[MemoryStore], kind: TierKind) -> list[Recovered | None]:
    def action(rank: int, peers: Peers) -> Recovered | None:
        tiers = [Tier(kind=kind, store=stores[rank % len(stores)])]
        return recover(NEEDS[rank], tiers, node="ab"[rank], peers=peers)

    return run_ranks(2, action)


def step_of(stores: Sequence[MemoryStore], kind: TierKind) -> int | None:
    """Return which step is recovered, bit for bit on both ranks; None if none can be."""
    try:
        found = recover_all(stores, kind)
    except CheckpointError:
        return None
    if found[0] is None:
        assert found[1] is None
        return None
    step = found[0].id.step
    for rank, recovered in enumerate(found):
        assert_is_state(recovered, NEEDS[rank], step)
    return step


def damage(files: Files, random_: random.Random) -> None:
    """Delete or cut some files, or flip a bit of a manifest."""
    for _ in range(random_.randint(1, 5)):
        name = random_.choice(sorted(files))
        data = files[name]
        how = random_.choice(["delete", "cut", "flip"])
        if how == "cut" and data:
            files[name] = data[: random_.randrange(len(data))]
        elif how == "flip" and name.endswith((".json", "confirmed")) and data:
            place = random_.randrange(len(data))
            files[name] = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        else:
            del files[name]


def copies(originals: Sequence[Files], seed: int) -> list[MemoryStore]:
    """Return stores with some files of theirs damaged."""
    stores = []
    random_ = random.Random(seed)
    for original in originals:
        store = MemoryStore()
        store.files = dict(original)
        if store.files:
            damage(store.files, random_)
        stores.append(store)
    return stores


@pytest.fixture(scope="module", params=[TierKind.REMOTE, TierKind.DISK])
def saved(request: pytest.FixtureRequest) -> tuple[TierKind, list[Files]]:
    """Give the files of three checkpoints: in one remote store, or on two nodes' disks."""
    kind: TierKind = request.param
    stores = [MemoryStore() for _ in range(1 if kind is TierKind.REMOTE else 2)]
    for step in STEPS:
        save(stores, kind, [step], keep=9, attempt=0)
    return kind, [dict(store.files) for store in stores]


def test_a_damaged_folder_never_loses_its_newest_checkpoint_whatever_is_done_to_it(
    saved: tuple[TierKind, list[Files]],
) -> None:
    """It is pruned by hand, a process is killed while it saves to it, then another one saves."""
    kind, originals = saved
    num_lost = 0
    for seed in range(0, 60, 3):
        stores, random_ = copies(originals, seed), random.Random(seed)
        before = step_of(stores, kind)
        num_lost += before != STEPS[-1]
        for store in stores:
            prune(Tier(kind=TierKind.REMOTE, store=store, keep=1))
        assert step_of(stores, kind) == before, seed
        crashing: list[Store] = [*stores]
        which = random_.randrange(len(stores))
        crashing[which] = FaultyStore(stores[which], Crash(random_.randrange(60)))
        with contextlib.suppress(CheckpointError):
            save(crashing, kind, [5], keep=1, attempt=1)
        assert step_of(stores, kind) in (5, before), seed
        save(stores, kind, [6], keep=1 + seed % 2, attempt=2)
        assert step_of(stores, kind) == 6, seed
    assert num_lost > 5, "hardly anything was damaged"


class Crash:
    """A `before` of a process that is dead after so many operations."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, verb: str, name: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "killed")


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"files": (FileEntry(name, None, 0, ()),)}
            for name in ("../../../x", "/x", "..", "part-00001.json", "confirmed")
        ),
        {"id": CheckpointId(1, 0, "../x")},
        {"files": ()},
    ],
)
def test_a_crafted_manifest_neither_reads_nor_writes_outside_of_its_own_files(
    changes: dict[str, Any],
) -> None:
    store, target = MemoryStore(), MemoryStore()
    save([store], TierKind.REMOTE, [1], keep=1, attempt=0)
    name = manifest_name(CheckpointId(1), 0)
    crafted = replace(PartManifest.decode(store.files[name]), **changes)
    store.files[name] = crafted.encode()
    with pytest.raises(CheckpointError, match="can't have been written by a rank"):
        pull_part(store, target, CheckpointId(1), 0, Progress())
    assert target.files == {}
    assert step_of([store], TierKind.REMOTE) is None


def test_a_rank_takes_another_ranks_own_part_of_this_checkpoint_alone() -> None:
    source, target = MemoryStore(), MemoryStore()
    save([source], TierKind.REMOTE, [1, 2], keep=2, attempt=0)
    own = manifest_name(CheckpointId(2), 0)
    wanted = source.files[own]
    for other in (manifest_name(CheckpointId(2), 1), manifest_name(CheckpointId(1), 0)):
        source.files[own] = source.files[other]
        with pytest.raises(CheckpointError, match="somebody moved it"):
            pull_part(source, target, CheckpointId(2), 0, Progress())
        assert target.files == {}
    source.files[own] = wanted
    pull_part(source, target, CheckpointId(2), 0, Progress())
    assert target.files


OWN = tuple(kind for kind in TierKind if kind is not TierKind.REMOTE)
Stores = dict[TierKind, list[MemoryStore]]
NUM_SAVES = 30
PARTS = {step: contents(step, TWO, 2) for step in range(1, NUM_SAVES + 1)}


class Failing:
    """Fails for whole saves in a row, from the n-th operation of each on, at random."""

    def __init__(self, random_: random.Random) -> None:
        self._fails = [False]
        while len(self._fails) <= NUM_SAVES:
            self._fails += [random_.random() < 0.5] * random_.randint(1, 5)
        self._from = [random_.randint(0, 12) for _ in self._fails]
        self._verbs = [
            random_.choice([("write",), ("commit",), ("remove",), ("list",), ("write", "remove")])
            for _ in self._fails
        ]
        self.step = 0
        self.count = 0

    def begin(self, step: int) -> None:
        self.step, self.count = step, 0

    def __call__(self, verb: str, name: str) -> None:
        # What notes that a checkpoint is confirmed is so small that it fits on a full disk.
        if not self._fails[self.step] or verb not in self._verbs[self.step] or "confirmed" in name:
            return
        self.count += 1
        if self.count > self._from[self.step]:
            raise OSError(28, "No space left on device")


def compare(stores: Stores, had: dict[tuple[TierKind, ...], CheckpointId]) -> None:
    """Look into each kind of tier of all nodes, and into their own tiers together."""
    for kinds in (*((kind,) for kind in TierKind), OWN):
        tiers = [
            (Tier(kind=kind, store=store), str(node))
            for kind in kinds
            for node, store in enumerate(stores[kind])
        ]
        inventories = [take_inventory([tier], node=node) for tier, node in tiers]
        complete = list(complete_checkpoints(Inventory.merge(inventories)))
        if kinds in had:
            assert complete, f"{kinds} had {had[kinds]} and has none now"
            assert complete[0] >= had[kinds]
        if complete:
            had[kinds] = complete[0]


@pytest.mark.parametrize("seed", [100, 107])
def test_a_tier_that_ever_had_a_complete_checkpoint_always_has_one(seed: int) -> None:
    random_ = random.Random(seed)
    stores: Stores = {kind: [MemoryStore(), MemoryStore()] for kind in TierKind}
    stores[TierKind.REMOTE] = [MemoryStore()]
    faults = {(kind, rank): Failing(random_) for kind in TierKind for rank in range(2)}
    had: dict[tuple[TierKind, ...], CheckpointId] = {}

    def store_of(kind: TierKind, rank: int) -> Store:
        return FaultyStore(stores[kind][rank % len(stores[kind])], faults[kind, rank])

    together = threading.Barrier(2)

    def save(rank: int, writer: CheckpointWriter) -> None:
        for step in range(1, NUM_SAVES + 1):
            for kind in TierKind:
                faults[kind, rank].begin(step)
            together.wait(20)
            saved = writer.save(PARTS[step][rank])
            with contextlib.suppress(CheckpointError):
                saved.wait_until_confirmed(20)
                had[OWN] = PARTS[step][rank].id
            with contextlib.suppress(CheckpointError):
                saved.wait_until_uploaded(20)
            together.wait(20)
            if rank == 0:
                compare(stores, had)
            together.wait(20)

    tiers = [
        [Tier(kind=kind, store=store_of(kind, rank), keep=1) for kind in TierKind]
        for rank in range(2)
    ]
    with contextlib.suppress(CheckpointError):
        write(tiers, save)
    assert had, "nothing was ever saved"
