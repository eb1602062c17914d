"""Pruning deletes in bulk, manifests first, and never what might be the newest complete one."""

from collections.abc import Collection

from lightning_hetero.checkpoint import CheckpointWriter, Tier, TierKind, Transport
from lightning_hetero.checkpoint.manifest import parse_manifest_name
from lightning_hetero.checkpoint.tiers import prune
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.testing import MemoryStore
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

    def save(rank: int, transport: Transport) -> None:
        tier = Tier(kind=TierKind.REMOTE, store=store, keep=9)
        writer = CheckpointWriter([tier], node_of_rank=["a"] * 3, transport=transport)
        for step in (1, 2, 3):
            writer.save(contents(step, plan, 3)[rank]).wait_until_confirmed(20)
        writer.close()

    run_ranks(3, save)
    assert store.removals == []
    assert [item.step for item in prune(store, keep=1, shared=True)] == [1, 2]
    assert len(store.removals) == 2
    manifests, files = store.removals
    assert len(manifests) == 6
    assert all(parse_manifest_name(name) is not None for name in manifests)
    assert len(files) > 30
