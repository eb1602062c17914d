"""Any topology to any other, bit for bit, from the cheapest sources, whatever is broken."""

import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.checkpoint import (
    CheckpointContent,
    CheckpointId,
    CheckpointWriter,
    FaultyStore,
    LocalStore,
    MemoryStore,
    Recovered,
    SliceNeed,
    Source,
    Store,
    Throttle,
    ThrottledStore,
    Tier,
    TierKind,
    Transport,
    WriterOptions,
    begin_run,
    fetching,
    recover,
)
from lightning_hetero.checkpoint.inspection import look
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.core.slices import Ownership
from tests.checkpoint.states import assert_is_state, contents, needs_of, run_ranks


class Nodes:
    """Each node's own tiers and one remote store for all."""

    def __init__(self, names: Sequence[str], *, remote: bool = True) -> None:
        self.memory = {name: MemoryStore(f"{name}/shm") for name in names}
        self.disk = {name: MemoryStore(f"{name}/disk") for name in names}
        self.remote: Store | None = MemoryStore("remote") if remote else None

    def tiers(self, node: str) -> list[Tier]:
        own = [
            Tier(kind=TierKind.MEMORY, store=self.memory[node]),
            Tier(kind=TierKind.DISK, store=self.disk[node]),
        ]
        if self.remote is None:
            return own
        return [*own, Tier(kind=TierKind.REMOTE, store=self.remote)]

    def lose(self, node: str) -> None:
        self.memory[node].files.clear()
        self.disk[node].files.clear()


def save_all(
    nodes: Nodes, node_of_rank: Sequence[str], parts: list[CheckpointContent], *, replicas: int = 1
) -> None:
    def action(rank: int, transport: Transport) -> None:
        writer = CheckpointWriter(
            nodes.tiers(node_of_rank[rank]),
            node_of_rank=node_of_rank,
            transport=transport,
            options=WriterOptions(replicas=replicas),
        )
        saved = writer.save(parts[rank])
        saved.wait_until_confirmed(20)
        assert saved.wait_until_uploaded(20) == (nodes.remote is not None)
        writer.close()

    run_ranks(len(parts), action)


def recover_all(
    nodes: Nodes, node_of_rank: Sequence[str], needs: list[list[SliceNeed]], **options: Any
) -> list[Recovered | None]:
    def action(rank: int, transport: Transport) -> Recovered | None:
        tiers = nodes.tiers(node_of_rank[rank])
        return recover(needs[rank], tiers, node=node_of_rank[rank], transport=transport, **options)

    return run_ranks(len(node_of_rank), action)


def uneven_plan() -> ParallelPlan:
    """Two pipelines: TP 2 in one stage, TP 1 in stages of 3 and 1 layers."""
    return ParallelPlan(
        pipelines=(
            PipelinePlan(stages=(StagePlan(ranks=(0, 1), layers=range(4)),)),
            PipelinePlan(
                stages=(
                    StagePlan(ranks=(2,), layers=range(3)),
                    StagePlan(ranks=(3,), layers=range(3, 4)),
                )
            ),
        )
    )


PLANS = {
    "one device": (ParallelPlan.even(world_size=1, num_layers=4), 1),
    "tp 2": (ParallelPlan.even(world_size=2, num_layers=4, tp_degree=2), 2),
    "tp 4": (ParallelPlan.even(world_size=4, num_layers=4, tp_degree=4), 4),
    "pp 2": (ParallelPlan.even(world_size=2, num_layers=4, num_stages=2), 2),
    "dp 3": (ParallelPlan.even(world_size=3, num_layers=4), 3),
    "uneven": (uneven_plan(), 4),
    "idle rank": (ParallelPlan.even(world_size=2, num_layers=4), 3),
}


@pytest.mark.parametrize("before", PLANS)
@pytest.mark.parametrize("after", PLANS)
def test_any_plan_is_recovered_under_any_other_bit_for_bit(before: str, after: str) -> None:
    old_plan, old_size = PLANS[before]
    new_plan, new_size = PLANS[after]
    nodes = Nodes([f"n{i}" for i in range(4)])
    save_all(nodes, [f"n{i // 2}" for i in range(old_size)], contents(7, old_plan, old_size))
    needs = [
        needs_of(rank, new_plan, new_size, ownership=Ownership.EVEN) for rank in range(new_size)
    ]
    results = recover_all(nodes, [f"n{i}" for i in range(new_size)], needs)
    for rank, recovered in enumerate(results):
        assert_is_state(recovered, needs[rank], 7)
        assert recovered is not None
        assert recovered.plan == old_plan
        if old_size == new_size:
            assert recovered.rank_metadata is not None
            assert recovered.rank_metadata["rank"] == rank
        else:
            assert recovered.rank_metadata is None


