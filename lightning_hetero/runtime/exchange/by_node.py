"""Push in two steps: each node sums its own ranks' gradients, then sends one sum to each owner.

Let n ranks hold a unit of S bytes, g of them on each node. Here each rank *relays* to a share of
the owners: the other ranks of its node send it their gradients for these owners, it adds them up,
and sends each owner one sum. So each rank sends S·(n - g)/(n·g) to other nodes: g times less than
in a direct push, or g/2 times less if gradients travel in bf16, since sums travel in fp32. Nodes
may have unequal numbers of holders.

A node adds in order of ranks, an owner in order of relays: this gives the same bits on every run,
but other bits than a direct push. A pull needs no such steps: in the ring of its all-gather each
weight enters a node once.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, cycle

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.runtime.exchange.even import EvenRoute, ScatteredUnit
from lightning_hetero.runtime.exchange.messages import has_streams, sum_dtype


def relays_of(nodes: Sequence[int], node: int) -> list[int]:
    """Return, for each member of a shard group, which member on `node` sends it that node's sum.

    A member on `node` is its own relay.
    """
    turns = cycle(place for place, item in enumerate(nodes) if item == node)
    return [place if item == node else next(turns) for place, item in enumerate(nodes)]


def groups_on_nodes(members: Sequence[int], node_of_rank: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the groups of two or more members on one node; none if all members are on one node."""
    on_nodes: dict[int, list[int]] = defaultdict(list)
    for rank in members:
        on_nodes[node_of_rank[rank]].append(rank)
    return {tuple(ranks) for ranks in on_nodes.values() if 1 < len(ranks) < len(members)}


@dataclass(frozen=True, kw_only=True)
class NodeRoute(EvenRoute):
    """The route of a kind of unit that is pushed by node.

    `pieces` are ordered by the rank on this node that relays them.
    """

    near: tuple[int, ...]
    """The shard group's ranks on this rank's node, ascending, itself included."""
    near_group: dist.ProcessGroup | None
    """The communicator of `near`; None if this rank is alone on its node."""
    num_pieces: list[int]
    """For each rank of `near`, the number of ranks that it relays to."""
    sends: list[int]
    """For each rank of the shard group, ascending: 1 if this rank relays to it, else 0."""
    receives: list[int]
    """For each rank of the shard group, ascending: 1 if it relays to this rank, else 0."""


@dataclass(eq=False)
class SummedByNode(ScatteredUnit):
    """A unit whose gradients are summed on each node; owners add up these sums."""

    route: NodeRoute

    @override
    def post(self) -> None:
        route, num_relayed = self.route, sum(self.route.sends)
        given = self._given = route.pieces.pack_wholes(self._gradients(), self.options.dtype)
        self._received = given
        if route.near_group is not None:
            sizes = [num_relayed] * len(route.near)
            self._received = self._empty(sum(sizes), route.pieces.numel)
            self._work = dist.all_to_all_single(
                self._received,
                given,
                sizes,
                route.num_pieces,
                group=route.near_group,
                async_op=True,
            )
        if has_streams(self.store.device):  # Elsewhere the host would wait for the first step.
            self._send_sums()

    @override
    def wait(self) -> None:
        if not has_streams(self.store.device):
            self._send_sums()
        self._wait_for_others()

    def _send_sums(self) -> None:
        """Post the second step, once the first has arrived."""
        route, received = self.route, self._received
        assert received is not None
        if self._work is not None:
            self._work.wait()
        sums = self._given = _added(
            received.view(len(route.near), -1, route.pieces.numel), self._dtype
        )
        self._received = sums.new_empty(sum(route.receives), route.pieces.numel)
        self._work = dist.all_to_all_single(
            self._received, sums, route.receives, route.sends, group=route.group, async_op=True
        )

    @override
    def _sum_up(self, dtype: torch.dtype) -> Tensor:
        assert self._received is not None
        return _added(self._received, dtype)

    @cached_property
    def _senders(self) -> list[tuple[int, int]]:
        senders = compress(sorted(self.route.pieces.members), self.route.receives)
        return self._timed([*senders], self._dtype)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return sum_dtype(self.store.masters[spec.name] for spec in self.unit.specs)


def _added(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the first dim, added in order, in new memory."""
    total = rows[0].to(dtype, copy=True)
    for row in rows[1:]:
        total.add_(row)
    return total
