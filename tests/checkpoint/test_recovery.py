"""Any topology to any other, bit for bit, from the cheapest sources."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.checkpoint import (
    CheckpointContent,
    CheckpointId,
    SliceContent,
    SliceNeed,
    Source,
)
from lightning_hetero.checkpoint.encoding import DTYPE_NAMES
from lightning_hetero.checkpoint.tiers import place_replicas
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.slices import Ownership
from tests.checkpoint.states import (
    PLANS,
    Nodes,
    assert_is_state,
    contents,
    needs_of,
    recover,
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
        [
            SliceNeed("1.up", (32, 8), 1, ((0, 1), (2, 5))),
            SliceNeed("1.down", (8, 32), 0, ((0, 3),)),
        ],
        [SliceNeed("1.up", (32, 8), 0, ((31, 32),))],
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
        return set(results[0].bytes_by_source)

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


def test_nothing_saved_is_no_error() -> None:
    assert recover_all(Nodes(["a"]), ["a"], [[]]) == [None]


def test_another_models_checkpoint_is_refused_on_all_ranks() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    with pytest.raises(CheckpointError, match=r"1\.up has shape"):
        recover_all(nodes, ["a", "b"], [[SliceNeed("1.up", (64, 8), 0, ((0, 1),))], []])
    with pytest.raises(CheckpointError, match="no parameter other"):
        recover_all(nodes, ["a", "b"], [[], [SliceNeed("other", (64, 8), 0, ((0, 1),))]])


def test_state_that_is_not_element_by_element_is_never_cut() -> None:
    nodes, rows = Nodes(["a"], remote=False), range(2)
    pieces = [
        SliceContent(
            parameter="w",
            unit=0,
            shape=(8, 4),
            dim=0,
            start=4 * rank,
            stop=4 * rank + 4,
            weight=torch.ones(4, 4),
            state={"row": torch.arange(4.0) + rank},
            whole_state={"square": torch.eye(4) + rank},
        )
        for rank in rows
    ]
    parts = [
        CheckpointContent(
            id=CheckpointId(1), global_rank=rank, world_size=2, num_layers=1, slices=(pieces[rank],)
        )
        for rank in rows
    ]
    save_all(nodes, ["a", "a"], parts)
    same = recover([SliceNeed("w", (8, 4), 0, ((4, 8),))], nodes.tiers("a"))
    assert same is not None
    assert torch.equal(same.slices[0].state["row"], torch.arange(4.0) + 1)
    assert torch.equal(same.slices[0].state["square"], torch.eye(4) + 1)
    with pytest.raises(CheckpointError, match="ownership='parameter'"):
        recover([SliceNeed("w", (8, 4), 0, ((0, 8),))], nodes.tiers("a"))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_dtype_survives(dtype: torch.dtype) -> None:
    values = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    piece = SliceContent(
        parameter="p", unit=0, shape=(2, 3, 4), dim=1, start=0, stop=3, weight=values
    )
    content = CheckpointContent(
        id=CheckpointId(1), global_rank=0, world_size=1, num_layers=1, slices=(piece,)
    )
    nodes = Nodes(["a"], remote=False)
    save_all(nodes, ["a"], [content])
    recovered = recover([SliceNeed("p", (2, 3, 4), 1, ((1, 3),))], nodes.tiers("a"))
    assert recovered is not None
    found = recovered.slices[0].weight
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.float32), values[:, 1:].to(torch.float32))


@st.composite
def clusters(draw: st.DrawFn) -> list[str]:
    nodes = range(draw(st.integers(1, 6)))
    return [f"n{node}" for node in nodes for _ in range(draw(st.integers(1, 4)))]


@given(node_of_rank=clusters(), replicas=st.integers(1, 4), data=st.data())
def test_copies_go_to_distinct_other_nodes_that_stay_and_follow(
    node_of_rank: list[str], replicas: int, data: st.DataObject
) -> None:
    """And so only neighbours that are lost together lose something."""
    nodes = sorted(set(node_of_rank))
    leaving = data.draw(st.sets(st.sampled_from(nodes)))
    for rank, targets in enumerate(
        place_replicas(node_of_rank, replicas=replicas, leaving=leaving)
    ):
        own, places = node_of_rank[rank], [node_of_rank[target] for target in targets]
        index = nodes.index(own)
        able = [n for n in (*nodes[index + 1 :], *nodes[:index]) if n not in leaving]
        assert places == able[: max(1, replicas - 1) if own in leaving else replicas - 1]