def test_a_reader_may_cut_along_another_dim_than_the_writer() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(3, plan, size))
    needs = [
        [SliceNeed("1.up", (32, 8), 1, 2, 5), SliceNeed("1.down", (8, 32), 0, 0, 3)],
        [SliceNeed("1.up", (32, 8), 0, 31, 32)],
    ]
    results = recover_all(nodes, ["a", "b"], needs)
    for rank in range(2):
        assert_is_state(results[rank], needs[rank], 3)


def test_each_source_is_taken_only_when_no_cheaper_one_is_left() -> None:
    plan, size = PLANS["dp 3"]
    node_of_rank = ["a", "b", "c"]
    nodes = Nodes(node_of_rank)
    save_all(nodes, node_of_rank, contents(5, plan, size))
    needs = [needs_of(rank, plan, size) for rank in range(size)]

    def sources() -> set[Source]:
        results = recover_all(nodes, node_of_rank, needs)
        assert_is_state(results[0], needs[0], 5)
        assert results[0] is not None
        # The metadata is rank 0's, so for rank 0 everything is its own.
        return set(results[0].report.bytes_by_source)

    assert sources() == {Source.OWN_MEMORY}
    nodes.memory["a"].files.clear()
    assert sources() == {Source.OWN_DISK}
    own = dict(nodes.disk["a"].files)
    nodes.disk["a"].files.clear()
    nodes.memory["c"].files.update(own)
    assert sources() == {Source.PEER_MEMORY}
    nodes.disk["b"].files.update(own)
    assert sources() == {Source.PEER_MEMORY}
    for name in own:
        nodes.memory["c"].remove([name])
    assert sources() == {Source.PEER_DISK}
    nodes.lose("b")
    nodes.disk["c"].files.clear()
    assert sources() == {Source.REMOTE}


@pytest.mark.parametrize("lost", [("a",), ("c",), ("a", "c")])
def test_with_two_replicas_lost_nodes_that_are_no_neighbours_need_no_remote(
    lost: tuple[str, ...],
) -> None:
    plan = ParallelPlan.even(world_size=4, num_layers=4, num_stages=2)
    node_of_rank = ["a", "b", "c", "d"]
    nodes = Nodes(node_of_rank, remote=False)
    save_all(nodes, node_of_rank, contents(9, plan, 4), replicas=2)
    for node in lost:
        nodes.lose(node)
    survivors = [node for node in node_of_rank if node not in lost]
    new_plan = ParallelPlan.even(world_size=len(survivors), num_layers=4)
    needs = [needs_of(r, new_plan, len(survivors)) for r in range(len(survivors))]
    for rank, recovered in enumerate(recover_all(nodes, survivors, needs)):
        assert_is_state(recovered, needs[rank], 9)


def test_lost_neighbours_are_recovered_from_the_remote() -> None:
    plan = ParallelPlan.even(world_size=4, num_layers=4)
    node_of_rank = ["a", "b", "c", "d"]
    nodes = Nodes(node_of_rank)
    save_all(nodes, node_of_rank, contents(9, plan, 4), replicas=2)
    nodes.lose("a")
    nodes.lose("b")
    needs = [needs_of(r, plan, 4) for r in range(4)]
    results = recover_all(nodes, node_of_rank, needs)
    assert_is_state(results[0], needs[0], 9)
    assert all(r is not None for r in results)
    used = set().union(*(r.report.bytes_by_source for r in results if r))
    assert Source.REMOTE in used
    # Node b's part had its copy on c.
    assert {Source.PEER_DISK} <= used


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
    for intact in range(3):
        nodes = Nodes(["a", "b"])
        assert isinstance(nodes.remote, MemoryStore)
        save_all(nodes, ["a", "b"], contents(2, plan, size))
        stores = [nodes.memory["a"], nodes.disk["a"], nodes.remote]
        for index, store in enumerate(stores):
            if index != intact:
                damage(store, how, suffix=suffix)
        results = recover_all(nodes, ["a", "b"], needs)
        for rank in range(size):
            assert_is_state(results[rank], needs[rank], 2)


