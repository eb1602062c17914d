"""Whatever is broken, slow or hangs, a recovery finds what is whole or says what is missing."""

import random
from collections.abc import Sequence

import pytest

from lightning_hetero.checkpoint import (
    Peers,
    Recovered,
    Tier,
    TierKind,
)
from lightning_hetero.checkpoint.inspection import look
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore, Throttle, ThrottledStore
from tests.checkpoint.states import (
    PLANS,
    Nodes,
    assert_is_state,
    contents,
    needs_of,
    recover,
    recover_all,
    run_ranks,
    save_all,
)


def damage(store: MemoryStore, how: str, *, suffix: str = "weights.safetensors") -> None:
    """Break every file whose name ends so."""
    for name, data in list(store.files.items()):
        if name.endswith(suffix):
            if how == "missing":
                del store.files[name]
            elif how == "truncated":
                store.files[name] = data[:-3]
            else:
                middle = len(data) // 2
                flipped = bytes([data[middle] ^ 4])
                store.files[name] = data[:middle] + flipped + data[middle + 1 :]


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize(
    "suffix", ["weights.safetensors", "optimizer.safetensors", "00.json", ".pt"]
)
def test_damage_in_all_tiers_but_one_is_detected_and_passed_over(how: str, suffix: str) -> None:
    plan, size = PLANS["tp 2"]
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    nodes = Nodes(["a", "b"])
    assert isinstance(nodes.remote, MemoryStore)
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    stores = [nodes.memory["a"], nodes.disk["a"], nodes.remote]
    whole = [dict(store.files) for store in stores]
    for intact in range(3):
        for index, store in enumerate(stores):
            store.files = dict(whole[index])
            if index != intact:
                damage(store, how, suffix=suffix)
        for rank, result in enumerate(recover_all(nodes, ["a", "b"], needs)):
            assert_is_state(result, needs[rank], 2)


def test_the_next_older_checkpoint_is_taken_when_the_newest_is_corrupt_everywhere() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"])
    assert isinstance(nodes.remote, MemoryStore)
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    save_all(nodes, ["a", "b"], contents(4, plan, size))
    for store in (nodes.memory["a"], nodes.disk["a"], nodes.remote):
        newest = {k: v for k, v in store.files.items() if k.startswith("step-000000000004")}
        broken = MemoryStore()
        broken.files.update(newest)
        damage(broken, "flipped", suffix="layer-0002.part-00000.weights.safetensors")
        store.files.update(broken.files)
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    results = recover_all(nodes, ["a", "b"], needs)
    for rank in range(size):
        recovered = results[rank]
        assert_is_state(recovered, needs[rank], 2)
        assert recovered is not None
        assert "layer-0002" in recovered.skipped[0]
    with pytest.raises(CheckpointError, match="layer-0002") as caught:
        recover_all(nodes, ["a", "b"], needs, step=4)
    for place in ("a/memory", "a/disk", "remote", "step 4"):
        assert place in str(caught.value)


@pytest.mark.parametrize("verb", ["list", "read"])
def test_a_place_that_cannot_be_read_ends_all_ranks_unless_it_holds_nothing_newer(
    verb: str,
) -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    local = [dict(store.files) for store in (*nodes.memory.values(), *nodes.disk.values())]
    save_all(nodes, ["a", "b"], contents(4, plan, size))
    needs = [needs_of(rank, plan, size) for rank in range(size)]

    def down(called: str, name: str) -> None:
        if called == verb:
            raise ConnectionError(f"{name} answered 500")

    assert nodes.remote is not None
    nodes.remote = FaultyStore(nodes.remote, down)
    if verb == "read":
        # Other places are known to hold the newest there is.
        for rank, recovered in enumerate(recover_all(nodes, ["a", "b"], needs)):
            assert_is_state(recovered, needs[rank], 4)
    for store, files in zip((*nodes.memory.values(), *nodes.disk.values()), local, strict=True):
        store.files = files

    def refused(rank: int, peers: Peers) -> str:
        tiers = nodes.tiers("ab"[rank])
        with pytest.raises(CheckpointError, match=r"500.*skip_unreadable=True") as caught:
            recover(needs[rank], tiers, node="ab"[rank], peers=peers)
        return str(caught.value)

    assert len(run_ranks(size, refused)) == size
    for rank, recovered in enumerate(recover_all(nodes, ["a", "b"], needs, skip_unreadable=True)):
        assert_is_state(recovered, needs[rank], 2)
    for node in ("a", "b"):
        nodes.lose(node)
    with pytest.raises(CheckpointError, match="Nothing to go on from is left"):
        recover_all(nodes, ["a", "b"], needs, skip_unreadable=True)


def test_what_a_writer_prunes_while_it_is_read_is_read_again_from_the_next() -> None:
    plan, size = PLANS["one device"]
    needs = needs_of(0, plan, size)
    saved = []
    for step in range(1, 9):
        nodes = Nodes(["a"], remote=False)
        save_all(nodes, ["a"], contents(step, plan, size))
        saved.append(nodes.disk["a"].files)
    for seed in range(30):
        for read in (lambda tiers: recover(needs, tiers), look):
            store = MemoryStore()
            store.files = dict(saved[0])
            writer = WritesOn(store, saved[1:], seed)
            found = read([Tier(kind=TierKind.DISK, store=FaultyStore(store, writer))])
            assert found is not None, seed
            if isinstance(found, Recovered):
                assert_is_state(found, needs, found.id.step)


class WritesOn:
    """A `before` of a store to which another process saves the next step now and then, keep=1."""

    def __init__(self, store: MemoryStore, later: Sequence[dict[str, bytes]], seed: int) -> None:
        self.store, self.later, self.random = store, iter(later), random.Random(seed)

    def __call__(self, verb: str, name: str) -> None:
        if self.random.random() < 0.15:
            self.store.files = dict(next(self.later, self.store.files))


def test_a_rank_that_reads_slowly_is_waited_for_while_bytes_come() -> None:
    plan, size = ParallelPlan.even(world_size=2, num_layers=4), 2
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    nodes.lose("b")
    assert nodes.remote is not None
    remote = ThrottledStore(nodes.remote, Throttle(20_000.0))
    slow = [*nodes.tiers("b")[:2], Tier(kind=TierKind.REMOTE, store=remote)]
    needs = [needs_of(rank, plan, size) for rank in range(size)]

    def read(rank: int, peers: Peers) -> Recovered | None:
        tiers = nodes.tiers("a") if rank == 0 else slow
        return recover(needs[rank], tiers, node="ab"[rank], peers=peers)

    # It takes longer than one rank waits for another in an exchange.
    for rank, result in enumerate(run_ranks(2, read, timeout_s=0.7)):
        assert_is_state(result, needs[rank], 2)
