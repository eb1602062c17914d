"""Time pulls and pushes of units if ranks own by their room, not by what they hold.

With f_q the share of a unit that rank q owns (`spread_ownership`), a holder of a shard S pushes
S - own to the owners and each owner receives its f_q of the unit from every pipeline but its own;
pulls go the same way back. A unit takes as long as the slower of its holder and its owners. What a
rank owns of units that it doesn't hold, it receives in addition to its own stage's. A unit that is
owned by its holders in about equal parts is gathered, if it is, as if these were equal.

By proxies (`core.proxies`), with D pipelines, a unit takes as long as if its holders owned equal
parts, and then as long as a proxy needs to send S / D of sums to owners, or an owner to receive its
f_q once. Both leave out what stays on a rank, as if each proxy had rows of every owner.
"""

from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np
from typing_extensions import override

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.ownership import OwnedUnit, spread_ownership
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.proxies import are_by_proxies
from lightning_hetero.core.transfers import MOST_PADDING, are_collective
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.exchange import (
    SUM_BYTES,
    ExchangeTable,
    Holders,
    Segment,
    cut_segments,
)

__all__ = ["exchange_of", "host_bytes", "moved_params"]

_MOST_CELLS = 1_000_000
"""Holders x nodes that are computed at once."""


def exchange_of(
    plan: ParallelPlan, kinds: Sequence[Sequence[int]], cost: CostModel
) -> ExchangeTable:
    """Return the table of a plan's pulls and pushes, with or without owner shares.

    Args:
        plan: The plan.
        kinds: Groups of pipelines that run alike; of one each if the plan has owner shares.
        cost: Times and bytes.
    """
    if plan.owner_shares is None or not cost.layout.sharded:
        every = [[plan.pipelines[index] for index in members] for members in kinds]
        return ExchangeTable([Holders.of(pipelines) for pipelines in every], cost)
    return _OwnedExchange(plan, cost)


def host_bytes(plan: ParallelPlan, cost: CostModel) -> tuple[float, ...]:
    """Return each global rank's bytes of masters, states and summed gradients on its host."""
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
    """Return the share of a unit that its holders in one pipeline own."""
    return sum(owned.get(rank, 0.0) for rank in ranks)


def _are_alike(unit: OwnedUnit, owned: dict[int, float]) -> bool:
    """Return whether a unit's holders own it, in parts that are about equal."""
    holders = {rank for ranks in unit.holders for rank in ranks}
    return owned.keys() <= holders and max(owned.values()) * len(holders) <= 1 + MOST_PADDING