def test_without_an_intact_copy_the_error_names_the_layer_and_the_places() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"])
    assert isinstance(nodes.remote, MemoryStore)
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    for store in (nodes.memory["a"], nodes.disk["a"], nodes.remote):
        damage(store, "flipped", suffix="layer-0001.part-00000.weights.safetensors")
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    with pytest.raises(CheckpointError, match="layer-0001") as caught:
        recover_all(nodes, ["a", "b"], needs)
    for place in ("a/memory", "a/disk", "remote", "step 2"):
        assert place in str(caught.value)


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
        assert "layer-0002" in recovered.report.skipped[0]
    with pytest.raises(CheckpointError, match="layer-0002"):
        recover_all(nodes, ["a", "b"], needs, step=4)


def test_parts_of_two_attempts_at_one_step_never_mix() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"], remote=False)
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=0))
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=1))
    for store in (nodes.memory["a"], nodes.disk["a"]):
        for name in [n for n in store.files if n.startswith("step-000000000004-000001")]:
            store.remove([name])
    for store in (nodes.memory["b"], nodes.disk["b"]):
        for name in [n for n in store.files if n.startswith("step-000000000004-000000")]:
            store.remove([name])
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    with pytest.raises(CheckpointError, match="step 4"):
        recover_all(nodes, ["a", "b"], needs, step=4)


def test_nothing_saved_is_no_error() -> None:
    assert recover_all(Nodes(["a"]), ["a"], [[]]) == [None]


def test_another_models_checkpoint_is_refused_on_all_ranks() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    with pytest.raises(CheckpointError, match=r"1\.up has shape"):
        recover_all(nodes, ["a", "b"], [[SliceNeed("1.up", (64, 8), 0, 0, 1)], []])
    with pytest.raises(CheckpointError, match="no parameter other"):
        recover_all(nodes, ["a", "b"], [[], [SliceNeed("other", (64, 8), 0, 0, 1)]])


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

    def refused(rank: int, transport: Transport) -> str:
        tiers = nodes.tiers("ab"[rank])
        with pytest.raises(CheckpointError, match=r"500.*skip_unreadable=True") as caught:
            recover(needs[rank], tiers, node="ab"[rank], transport=transport)
        return str(caught.value)

    assert len(run_ranks(size, refused)) == size
    for rank, recovered in enumerate(recover_all(nodes, ["a", "b"], needs, skip_unreadable=True)):
        assert_is_state(recovered, needs[rank], 2)
    for node in ("a", "b"):
        nodes.lose(node)
    with pytest.raises(CheckpointError, match="Nothing to go on from is left"):
        recover_all(nodes, ["a", "b"], needs, skip_unreadable=True)


def test_what_is_saved_while_a_place_cannot_be_read_is_newer_than_what_is_there() -> None:
    """Else it would be pruned there, or become the other half of what an earlier start saved."""
    plan, size = PLANS["one device"]
    nodes = Nodes(["a"])
    needs = needs_of(0, plan, size)
    run = replace(begin_run(nodes.tiers("a"), node="a"), step=4)
    save_all(nodes, ["a"], [replace(contents(4, plan, size)[0], id=run)])
    local = [dict(store.files) for store in (nodes.memory["a"], nodes.disk["a"])]
    for attempt in (1, 2):
        later = replace(contents(8, plan, size)[0], id=replace(run, step=8, attempt=attempt))
        save_all(nodes, ["a"], [later])
    nodes.memory["a"].files, nodes.disk["a"].files = local

    def down(called: str, name: str) -> None:
        raise ConnectionError(f"{name} answered 500")

    remote, nodes.remote = nodes.remote, FaultyStore(nodes.remote, down)
    recovered = recover_all(nodes, ["a"], [needs], skip_unreadable=True)[0]
    assert_is_state(recovered, needs, 4)
    nodes.remote = remote
    assert recovered is not None
    again = replace(run, step=6, attempt=recovered.report.attempt)
    save_all(nodes, ["a"], [replace(contents(6, plan, size)[0], id=again)])
    assert_is_state(recover_all(nodes, ["a"], [needs])[0], needs, 6)


