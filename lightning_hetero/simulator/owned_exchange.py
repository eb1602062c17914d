"""How long units are pulled and pushed where ranks own by their room, not by what they hold.

With f_q the share of a unit that rank q owns (`spread_ownership`), a holder of a shard S pushes
S - own to the owners and each owner receives its f_q of the unit from every pipeline but its own;
pulls go the same ways back. A unit takes as long as the slower of its holder and its owners. What a
rank owns of units that it doesn't hold it receives on top of its own stage's.
"""

from collections import Counter
from collections.abc import Sequence

from typing_extensions import override

from lightning_hetero.core.ownership import OwnedUnit, spread_ownership
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.exchange import ExchangeTable, Holders, Segment, cut_segments

__all__ = ["exchange_of", "host_bytes", "moved_params"]


def exchange_of(
    plan: ParallelPlan, kinds: Sequence[Sequence[int]], cost: CostModel
) -> ExchangeTable:
    """Return the table of a plan's pulls and pushes, whoever owns.

    Args:
        plan: The plan.
        kinds: Pipelines that run alike; each by itself where the plan says who owns how much.
        cost: What sending costs.
    """
    if plan.owner_shares is None or not cost.layout.sharded:
        every = [[plan.pipelines[index] for index in members] for members in kinds]
        return ExchangeTable([Holders.of(pipelines) for pipelines in every], cost)
    return _OwnedExchange(plan, cost)


def host_bytes(plan: ParallelPlan, cost: CostModel) -> tuple[float, ...]:
    """Return the bytes of masters, states and summed gradients on its host, by global rank."""
    found = [0.0] * len(cost.node_of_rank)
    layout = cost.layout
    for _, _, stage in plan.iter_stages():
        for rank in stage.ranks:
            if layout.host_owned or rank in plan.host_owners:
                found[rank] = cost.owned_params(plan, stage) * layout.kept_bytes
    return tuple(found)


def moved_params(plan: ParallelPlan, cost: CostModel) -> float:
    """Return the parameters that travel between holders and owners in a push of the whole plan."""
    layers = [[len(stage.layers) for stage in pipeline.stages] for pipeline in plan.pipelines]
    segments = cut_segments(layers, cost.model)
    if plan.owner_shares is None:
        return sum(s.num_units * s.params_per_unit for s in segments) * (plan.num_pipelines - 1)
    units = _units(plan, segments)
    owned = spread_ownership(units, plan.owner_shares)
    return sum(
        unit.size * (1.0 - _own_part(shares, ranks))
        for unit, shares in zip(units, owned, strict=True)
        for ranks in unit.holders
    )


def _units(plan: ParallelPlan, segments: Sequence[Segment]) -> list[OwnedUnit]:
    return [
        OwnedUnit(
            size=max(1.0, float(segment.num_units * segment.params_per_unit)),
            holders=tuple(
                pipeline.stages[stage].ranks
                for pipeline, stage in zip(plan.pipelines, segment.stages, strict=True)
            ),
        )
        for segment in segments
    ]


def _own_part(owned: dict[int, float], ranks: Sequence[int]) -> float:
    """Return which share of a pipeline's copy its own holders own."""
    return sum(owned.get(rank, 0.0) for rank in ranks)


