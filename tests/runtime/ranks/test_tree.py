"""Rows of all ranks go up to rank 0 and down again with few messages of each."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.runtime.ranks import tree as ranks_tree
from lightning_hetero.runtime.ranks.tree import NUM_CHILDREN, RankTree, _place
from tests.processes import ProcessPool


@pytest.mark.parametrize("world_size", [1, 2, 9, 10, 11, 74, 1024])
def test_every_rank_has_few_neighbours_and_one_way_to_rank_0(world_size: int) -> None:
    places = [_place(rank, world_size) for rank in range(world_size)]
    for rank, (_, subtree, children) in enumerate(places):
        assert len(children) <= NUM_CHILDREN
        assert [rank, *(r for child in children for r in child)] == list(subtree)
        assert all(places[child.start][:2] == (rank, child) for child in children)
    assert [rank for rank, (parent, _, _) in enumerate(places) if parent is None] == [0]
    depths = [0] * world_size
    for rank, (parent, _, _) in enumerate(places):
        depths[rank] = 0 if parent is None else depths[parent] + 1
    assert max(depths) == {1: 0, 2: 1, 9: 1, 10: 2, 11: 2, 74: 3, 1024: 4}[world_size]


def tell(rank: int) -> list[tuple[list[list[float]], list[list[float]], list[float]]]:
    """Return what comes up, what is shared and what comes down, in a star, a tree and a chain."""
    dist.init_process_group("gloo")
    row, heard = torch.tensor([rank, rank**2], dtype=torch.float64), []
    for num_children in (NUM_CHILDREN, 2, 1):
        with mock.patch.object(ranks_tree, "NUM_CHILDREN", num_children):
            tree = RankTree(dist.group.WORLD)
        up = tree.begin_up(row).finish()
        shared = tree.share(tree.begin_up(-row))
        down = tree.down(torch.full((2,), rank + 7.0))
        heard.append((up.tolist(), shared.tolist(), down.tolist()))
    dist.barrier()
    return heard


@pytest.mark.dist
def test_rows_arrive_in_order_and_values_of_rank_0_everywhere(pool: ProcessPool) -> None:
    results = pool.run(tell, 4)
    for rank, heard in enumerate(results):
        for up, shared, down in heard:
            assert rank > 0 or up == [[r, r**2] for r in range(4)]
            assert shared == [[-r, -(r**2)] for r in range(4)]
            assert down == [7.0, 7.0]


@pytest.mark.parametrize(
    ("parent", "gone", "goes_on"),
    [(None, {1}, True), (None, {1, 2}, False), (3, {1, 2}, True), (None, set(), True)],
)
def test_who_has_told_another_rank_goes_on_though_a_child_is_gone(
    parent: int | None,
    gone: set[int],
    goes_on: bool,  # noqa: FBT001
) -> None:
    """Else it would be a step behind those that it has told."""
    tree, values, told = RankTree(None), torch.ones(2), []
    tree.parent, tree.children = parent, (range(1, 2), range(2, 3))

    def send(_: torch.Tensor, target: int, **__: object) -> mock.Mock:
        broken = RuntimeError("gloo: Connection closed by peer") if target in gone else None
        told.append(target)
        return mock.Mock(wait=mock.Mock(side_effect=broken))

    with mock.patch.multiple(dist, isend=send, recv=mock.Mock()):
        if goes_on:
            assert tree.down(values) is values
        else:
            with pytest.raises(RuntimeError, match="closed by peer"):
                tree.down(values)
    assert told == [1, 2]
