"""Decide which sets of ranks need a communicator to pull and push, and when they use it."""

from collections import defaultdict
from collections.abc import Sequence

from lightning_hetero.core.proxies import ProxyTable, are_by_proxies
from lightning_hetero.core.transfers import Circle, ExchangeKind, UnitKind

__all__ = ["circles_by_proxies", "groups_on_nodes", "groups_wanted"]


def groups_on_nodes(
    members: Sequence[int], node_of_rank: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the members on each node that has several of them; none if all are on one node."""
    by_node: dict[int, list[int]] = defaultdict(list)
    for rank in members:
        by_node[node_of_rank[rank]].append(rank)
    if len(by_node) == 1:
        return ()
    return tuple(tuple(ranks) for ranks in by_node.values() if len(ranks) > 1)


def groups_wanted(
    kind: UnitKind, exchange: ExchangeKind, proxies: ProxyTable
) -> set[tuple[int, ...]]:
    """Return the sets of ranks that need a communicator for a kind of unit."""
    by_proxies = None
    if any(kind.circles(push=push) is None for push in (False, True)):
        by_proxies = circles_by_proxies(kind, exchange, proxies)
    return set(kind.groups) | {circle.members for circle in by_proxies or ()}


def circles_by_proxies(
    kind: UnitKind, exchange: ExchangeKind, proxies: ProxyTable
) -> tuple[Circle, ...] | None:
    """Return the circles of holders, with proxies as owners, if a kind uses proxies; else None."""
    if not are_by_proxies(exchange, len(kind.members)):  # A row has no more holders than these.
        return None
    among = proxies.among(kind)
    circles = None if among is None else among.circles(push=False)
    if circles is None or not are_by_proxies(exchange, min(len(i.members) for i in circles)):
        return None
    return circles
