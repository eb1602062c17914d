"""Pruning deletes in bulk, manifests first, and never what might be the newest complete one."""

import threading
from collections.abc import Collection

import pytest

from lightning_hetero.checkpoint import CheckpointWriter, Peers, Tier, TierKind
from lightning_hetero.checkpoint.manifest import CheckpointId, parse_manifest_name
from lightning_hetero.checkpoint.tiers import confirm
from lightning_hetero.core.plan import ParallelPlan
from tests.checkpoint.stand_ins import MemoryStore
from tests.checkpoint.states import contents, run_ranks


class Counting(MemoryStore):
    """Notes requests to delete and to list, and the manifests that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.removals: list[list[str]] = []
        self.manifests: list[str] = []
        self.num_lists = 0

    def remove(self, names: Collection[str]) -> None:
        self.removals.append(sorted(names))
        super().remove(names)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name.endswith(".json"):
            self.manifests.append(name)
        return super().read(name, start, stop)

    def list(self) -> dict[str, int]:
        self.num_lists += 1
        return super().list()


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
    confirm(Tier(kind=TierKind.REMOTE, store=store, keep=1), CheckpointId(3))
    assert {int(name.split("-")[1]) for name in store.files} == {3}
    assert len(store.removals) == 2
    manifests, files = store.removals
    assert len(manifests) == 6
    assert all(parse_manifest_name(name) is not None for name in manifests)
    assert len(files) > 30


@pytest.mark.parametrize("kind", [TierKind.DISK, TierKind.REMOTE])
def test_saves_read_no_manifests_to_prune(kind: TierKind) -> None:
    store, world_size = Counting(), 4
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
    save(6, 5)
    assert store.manifests == []
    steps = {int(name.split("-")[1]) for name in store.files if name.startswith("step-")}
    assert steps == {9, 10}