def test_a_new_process_finds_what_an_old_one_left_on_disk(tmp_path: Path) -> None:
    plan, size = PLANS["one device"]
    tiers = [Tier(kind=TierKind.DISK, store=LocalStore(tmp_path))]
    writer = CheckpointWriter(tiers)
    writer.save(contents(1, plan, size)[0])
    writer.close()
    needs = needs_of(0, plan, size)
    recovered = recover(needs, [Tier(kind=TierKind.DISK, store=LocalStore(tmp_path))])
    assert_is_state(recovered, needs, 1)
    assert recovered is not None
    assert "own disk" in str(recovered.report)


def test_a_run_that_went_back_is_newer_than_the_one_it_left() -> None:
    plan, size = PLANS["one device"]
    nodes = Nodes(["a"], remote=False)
    needs = needs_of(0, plan, size)
    save_all(nodes, ["a"], contents(9, plan, size))
    attempt = begin_run(nodes.tiers("a"), node="a").attempt
    assert attempt == 1
    save_all(nodes, ["a"], contents(5, plan, size, attempt=attempt))
    recovered = recover_all(nodes, ["a"], [needs])[0]
    assert_is_state(recovered, needs, 5)
    assert recovered is not None
    assert recovered.report.attempt == 2
    for step in (6, 7):
        save_all(nodes, ["a"], contents(step, plan, size, attempt=attempt))
    folders = {name.split("/")[0][-8:] for name in nodes.disk["a"].files if "/" in name}
    assert folders == {"6-000001", "7-000001"}


def test_where_every_checkpoint_is_incomplete_nothing_begins_anew() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"], remote=False)
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=3))
    nodes.lose("b")
    with pytest.raises(CheckpointError, match=r"step 4 \(attempt 3\)\), but none is complete"):
        recover_all(nodes, ["a", "b"], [[], []])
    with pytest.raises(CheckpointError, match="none is complete"):
        begin_run(nodes.tiers("a"), node="a")


def test_a_first_save_that_never_finished_is_begun_anew_with_another_attempt() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"], remote=False)
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=3))
    nodes.lose("b")
    for store in (nodes.memory["a"], nodes.disk["a"]):
        store.remove([name for name in store.files if name.endswith(("confirmed", ".json"))])
    assert recover_all(nodes, ["a", "b"], [[], []]) == [None, None]
    assert begin_run(nodes.tiers("a"), node="a") == CheckpointId(0, 4)


def test_parts_of_saves_by_different_numbers_of_ranks_are_never_put_together() -> None:
    two, three = Nodes(["a"], remote=False), Nodes(["a"], remote=False)
    save_all(two, ["a", "a"], contents(6, PLANS["tp 2"][0], 2))
    save_all(three, ["a", "a", "a"], contents(6, PLANS["dp 3"][0], 3))
    store = MemoryStore()
    store.files = dict(three.disk["a"].files)
    for name in [name for name in store.files if "00000." in name]:
        del store.files[name]
    store.files |= {name: x for name, x in two.disk["a"].files.items() if "00001." not in name}
    with pytest.raises(CheckpointError, match="none is complete"):
        recover([], [Tier(kind=TierKind.DISK, store=store)])


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


def test_another_runs_checkpoints_are_never_gone_on_from() -> None:
    plan, size = PLANS["one device"]
    needs = needs_of(0, plan, size)
    nodes = Nodes(["a"])
    old = begin_run(nodes.tiers("a"), node="a")
    assert begin_run(nodes.tiers("a"), node="a") == old
    save_all(nodes, ["a"], [replace(contents(9, plan, size)[0], id=replace(old, step=9))])
    assert isinstance(nodes.remote, MemoryStore)
    nodes.remote.files.clear()
    with pytest.raises(CheckpointError, match="place that all nodes share is empty"):
        recover(needs, nodes.tiers("a"), node="a")
    nodes.disk["a"].files.clear()
    # What is left in shared memory belongs to a run that has been deleted.
    assert recover(needs, nodes.tiers("a"), node="a") is None
    new = begin_run(nodes.tiers("a"), node="a")
    assert new.run > old.run
    save_all(nodes, ["a"], [replace(contents(3, plan, size)[0], id=replace(new, step=3))])
    recovered = recover(needs, nodes.tiers("a"), node="a")
    assert_is_state(recovered, needs, 3)
    assert recovered is not None
    assert recovered.id.run == new.run
    # The old run's are left alone all the same.
    assert {name.split("/")[0][-12:] for name in nodes.memory["a"].files if "/" in name} == {
        old.run[-12:],
        new.run[-12:],
    }