class _OwnedExchange(ExchangeTable):
    """Seconds of pull and push of a plan whose ranks own by their room."""

    def __init__(self, plan: ParallelPlan, cost: CostModel) -> None:
        self._plan = plan
        self._rates: dict[int, tuple[FloatArray, FloatArray]] = {}
        super().__init__([Holders.of([pipeline]) for pipeline in plan.pipelines], cost)

    @override
    def _fill(self) -> None:
        plan, cost = self._plan, self._cost
        assert plan.owner_shares is not None
        self._units = _units(plan, self.segments)
        owned = spread_ownership(self._units, plan.owner_shares)
        self._on_nodes = [_OnNodes(*pair, cost) for pair in zip(self._units, owned, strict=True)]
        are_alike = [_are_alike(*pair) for pair in zip(self._units, owned, strict=True)]
        pairs_of_units = zip(owned, are_alike, self._are_circles, strict=True)
        self._by_proxies = [
            is_circle and not is_alike and self._are_by_proxies(shares)
            for shares, is_alike, is_circle in pairs_of_units
        ]
        if any(self._by_proxies) or any(are_alike):
            super()._fill()
        alike = list(zip(self.push_s, self.pull_s, strict=True))
        self.push_s, self.pull_s = [], []
        layout = cost.layout
        for index, pairs in enumerate(self._holder_s()):
            if self._by_proxies[index]:
                push, (push_before, pull_before) = SUM_BYTES * layout.num_keepers, alike[index]
            else:
                push, push_before = layout.pushed_bytes, [0.0] * len(pairs)
                pull_before = push_before
            self.push_s.append(_after(push_before, pairs, push))
            if are_alike[index] and self._are_gathered[index]:
                self.pull_s.append(alike[index][1])
            else:
                self.pull_s.append(_after(pull_before, pairs, layout.weight_bytes))

    def _holder_s(self) -> list[list[tuple[float, float]]]:
        """Return latency, and seconds for each byte of a value, as [unit][pipeline]."""
        known: dict[tuple[int, Hashable], tuple[float, float]] = {}
        direct: dict[tuple[int, Hashable], tuple[Sequence[int], _OnNodes, float]] = {}
        keys: list[list[tuple[int, Hashable]]] = []
        for index, (segment, unit, on_nodes) in enumerate(
            zip(self.segments, self._units, self._on_nodes, strict=True)
        ):
            # Holders on the same nodes that own equally much take equally long.
            keys.append([(index, on_nodes.kind(ranks)) for ranks in unit.holders])
            params = float(segment.params_per_unit)
            for key, ranks in dict(zip(keys[-1], unit.holders, strict=True)).items():
                if self._by_proxies[index]:
                    known[key] = self._proxy_s(ranks, on_nodes, params)
                else:
                    direct[key] = ranks, on_nodes, params
        every = [*direct.values()]
        most = max(1, _MOST_CELLS // len(self._cost.cluster.nodes))
        parts = [self._direct_s(every[i : i + most]) for i in range(0, len(every), most)]
        known |= zip(direct, chain.from_iterable(parts), strict=True)
        return [[known[key] for key in row] for row in keys]

    def _are_by_proxies(self, owned: dict[int, float]) -> bool:
        """Whether a unit whose holders are a circle but own unequal parts goes by proxies.

        It does if no owner meets most proxies, judged by shares: an owner of a share f meets those
        of f·D pieces and one more.
        """
        kind, num_pipelines = self._cost.layout.exchange, self._plan.num_pipelines
        is_spread = 2 * (max(owned.values()) * num_pipelines + 1) <= num_pipelines
        return (
            is_spread
            and are_by_proxies(kind, num_pipelines)
            and are_collective(kind, self._cost.cluster.backend, num_pipelines)
        )

    def _proxy_s(
        self, ranks: Sequence[int], on_nodes: "_OnNodes", params: float
    ) -> tuple[float, float]:
        """Return latency, and seconds for each byte of a value, between proxies and owners."""
        node, num_pipelines = self._cost.node_of_rank[ranks[0]], self._plan.num_pipelines
        per_byte_s, latency_s = self._rates_from(node)
        own, is_here = on_nodes.owned.get(ranks[0], 0.0), np.arange(len(per_byte_s)) == node
        shares, holders = on_nodes.shares - own * is_here, on_nodes.holders - is_here
        owners = on_nodes.owners - (own > 0) * is_here
        sent_s = params / len(ranks) / num_pipelines * float(shares @ per_byte_s)
        received_s = params * own / num_pipelines * float(holders @ per_byte_s)
        late_s = np.where((owners > 0) | (holders > 0), latency_s, 0.0).max()
        return float(late_s), max(sent_s, received_s)

    def push_end_s(
        self,
        end_s: Sequence[Sequence[float]],
        last_backward_s: Sequence[Sequence[float]],
        has_work: Sequence[bool],
    ) -> list[list[float]]:
        """Return when each stage has sent and received all gradients, as [pipeline][stage].

        All stages wait until ranks without layers have received what they own.
        """
        ends = super().push_end_s(end_s, last_backward_s, has_work)
        foreign, idle = self._foreign_s()
        last = max(map(max, end_s)) + idle
        return [
            [max(end + more, last) for end, more in zip(*rows, strict=True)]
            for rows in zip(ends, foreign, strict=True)
        ]

    def _foreign_s(self) -> tuple[list[list[float]], float]:
        """Return seconds in which stages, and idle ranks, receive what they own but don't hold."""
        found = [[0.0] * pipeline.num_stages for pipeline in self._plan.pipelines]
        seconds: dict[int, float] = {}
        layout, num_pipelines = self._cost.layout, self._plan.num_pipelines
        for unit, on_nodes, by_proxies in zip(
            self._units, self._on_nodes, self._by_proxies, strict=True
        ):
            # Proxies send every row once, as a sum, instead of once for each pipeline.
            size_bytes = (
                SUM_BYTES * layout.num_keepers / num_pipelines
                if by_proxies
                else layout.pushed_bytes
            )
            holding = {rank for ranks in unit.holders for rank in ranks}
            for rank, share in on_nodes.owned.items():
                if rank not in holding:
                    per_byte_s, _ = self._rates_from(self._cost.node_of_rank[rank])
                    size = share * unit.size * size_bytes
                    more_s = size * float(on_nodes.holders @ per_byte_s)
                    seconds[rank] = seconds.get(rank, 0.0) + more_s
        idle = 0.0
        for rank, value in seconds.items():
            place = self._plan.place(rank)
            if place is None:
                idle = max(idle, value)
            else:
                row = found[place.pipeline_index]
                row[place.stage_index] = max(row[place.stage_index], value)
        return found, idle

    def _direct_s(
        self, every: Sequence[tuple[Sequence[int], "_OnNodes", float]]
    ) -> list[tuple[float, float]]:
        """Return latency, and seconds for each byte of a value, between holders and owners.

        `every` are a pipeline's holders of a unit, where it is, and its parameters.
        """
        node_of = self._cost.node_of_rank
        rates = [self._rates_from(node_of[ranks[0]]) for ranks, _, _ in every]
        per_byte_s, latency_s = np.array([r[0] for r in rates]), np.array([r[1] for r in rates])
        shares, owners, holders = (
            np.array([getattr(on_nodes, name) for _, on_nodes, _ in every])
            for name in ("shares", "owners", "holders")
        )
        leaving, mine = np.zeros((2, len(every)))
        for row, (ranks, on_nodes, params) in enumerate(every):
            owned = on_nodes.owned
            for rank in ranks:
                if rank in owned:
                    shares[row, node_of[rank]] -= owned[rank]
                    owners[row, node_of[rank]] -= 1
            holders[row, node_of[ranks[0]]] -= 1
            leaving[row] = params * max(0.0, 1.0 - _own_part(owned, ranks)) / len(ranks)
            mine[row] = params * owned.get(ranks[0], 0.0)
        others = np.where(owners > 0, np.maximum(shares, 0.0), 0.0)
        total = others.sum(axis=1)
        is_sending, is_receiving = total > 0, mine > 0
        sent_s = leaving * (others * per_byte_s).sum(axis=1) / np.where(is_sending, total, 1.0)
        received_s = mine * (holders * per_byte_s).sum(axis=1)
        met = ((owners > 0) & is_sending[:, None]) | ((holders > 0) & is_receiving[:, None])
        late_s = np.where(met, latency_s, 0.0).max(axis=1)
        return list(zip(late_s.tolist(), np.maximum(sent_s, received_s).tolist(), strict=True))

    def _rates_from(self, node: int) -> tuple[FloatArray, FloatArray]:
        """Return seconds per byte, and of latency, of messages between a node and every node."""
        if node not in self._rates:
            cluster, special = self._cost.cluster, self._cost.special_links
            links = np.empty((2, len(cluster.nodes)))
            links.T[:] = 1 / cluster.inter_node_bytes_per_s, cluster.inter_node_latency_s
            for other in {node, *(other for pair in special if node in pair for other in pair)}:
                bytes_per_s, latency_s = cluster.link_between(node, other)
                links[:, other] = 1 / bytes_per_s, latency_s
            self._rates[node] = links[0], links[1]
        return self._rates[node]


def _after(
    before_s: Sequence[float], pairs: Sequence[tuple[float, float]], num_bytes: int
) -> list[float]:
    """Return start + latency + `num_bytes` × seconds, by (latency, seconds for each byte)."""
    items = zip(before_s, pairs, strict=True)
    return [start + late + num_bytes * rate for start, (late, rate) in items]


class _OnNodes:
    """Owners and holders of a unit, counted by node: links between the same nodes are equal."""

    def __init__(self, unit: OwnedUnit, owned: dict[int, float], cost: CostModel) -> None:
        node_of, num_nodes = cost.node_of_rank, len(cost.cluster.nodes)
        self.owned = owned
        self._node_of = node_of
        owner_nodes = [node_of[rank] for rank in owned]
        self.shares = np.bincount(owner_nodes, list(owned.values()), num_nodes)
        """Share of the unit that each node's ranks own."""
        self.owners = np.bincount(owner_nodes, minlength=num_nodes)
        """Number of each node's ranks that own a part."""
        self.holders = np.bincount(
            [node_of[ranks[0]] for ranks in unit.holders], minlength=num_nodes
        )
        """Number of pipelines whose first holder is on each node."""

    def kind(self, ranks: Sequence[int]) -> tuple[tuple[int, float | None], ...]:
        """Return the node of each rank and what it owns."""
        return tuple([(self._node_of[rank], self.owned.get(rank)) for rank in ranks])
