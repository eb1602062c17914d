"""Decide which rank owns which slice of each parameter: apply a rule of `Ownership` to a plan.

With redundancy each rank has a *standby*, another rank that keeps a copy of all its slices. If both
own rows of a parameter, these are adjacent, so that each rank keeps one interval if the number of
ranks is even.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import ConfigurationError, ModelError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.holders import Holders, Holding, PlanHolders
from lightning_hetero.exchange.owner_shares import OwnedUnit, spread_ownership
from lightning_hetero.exchange.slices import Interval, Ownership, ParameterSpec, Slice


def assign_owners(
    specs: Sequence[ParameterSpec],
    plan: ParallelPlan,
    *,
    world_size: int,
    ownership: Ownership,
    standbys: Sequence[int] = (),
) -> dict[str, tuple[Slice, ...]]:
    """Cut every parameter into contiguous slices that cover it once, one for each owner.

    The caller has resolved AUTO.

    Returns:
        For each parameter its slices in ascending order, empty ones left out.

    Raises:
        ConfigurationError: The rule is MEMORY, and the plan has no `owner_shares`.
        ModelError: No stage uses a parameter, and the rule isn't EVEN.
    """
    if ownership is Ownership.PARAMETER:
        return _stood_by(_own_whole_parameters(specs, plan, world_size), standbys)
    if ownership is Ownership.MEMORY:
        if plan.owner_shares is None:
            raise ConfigurationError(
                "Ownership 'memory' needs a plan that says how much each rank owns (owner_shares)."
            )
        return _stood_by(_own_by_room(specs, plan, plan.owner_shares, standbys), standbys)
    # Parameters that are cut alike share one tuple, so that tuples can be compared by identity.
    known: dict[Hashable, tuple[Slice, ...]] = {}
    slices: dict[str, tuple[Slice, ...]] = {}
    holders = PlanHolders(plan)
    for spec in specs:
        is_even = ownership is Ownership.EVEN
        found = None if is_even else _holders(spec, holders)
        key = found or spec.cut_length
        if key not in known:
            claims = [(rank, 1.0) for rank in range(world_size)]
            if found is not None:
                claims = _claims_of(found.holdings)
            known[key] = tuple(_cut(spec.cut_length, _chained(claims, standbys)))
        slices[spec.name] = known[key]
    return _stood_by(slices, standbys)


def _claims_of(holdings: Sequence[Holding]) -> list[tuple[int, float]]:
    """Return (rank, share), ordered such that each owner's slice is within the rows it holds.

    Every pipeline claims the same share, divided among the ranks that hold it. Sorting by the
    middle of the held rows puts the single holder of a pipeline with TP degree 1 between the two of
    a pipeline with degree 2, so that its slice overlaps their shards as little as possible.
    """
    members = Counter(holding.pipeline_index for holding in holdings)

    def middle(holding: Holding) -> tuple[float, int]:
        rows = [start + stop for start, stop in holding.pushes]
        return sum(rows) / len(rows), holding.global_rank

    return [
        (holding.global_rank, 1.0 / members[holding.pipeline_index])
        for holding in sorted(holdings, key=middle)
    ]


def find_standbys(
    nodes: Sequence[Hashable], kinds: Sequence[Hashable] | None = None
) -> tuple[int, ...]:
    """Return the standby of each rank, on another node if there is one; empty for a single rank.

    `find_standbys(["a", "a", "b", "b"])` is (2, 3, 0, 1). Ranks with the same kind of device are
    standbys for each other if they are on several nodes, since they have the same memory and round
    in the same way. All other ranks are standbys for each other, too, or, if they are all on one
    node, ranks of other nodes are their standbys in turn.
    """
    num_ranks = len(nodes)
    if num_ranks < 2:
        return ()
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for rank in range(num_ranks):
        groups[None if kinds is None else kinds[rank]].append(rank)
    turns: dict[int, int] = {}
    left: list[int] = []
    for ranks in groups.values():
        if len({nodes[rank] for rank in ranks}) > 1:
            turns |= _half_a_row_away(ranks, nodes)
        else:
            left += ranks
    others = [rank for rank in turns if left and nodes[rank] != nodes[left[0]]]
    if others and len({nodes[rank] for rank in left}) == 1:
        turns |= {rank: others[index % len(others)] for index, rank in enumerate(left)}
    elif left:
        turns |= _half_a_row_away(left, nodes)
    return tuple(turns[rank] for rank in range(num_ranks))


def _half_a_row_away(ranks: Sequence[int], nodes: Sequence[Hashable]) -> dict[int, int]:
    """Return {rank: standby} for some ranks: the rank half the list further on, by node.

    So each rank is standby for one other; if their number is even, ranks form pairs. If a node has
    more than half of the ranks, the others are standbys for its ranks in turn, and its ranks for
    them.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank in ranks:
        members[nodes[rank]].append(rank)
    largest = max(members.values(), key=len)
    row = [rank for own in members.values() for rank in own]
    others = [rank for rank in row if rank not in largest]
    if others and len(largest) > len(others):
        turns = {rank: others[index % len(others)] for index, rank in enumerate(largest)}
        return turns | {rank: largest[index % len(largest)] for index, rank in enumerate(others)}
    return {rank: row[(index + len(row) // 2) % len(row)] for index, rank in enumerate(row)}


@dataclass(frozen=True, kw_only=True)
class ServedRows:
    """The slices that are available after a loss of ranks."""

    slices: dict[str, tuple[Slice, ...]]
    """The rows that any remaining rank keeps; here `owner` is the rank that serves them."""
    missing: dict[str, tuple[Interval, ...]]
    """By parameter, the rows whose owner and standby are both lost; only parameters with any."""


def serve_without(slices: Mapping[str, tuple[Slice, ...]], lost: Collection[int]) -> ServedRows:
    """Return which rank serves which rows after a loss: a slice's owner, or else its standby.

    Ranks keep their numbers. A slice whose owner or standby is lost has no standby any more.

    ::

        served = serve_without(store.slices, lost={3})
        if not served.missing:
            ...  # The remaining ranks have all rows.
    """
    left: dict[str, tuple[Slice, ...]] = {}
    missing: dict[str, tuple[Interval, ...]] = {}
    for names, items in list_owners(slices):
        kept = {item: [rank for rank in item.ranks if rank not in lost] for item in items}
        served = tuple(
            Slice(ranks[0], item.start, item.stop, ranks[1] if len(ranks) > 1 else None)
            for item, ranks in kept.items()
            if ranks
        )
        gone = tuple((item.start, item.stop) for item, ranks in kept.items() if not ranks)
        left |= dict.fromkeys(names, served)
        missing |= dict.fromkeys(names, gone) if gone else {}
    return ServedRows(slices=left, missing=missing)


def list_owners(
    slices: Mapping[str, tuple[Slice, ...]],
) -> list[tuple[tuple[str, ...], tuple[Slice, ...]]]:
    """Return (names of parameters, their slices); slices that are one object are listed once."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, items in slices.items():
        names[id(items)].append(name)
    return [(tuple(found), slices[found[0]]) for found in names.values()]


def _holders(spec: ParameterSpec, plan: PlanHolders) -> Holders:
    holders = plan.of(spec)
    if not holders.holdings:
        raise ModelError(
            f"Parameter {spec.name} (layer {spec.layer}, roles {sorted(spec.roles)}) is used by no "
            f"stage of a plan of {plan.num_layers} layers, so no holder can own it. Give it a "
            "layer of the plan or a role."
        )
    return holders


def _chained(
    claims: Sequence[tuple[int, float]], standbys: Sequence[int]
) -> list[tuple[int, float]]:
    """Return claims in an order in which each rank's is followed by its standby's, if any."""
    if not standbys:
        return list(claims)
    shares, order = dict(claims), []
    for first, _ in claims:
        rank = first
        while rank in shares:
            order.append((rank, shares.pop(rank)))
            rank = standbys[rank]
    return order


def _stood_by(
    slices: Mapping[str, tuple[Slice, ...]], standbys: Sequence[int]
) -> dict[str, tuple[Slice, ...]]:
    """Return the slices with their standbys; tuples that are one object stay one."""
    if not standbys:
        return dict(slices)
    found: dict[str, tuple[Slice, ...]] = {}
    for names, items in list_owners(slices):
        both = tuple(replace(item, standby=standbys[item.owner]) for item in items)
        found |= dict.fromkeys(names, both)
    return {name: found[name] for name in slices}


def _cut(length: int, claims: Sequence[tuple[int, float]]) -> Iterator[Slice]:
    total = sum(claim for _, claim in claims)
    claimed, start = 0.0, 0
    for index, (rank, claim) in enumerate(claims):
        claimed += claim
        stop = length if index == len(claims) - 1 else round(length * claimed / total)
        if stop > start:
            yield Slice(rank, start, stop)
            start = stop


def _own_by_room(
    specs: Sequence[ParameterSpec],
    plan: ParallelPlan,
    share: Sequence[float],
    standbys: Sequence[int],
) -> dict[str, tuple[Slice, ...]]:
    """Give each rank its share of all parameters, as far as possible in rows that it holds."""
    holders = PlanHolders(plan)
    found = {spec.name: _holders(spec, holders) for spec in specs}
    sizes: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for spec in specs:
        sizes[_ranks_by_pipeline(found[spec.name])] += spec.numel
    units = [OwnedUnit(size=max(size, 1), holders=ranks) for ranks, size in sizes.items()]
    owned = dict(zip(sizes, spread_ownership(units, share), strict=True))
    known: dict[Holders, tuple[Slice, ...]] = {}
    for spec in specs:
        item = found[spec.name]
        if item not in known:
            claims = dict(owned[_ranks_by_pipeline(item)])
            first = [(rank, claims.pop(rank, 0.0)) for rank, _ in _claims_of(item.holdings)]
            chained = _chained((*first, *claims.items()), standbys)
            known[item] = tuple(_cut(spec.cut_length, chained))
    return {spec.name: known[found[spec.name]] for spec in specs}


def _ranks_by_pipeline(holders: Holders) -> tuple[tuple[int, ...], ...]:
    ranks: dict[int, list[int]] = {}
    for holding in holders.holdings:
        ranks.setdefault(holding.pipeline_index, []).append(holding.global_rank)
    return tuple(map(tuple, ranks.values()))


def _own_whole_parameters(
    specs: Sequence[ParameterSpec], plan: ParallelPlan, world_size: int
) -> dict[str, tuple[Slice, ...]]:
    """Give each parameter, largest first, to the holder with the least load."""
    loads = np.zeros(world_size)
    able = dict[Holders, IntArray]()
    slices: dict[str, tuple[Slice, ...]] = {}
    holders = PlanHolders(plan)
    for spec in sorted(specs, key=lambda item: (-item.numel, item.name)):
        found = _holders(spec, holders)
        if found not in able:
            able[found] = np.array(sorted(found.by_rank))
        # The first of equals is the lowest rank.
        owner = int(able[found][loads[able[found]].argmin()])
        loads[owner] += spec.numel
        slices[spec.name] = (Slice(owner, 0, spec.cut_length),)
    return {spec.name: slices[spec.name] for spec in specs}
