"""Pruning deletes in bulk, manifests first, and never what might be the newest complete one."""

import threading
from collections.abc import Collection

import pytest

from lightning_hetero.checkpoint import CheckpointWriter, Peers, Tier, TierKind
from lightning_hetero.checkpoint.format.manifest import CheckpointId, parse_manifest_name
from lightning_hetero.checkpoint.places.parts import TierPruner, prune
from lightning_hetero.checkpoint.places.tiers import checkpoints_in
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process import Progress
from tests.checkpoint.stand_ins import MemoryStore
from tests.checkpoint.states import contents, run_ranks


class Counting(MemoryStore):
    """Notes what each request to delete names."""

    def __init__(self) -> None:
        super().__init__()
        self.removals: list[list[str]] = []

    def remove(self, names: Collection[str]) -> None:
        self.removals.append(sorted(names))
        super().remove(names)


def test_pruning_takes_two_requests_whatever_it_deletes_and_manifests_go_first() -> None:
    plan, store = ParallelPlan.even(world_size=3, num_layers=4), Counting()

    def save(rank: int, peers: Peers) -> None:
        tier = Tier(kind=TierKind.REMOTE, store=store, keep=9)
        writer = CheckpointWriter([tier], node_of_rank=["a"] * 3, peers=peers)
        for step in (1, 2, 3):
            writer.save(contents(step, plan, 3)[rank]).wait_until_confirmed(20)
        writer.close()

    run_ranks(3, save)
    assert store.removals == []
    assert [item.step for item in prune(Tier(kind=TierKind.REMOTE, store=store), keep=1)] == [1, 2]
    assert len(store.removals) == 2
    manifests, files = store.removals
    assert len(manifests) == 6
    assert all(parse_manifest_name(name) is not None for name in manifests)
    assert len(files) > 30


class CountingReads(MemoryStore):
    """Counts the manifests that are read, and the requests to list."""

    def __init__(self) -> None:
        super().__init__()
        self.manifests: list[str] = []
        self.num_lists = 0

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name.endswith(".json"):
            self.manifests.append(name)
        return super().read(name, start, stop)

    def list(self) -> dict[str, int]:
        self.num_lists += 1
        return super().list()


@pytest.mark.parametrize("kind", [TierKind.DISK, TierKind.REMOTE])
def test_pruning_reads_no_manifest_of_what_this_start_has_confirmed_itself(kind: TierKind) -> None:
    store, world_size = CountingReads(), 4
    plan = ParallelPlan.even(world_size=world_size, num_layers=4)

    def save(first: int, count: int) -> None:
        def action(rank: int, peers: Peers) -> None:
            tier = Tier(kind=kind, store=store, keep=2)
            writer = CheckpointWriter([tier], node_of_rank=["a"] * 4, peers=peers)
            for step in range(first, first + count):
                attempt = int(first > 1)
                saved = writer.save(contents(step, plan, world_size, attempt=attempt)[rank])
                saved.wait_until_confirmed(30)
            writer.leave()

        others = set(threading.enumerate())
        run_ranks(world_size, action)
        for thread in set(threading.enumerate()) - others:
            if thread.name in ("checkpoint-upload", "checkpoint-write"):
                thread.join(20)

    save(1, 5)
    assert store.manifests == []
    assert store.num_lists <= 2 * 5
    # A later start reads those of the one checkpoint that it needs besides its own, once.
    save(6, 5)
    read = [name for name in store.manifests if name.startswith("step-000000000005")]
    assert sorted(store.manifests) == sorted(read)
    assert len(read) == world_size
    steps = {int(name.split("-")[1]) for name in store.files if name.startswith("step-")}
    assert steps == {9, 10}


def test_a_late_note_doesnt_look_at_checkpoints_that_came_after_it() -> None:
    plan, store = ParallelPlan.even(world_size=1, num_layers=4), CountingReads()
    tier = Tier(kind=TierKind.REMOTE, store=store, keep=9)
    writer = CheckpointWriter([tier])
    for step in (1, 2, 3):
        writer.save(contents(step, plan, 1)[0]).wait_until_confirmed(20)
    writer.close()
    pruner = TierPruner(tier, [0], Progress())
    store.manifests.clear()
    pruner.commit(CheckpointId(2), keep=1)
    assert store.manifests == []
    assert [item.step for item in checkpoints_in(store.files)] == [2, 3]


def test_what_was_confirmed_and_has_lost_a_file_since_is_not_counted_on() -> None:
    plan, store = ParallelPlan.even(world_size=1, num_layers=4), MemoryStore()
    tier = Tier(kind=TierKind.DISK, store=store, keep=9)
    writer = CheckpointWriter([tier])
    for step in (1, 2):
        writer.save(contents(step, plan, 1)[0]).wait_until_confirmed(20)
    writer.close()
    older = {name: data for name, data in store.files.items() if "step-000000000001" in name}
    pruner = TierPruner(tier, [0], Progress())
    pruner.commit(CheckpointId(2), keep=1)
    assert [item.step for item in checkpoints_in(store.files)] == [2]
    store.files.update(older)
    del store.files[next(name for name in store.files if name.startswith("step-000000000002"))]
    pruner.commit(None, keep=1)
    assert [item.step for item in checkpoints_in(store.files)] == [1, 2]
