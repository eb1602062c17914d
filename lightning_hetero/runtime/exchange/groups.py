"""Decide which sets of ranks need a communicator to pull and push, and when they use it."""

from collections import defaultdict
from collections.abc import Sequence

from lightning_hetero.core.proxies import ProxyTable, are_by_proxies
from lightning_hetero.core.transfers import Circle, ExchangeKind, UnitKind

__all__ = [
    "MOST_BY_MESSAGES",
    "are_collective",
    "circles_by_proxies",
    "groups_on_nodes",
    "groups_wanted",
]

MOST_BY_MESSAGES = 8
"""Most ranks of a unit that use messages on gloo, unless the kind of exchange is named."""


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


def are_collective(kind: ExchangeKind, backend: str, num_members: int) -> bool:
    """Return whether units of `num_members` ranks use a collective, if there is a group for it."""
    if num_members == 1 or kind is ExchangeKind.MESSAGES:
        return False
    return kind is not ExchangeKind.AUTO or backend != "gloo" or num_members > MOST_BY_MESSAGES


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