def test_attempts_count_what_is_broken_too() -> None:
    plan, size = PLANS["one device"]
    nodes = Nodes(["a"], remote=False)
    save_all(nodes, ["a"], contents(2, plan, size))
    save_all(nodes, ["a"], contents(4, plan, size, attempt=7))
    needs = needs_of(0, plan, size)
    for store in (nodes.memory["a"], nodes.disk["a"]):
        for name in [name for name in store.files if name.startswith("step-000000000004")]:
            if name.endswith("part-00000.json"):
                store.files[name] = store.files[name][:40]
    recovered = recover(needs, nodes.tiers("a"), node="a")
    assert_is_state(recovered, needs, 2)
    assert recovered is not None
    assert begin_run(nodes.tiers("a"), recovered=recovered, node="a") == CheckpointId(0, 8)


def test_where_the_name_of_the_run_is_torn_nothing_is_started() -> None:
    plan, size = PLANS["one device"]
    nodes = Nodes(["a"])
    save_all(nodes, ["a"], contents(2, plan, size))
    assert isinstance(nodes.remote, MemoryStore)
    for torn in (b"", b'{"run": ', b'{"run": "../x"}', b"[]"):
        nodes.remote.files["run.json"] = torn
        with pytest.raises(CheckpointError, match=r"run\.json is torn.*skip_unreadable=True"):
            recover([], nodes.tiers("a"), node="a")


@pytest.mark.slow
def test_readers_beside_a_writer_that_keeps_one_checkpoint_always_find_one(tmp_path: Path) -> None:
    plan, size = PLANS["one device"]
    needs = needs_of(0, plan, size)
    tiers = [Tier(kind=TierKind.REMOTE, store=LocalStore(tmp_path), keep=1)]
    has_saved, is_over = threading.Event(), threading.Event()

    def write() -> None:
        writer = CheckpointWriter(tiers)
        for step in itertools.count(1):
            writer.save(contents(step, plan, size)[0]).wait_until_uploaded(60)
            has_saved.set()
            if is_over.is_set():
                break
        writer.close()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        assert has_saved.wait(60)
        for _ in range(100):
            recovered = recover(needs, tiers)
            assert recovered is not None
            assert_is_state(recovered, needs, recovered.id.step)
            look(tiers)
        is_over.set()
        writing.result()


def recover_with(
    nodes: Nodes, needs: list[list[SliceNeed]], slow: list[Tier], *, timeout_s: float = 30.0
) -> list[Recovered | None]:
    """Recover on two nodes, the second of which reaches its places in another way."""

    def action(rank: int, transport: Transport) -> Recovered | None:
        tiers = nodes.tiers("a") if rank == 0 else slow
        return recover(needs[rank], tiers, node="ab"[rank], transport=transport)

    return run_ranks(2, action, timeout_s=timeout_s)


def test_a_rank_that_reads_slowly_is_waited_for_while_bytes_come() -> None:
    plan, size = ParallelPlan.even(world_size=2, num_layers=4), 2
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    nodes.lose("b")
    assert nodes.remote is not None
    remote = ThrottledStore(nodes.remote, Throttle(20_000.0))
    slow = [*nodes.tiers("b")[:2], Tier(kind=TierKind.REMOTE, store=remote)]
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    # It takes longer than one rank waits for another in an exchange.
    for rank, result in enumerate(recover_with(nodes, needs, slow, timeout_s=0.7)):
        assert_is_state(result, needs[rank], 2)


def test_a_source_that_hangs_is_given_up_and_another_one_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "_STALL_S", 0.5)
    plan, size = ParallelPlan.even(world_size=2, num_layers=4), 2
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    let_go = threading.Event()

    def before(verb: str, name: str) -> None:
        if verb == "read" and name.endswith("weights.safetensors"):
            assert let_go.wait(30)

    own = nodes.tiers("b")
    hanging = Tier(kind=TierKind.MEMORY, store=FaultyStore(own[0].store, before))
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    results = recover_with(nodes, needs, [hanging, *own[1:]])
    let_go.set()
    for rank, result in enumerate(results):
        assert_is_state(result, needs[rank], 2)
    assert results[1] is not None
    assert any("didn't answer" in text for text in results[1].report.failures)
