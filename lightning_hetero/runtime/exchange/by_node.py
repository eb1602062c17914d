"""Push in two legs: each node sums its own ranks' gradients, then sends one sum to each owner.

In a direct push each of n holders sends (n - g)/n of a unit's S bytes to other nodes, if g holders
are on its own node. Here each rank of a node *relays* to a share of the owners: the node's other
ranks send it the pieces of these owners, S·(g - 1)/g over the node's own links; it adds them up and
sends each owner one sum. So (n - g)/(n·g) of S leaves the node from each rank: g times less, or g/2
times if gradients travel in bf16, because sums are fp32. Nodes may have unequal numbers of holders.

Each gradient is rounded once, for its first leg. Sums are made in pipeline order on a node, then in
order of relays: the same bits on every run, but not those of a direct push.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.runtime.exchange.even import (
    EvenWay,
    ScatteredUnit,
    added_in_turn,
    added_up,
)
from lightning_hetero.runtime.exchange.messages import TwoLegged

__all__ = ["NodeWay", "Relays", "SummedByNode"]


class Relays(NamedTuple):
    """Which members of a circle relay to which others, as one of them sees it.

    Members are given by their place in the circle.
    """

    on_node: tuple[int, ...]
    """The members on this one's node, itself included."""
    order: tuple[int, ...]
    """All members, ordered by which member of this node relays to them."""
    counts: tuple[int, ...]
    """The number of members that each of `on_node` relays to."""
    sends: tuple[int, ...]
    """For each member 1 if this one relays to it, else 0."""
    receives: tuple[int, ...]
    """For each member 1 if it relays to this one, else 0."""

    @classmethod
    def of(cls, nodes: Sequence[int], own: int) -> Self | None:
        """Return the relays that `own` sees; None if no node has two members, or all are on one.

        Args:
            nodes: The node of each member.
            own: This member.
        """
        by_node = {node: tuple(_places(nodes, node)) for node in nodes}
        if len(by_node) == 1 or len(by_node) == len(nodes):
            return None
        on_node = by_node[nodes[own]]
        relays = _relays_of(nodes, on_node)
        return cls(
            on_node=on_node,
            order=tuple(sorted(range(len(nodes)), key=lambda member: (relays[member], member))),
            counts=tuple(relays.count(member) for member in on_node),
            sends=tuple(int(relay == own) for relay in relays),
            receives=tuple(
                int(_relays_of(nodes, by_node[node])[own] == member)
                for member, node in enumerate(nodes)
            ),
        )


def _places(nodes: Sequence[int], node: int) -> list[int]:
    return [place for place, item in enumerate(nodes) if item == node]


def _relays_of(nodes: Sequence[int], on_node: Sequence[int]) -> list[int]:
    """Return for each member the one of `on_node` that relays to it; for these it is themselves."""
    own, relays, num_far = set(on_node), [], 0
    for member in range(len(nodes)):
        relays.append(member if member in own else on_node[num_far % len(on_node)])
        num_far += member not in own
    return relays


@dataclass(frozen=True, kw_only=True)
class NodeWay(EvenWay):
    """How any unit of a kind is pushed by node; `pieces` are in `relays.order`."""

    relays: Relays
    inside: dist.ProcessGroup | None
    """The communicator of the circle's members on this node; None if there is only one."""


@dataclass(eq=False)
class SummedByNode(ScatteredUnit, TwoLegged):
    """A unit whose gradients are summed on each node, and these sums by the owners of its rows."""

    way: NodeWay

    def post(self) -> None:
        """Post the first leg: the gradients, which must be final."""
        relays, pieces = self.way.relays, self.way.pieces
        given = self._given = pieces.pack_wholes(self._gradients(), self.options.dtype)
        if self.way.inside is None:
            self._received = given
            return
        own_count, num_near = relays.counts[self._own_place], len(relays.on_node)
        self._received = self._empty(num_near * own_count, pieces.numel)
        self._work = dist.all_to_all_single(
            self._received,
            given,
            [own_count] * num_near,
            list(relays.counts),
            group=self.way.inside,
            async_op=True,
        )

    @override
    def go_on(self) -> None:
        """Post the second leg; all ranks call it in the same order, after the first leg's `post`.

        Waits for the node's other ranks: on a device without streams the host does.
        """
        if self._work is not None:
            self._work.wait()
        assert self._received is not None
        relays, numel = self.way.relays, self.way.pieces.numel
        blocks = self._received.view(len(relays.on_node), -1, numel)
        dtype = self._sum_dtype
        sums = self._given = added_in_turn([blocks[place] for place in self._near_order], dtype)
        self._received = sums.new_empty(sum(relays.receives), numel)
        self._work = dist.all_to_all_single(
            self._received,
            sums,
            list(relays.receives),
            list(relays.sends),
            group=self.group,
            async_op=True,
        )

    def _sum_in_order(self, dtype: torch.dtype) -> Tensor:
        assert self._received is not None
        return added_up(self._received, dtype)

    @cached_property
    def _senders(self) -> list[tuple[int, int]]:
        size = self._sum_dtype.itemsize * self.way.pieces.numel
        ranks = compress(self._members, self.way.relays.receives)
        return [(rank, size) for rank in ranks if rank != self.store.global_rank]

    @cached_property
    def _members(self) -> list[int]:
        """The circle's ranks, ascending."""
        return sorted(self.way.pieces.members)

    @cached_property
    def _own_place(self) -> int:
        """This rank's place among those of its node."""
        return self.way.relays.on_node.index(self._members.index(self.store.global_rank))

    @cached_property
    def _near_order(self) -> list[int]:
        """The places of the node's ranks, in order of pipeline, then rank."""
        pipelines = {
            item.global_rank: item.pipeline_index
            for item in self.weights.table.holdings(self.unit.specs[0].name)
        }
        ranks = [self._members[place] for place in self.way.relays.on_node]
        return sorted(range(len(ranks)), key=lambda place: (pipelines[ranks[place]], ranks[place]))