class _OwnedExchange(ExchangeTable):
    """Seconds of pull and push of a plan whose ranks own by their room."""

    def __init__(self, plan: ParallelPlan, cost: CostModel) -> None:
        self._plan = plan
        super().__init__([Holders.of([pipeline]) for pipeline in plan.pipelines], cost)

    @override
    def _fill(self) -> None:
        plan, cost = self._plan, self._cost
        assert plan.owner_shares is not None
        self._units = _units(plan, self.segments)
        self._owned = spread_ownership(self._units, plan.owner_shares)
        for segment, unit, owned in zip(self.segments, self._units, self._owned, strict=True):
            params = float(segment.params_per_unit)
            on_nodes = _OnNodes(unit, owned, cost)
            pairs = [self._seconds(ranks, on_nodes, params) for ranks in unit.holders]
            push, pull = cost.layout.pushed_bytes, cost.layout.weight_bytes
            self.push_s.append([late + push * rate for late, rate in pairs])
            self.pull_s.append([late + pull * rate for late, rate in pairs])

    def push_end_s(
        self,
        end_s: Sequence[Sequence[float]],
        last_backward_s: Sequence[Sequence[float]],
        has_work: Sequence[bool],
    ) -> list[list[float]]:
        """Return when each stage has sent and received all gradients, as [pipeline][stage].

        What ranks without a place receive, all wait for.
        """
        ends = super().push_end_s(end_s, last_backward_s, has_work)
        foreign, idle = self._foreign_s()
        last = max(map(max, end_s)) + idle
        return [
            [max(end + more, last) for end, more in zip(*rows, strict=True)]
            for rows in zip(ends, foreign, strict=True)
        ]

    def _foreign_s(self) -> tuple[list[list[float]], float]:
        """Return the seconds in which stages, and idle ranks, receive what they don't hold."""
        found = [[0.0] * pipeline.num_stages for pipeline in self._plan.pipelines]
        seconds: dict[int, float] = {}
        for unit, owned in zip(self._units, self._owned, strict=True):
            holding = {rank for ranks in unit.holders for rank in ranks}
            for rank, share in owned.items():
                if rank not in holding:
                    rate = sum(1.0 / self._cost.link(ranks[0], rank)[0] for ranks in unit.holders)
                    size = share * unit.size * self._cost.layout.pushed_bytes
                    seconds[rank] = seconds.get(rank, 0.0) + size * rate
        idle = 0.0
        for rank, value in seconds.items():
            place = self._plan.place(rank)
            if place is None:
                idle = max(idle, value)
            else:
                row = found[place.pipeline_index]
                row[place.stage_index] = max(row[place.stage_index], value)
        return found, idle

    def _seconds(
        self, ranks: Sequence[int], on_nodes: "_OnNodes", params: float
    ) -> tuple[float, float]:
        """Return latency, and seconds for each byte of a value, of one unit on one pipeline."""
        cost, owned, holder = self._cost, on_nodes.owned, ranks[0]
        here = cost.node_of_rank[holder]
        shares, owners = dict(on_nodes.shares), Counter(on_nodes.owners)
        for rank in ranks:
            if rank in owned:
                shares[cost.node_of_rank[rank]] -= owned[rank]
                owners[cost.node_of_rank[rank]] -= 1
        others = {node: max(0.0, shares[node]) for node, count in owners.items() if count}
        total = sum(others.values())
        sent_s = late = 0.0
        if total:
            leaving = params * max(0.0, 1.0 - _own_part(owned, ranks)) / len(ranks)
            for node, share in others.items():
                bytes_per_s, latency_s = cost.link(holder, on_nodes.rank_on[node])
                sent_s += leaving * share / total / bytes_per_s
                late = max(late, latency_s)
        received_s = 0.0
        if mine := params * owned.get(holder, 0.0):
            for node, count in on_nodes.holders.items():
                if number := count - (node == here):
                    bytes_per_s, latency_s = cost.link(on_nodes.rank_on[node], holder)
                    received_s += number * mine / bytes_per_s
                    late = max(late, latency_s)
        return late, max(sent_s, received_s)


class _OnNodes:
    """Who owns and who holds a unit, by node: links between the same nodes are alike."""

    def __init__(self, unit: OwnedUnit, owned: dict[int, float], cost: CostModel) -> None:
        node_of = cost.node_of_rank
        self.owned = owned
        self.shares: dict[int, float] = {}
        for rank, share in owned.items():
            self.shares[node_of[rank]] = self.shares.get(node_of[rank], 0.0) + share
        self.owners = Counter(node_of[rank] for rank in owned)
        """Ranks that own."""
        self.holders = Counter(node_of[ranks[0]] for ranks in unit.holders)
        """Pipelines whose first holder is there."""
        self.rank_on = {node_of[ranks[0]]: ranks[0] for ranks in unit.holders}
        self.rank_on |= {node_of[rank]: rank for rank in owned}
