"""Any topology to any other, bit for bit, from the cheapest sources."""

from pathlib import Path

import pytest

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    LocalStore,
    SliceNeed,
    Source,
    Tier,
    TierKind,
    recover,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.slices import Ownership
from tests.checkpoint.states import (
    PLANS,
    Nodes,
    assert_is_state,
    contents,
    needs_of,
    recover_all,
    save_all,
)


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
