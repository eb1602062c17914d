"""Send small rows from all ranks to rank 0 and back over a tree: few messages per rank, few steps.

A rank talks to its parent and to at most `NUM_CHILDREN` children, so its number of connections
doesn't grow with the number of ranks n, and a row needs about ⌈log₈ n⌉ steps: 4 at 1,024 ranks, 1
up to 9. gloo's collectives take n steps (all-gather, all-reduce: a ring) or n connections (gather).

The subtree of a rank is a range of consecutive ranks that begins with it, so that rows arrive in
order, and ranks of one machine are mostly neighbours in the tree.
"""

from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

__all__ = ["NUM_CHILDREN", "RankTree", "RowsGoingUp"]

NUM_CHILDREN = 8
"""Most children of a rank."""


class RankTree:
    """One rank's part of the tree; all ranks make the same calls.

    ::

        tree = RankTree(group)
        going_up = tree.begin_up(row)
        rows = tree.share(going_up)  # as an all-gather

    Args:
        group: A group of all ranks; None if there is only one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.global_rank = 0 if group is None else dist.get_rank(group)
        self.parent, self.subtree, self.children = _place(self.global_rank, self.world_size)

    def begin_up(self, row: Tensor) -> "RowsGoingUp":
        """Begin to send each rank's row, (length,), to rank 0; doesn't wait."""
        return RowsGoingUp(self, row)

    def down(self, values: Tensor) -> Tensor:
        """Return rank 0's values; other ranks pass a tensor of the same shape, to be overwritten.

        A rank that has got them goes on even if a child is gone and can't get them, since other
        ranks may act on them: the next operation with that child fails, at the same step on all.
        """
        if self.parent is not None:
            dist.recv(values, self.parent, group=self.group)
        sent, failed = [], list[RuntimeError]()
        for child in self.children:
            try:
                sent.append(dist.isend(values, child.start, group=self.group))
            except RuntimeError as error:
                failed.append(error)
        for work in sent:
            assert work is not None
            try:
                work.wait()
            except RuntimeError as error:
                failed.append(error)
        if failed and self.parent is None and len(failed) == len(self.children):
            raise failed[0]
        return values

    def share(self, going_up: "RowsGoingUp") -> Tensor:
        """Return the rows of all ranks, (num_ranks, length), on every rank."""
        rows = going_up.finish()
        if self.parent is not None:
            rows = rows.new_empty(self.world_size, rows.shape[1])
        return self.down(rows)


class RowsGoingUp:
    """Rows on their way to rank 0."""

    def __init__(self, tree: RankTree, row: Tensor) -> None:
        self._tree = tree
        first = tree.subtree.start
        self._rows = row[None]
        if tree.children:
            self._rows = row.new_empty(len(tree.subtree), len(row))
            self._rows[0] = row
        self._arriving = [
            dist.irecv(
                self._rows[child.start - first : child.stop - first], child.start, group=tree.group
            )
            for child in tree.children
        ]
        self._sent: dist.Work | None = None
        if not tree.children:
            self._send()

    def _send(self) -> None:
        if self._tree.parent is not None:
            self._sent = dist.isend(self._rows, self._tree.parent, group=self._tree.group)

    def finish(self) -> Tensor:
        """Return the rows of this rank's subtree, (num_ranks, length): on rank 0, of all ranks."""
        for work in self._arriving:
            assert work is not None
            work.wait()
        if self._tree.children:
            self._send()
        if self._sent is not None:
            self._sent.wait()
        return self._rows


def _place(global_rank: int, world_size: int) -> tuple[int | None, range, tuple[range, ...]]:
    """Return a rank's parent, the ranks of its subtree, and those of each child's subtree."""
    parent, subtree = None, range(world_size)
    while True:
        children = _children(subtree)
        if subtree.start == global_rank:
            return parent, subtree, children
        parent = subtree.start
        subtree = next(child for child in children if global_rank in child)


def _children(subtree: range) -> tuple[range, ...]:
    """Divide a subtree without its first rank into ranges whose lengths differ by at most one."""
    first, num_below = subtree.start + 1, len(subtree) - 1
    count = min(NUM_CHILDREN, num_below)
    cuts = [first + num_below * index // count for index in range(count + 1)] if count else []
    return tuple(range(start, stop) for start, stop in pairwise(cuts))
