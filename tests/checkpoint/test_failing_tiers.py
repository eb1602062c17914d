"""Whatever fails, wherever, in whatever order: a tier that ever had a complete one keeps one."""

import contextlib
import random

import pytest

from lightning_hetero.checkpoint import (
    CheckpointId,
    CheckpointWriter,
    Peers,
    Store,
    Tier,
    TierKind,
)
from lightning_hetero.checkpoint.inventory import (
    Inventory,
    complete_checkpoints,
    take_inventory,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore
from tests.checkpoint.states import contents, run_ranks

PLAN = ParallelPlan.even(world_size=2, num_layers=4)
OWN = tuple(kind for kind in TierKind if kind is not TierKind.REMOTE)
Stores = dict[TierKind, list[MemoryStore]]
NUM_SAVES = 30
PARTS = {step: contents(step, PLAN, 2) for step in range(1, NUM_SAVES + 1)}


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


@pytest.mark.parametrize(
    "seed", [100, 107, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5))]
)
def test_a_tier_that_ever_had_a_complete_checkpoint_always_has_one(seed: int) -> None:
    random_ = random.Random(seed)
    stores: Stores = {kind: [MemoryStore(), MemoryStore()] for kind in TierKind}
    stores[TierKind.REMOTE] = [MemoryStore()]
    faults = {(kind, rank): Failing(random_) for kind in TierKind for rank in range(2)}
    had: dict[tuple[TierKind, ...], CheckpointId] = {}

    def store_of(kind: TierKind, rank: int) -> Store:
        return FaultyStore(stores[kind][rank % len(stores[kind])], faults[kind, rank])

    def save(rank: int, peers: Peers) -> None:
        tiers = [Tier(kind=kind, store=store_of(kind, rank), keep=1) for kind in TierKind]
        writer = CheckpointWriter(tiers, node_of_rank=["a", "b"], peers=peers)
        for step in range(1, NUM_SAVES + 1):
            for kind in TierKind:
                faults[kind, rank].begin(step)
            peers.gather(None)
            saved = writer.save(PARTS[step][rank])
            with contextlib.suppress(CheckpointError):
                saved.wait_until_confirmed(20)
                had[OWN] = PARTS[step][rank].id
            with contextlib.suppress(CheckpointError):
                saved.wait_until_uploaded(20)
            peers.gather(None)
            if rank == 0:
                compare(stores, had)
            peers.gather(None)
        with contextlib.suppress(CheckpointError):
            writer.close()

    run_ranks(2, save)
    assert had, "nothing was ever saved"
