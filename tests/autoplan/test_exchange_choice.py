"""Gradients are summed on nodes where the simulator says that it pays, and nowhere else."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lightning_hetero import ParallelPlan
from lightning_hetero.autoplan import engine_choices
from lightning_hetero.autoplan.engine_choices import with_exchange
from lightning_hetero.autoplan.facts import RunPlans
from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.core.transfers import ExchangeKind
from lightning_hetero.runtime.exchange.by_node import Relays
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.setup.detect import Seat
from lightning_hetero.simulator.links import ClusterLinks, push_by_node_s, push_straight_s

SPECS = tuple(
    ParameterSpec(name=f"layers.{index}.weight", shape=(4096, 4096), layer=index)
    for index in range(4)
)


def chosen(
    counts: tuple[int, ...],
    *,
    backend: str = "nccl",
    kind: ExchangeKind = ExchangeKind.AUTO,
    redundancy: int = 0,
    inter_node_bytes_per_s: float = 25e9,
) -> EngineConfig:
    """Return the options of a data-parallel run on nodes with as many devices."""
    device, world_size = KNOWN_DEVICES["A100-80GB"], sum(counts)
    nodes = [f"node {index}" for index, count in enumerate(counts) for _ in range(count)]
    facts: Any = SimpleNamespace(
        comms=SimpleNamespace(exchange=object(), world_size=world_size),
        redundancy=redundancy,
        compute_bytes=2,
        detect_seats=lambda: [
            Seat(host=node, node=node, device=device, base=device.name, is_cpu=False)
            for node in nodes
        ],
    )
    plan = ParallelPlan.even(world_size=world_size, num_layers=len(SPECS))
    cluster = Cluster(
        nodes=tuple(Node(device=device.name, count=count) for count in counts),
        inter_node_bytes_per_s=inter_node_bytes_per_s,
    )
    auto: Any = SimpleNamespace(basis=SimpleNamespace(cluster=cluster))
    plans = RunPlans(first=plan, candidates=(plan,), auto=auto)
    with (
        mock.patch.object(engine_choices.dist, "get_backend", return_value=backend),
        mock.patch.object(engine_choices, "check_alike"),
    ):
        return with_exchange(EngineConfig(exchange=kind), facts, plans, SPECS)


def test_it_is_chosen_where_links_between_nodes_are_slow_and_nodes_hold_a_unit_several_times():
    found = chosen((8, 8, 4))
    assert found.exchange is ExchangeKind.BY_NODE
    assert found.node_of_rank == (0,) * 8 + (1,) * 8 + (2,) * 4
    assert chosen((1,) * 8).exchange is ExchangeKind.AUTO
    assert chosen((8,)).exchange is ExchangeKind.AUTO
    assert chosen((2, 2), inter_node_bytes_per_s=300e9).exchange is ExchangeKind.AUTO
    assert chosen((8, 8), backend="gloo").exchange is ExchangeKind.AUTO
    assert chosen((8, 8), redundancy=1).exchange is ExchangeKind.AUTO
    for kind in (ExchangeKind.MESSAGES, ExchangeKind.COLLECTIVES, ExchangeKind.REDUCE_SCATTER):
        assert chosen((8, 8), kind=kind).exchange is kind
    told = chosen((8, 8), backend="gloo", kind=ExchangeKind.BY_NODE)
    assert told.exchange is ExchangeKind.BY_NODE
    assert len(told.node_of_rank) == 16


@pytest.mark.parametrize("counts", [(8, 8, 8), (4, 2), (3, 1, 2)])
def test_simulated_seconds_are_those_of_the_bytes_that_relays_move(counts: tuple[int, ...]):
    inside_s, between_s = 1 / 100e9, 1 / 10e9
    cluster = Cluster(
        nodes=tuple(Node(device="A100-80GB", count=count) for count in counts),
        inter_node_bytes_per_s=1 / between_s,
        inter_node_latency_s=0.0,
        intra_node_latency_s=0.0,
        links=tuple(
            Link(nodes=(node, node), bytes_per_s=1 / inside_s) for node in range(len(counts))
        ),
    )
    links = ClusterLinks(cluster)
    nodes, num_ranks, num_bytes, width = links.node_of_rank, sum(counts), 1e9, 2.0
    relays = [Relays.of(nodes, own) for own in range(num_ranks)]
    near_s, far_s, straight_s = [], [], []
    for own, item in enumerate(relays):
        assert item is not None
        assert sorted(item.order) == list(range(num_ranks))
        assert sum(item.counts) == num_ranks
        assert item.sends[own] == item.receives[own] == 1
        assert sum(item.receives) == len(counts)
        assert item.receives == tuple(relays[peer].sends[own] for peer in range(num_ranks))
        piece = num_bytes / num_ranks
        given = sum(item.counts) - item.counts[item.on_node.index(own)]
        near_s.append(given * piece * inside_s)
        far = sum(rows for peer, rows in enumerate(item.sends) if nodes[peer] != nodes[own])
        far_s.append(far * piece * width * between_s)
        num_near = nodes.count(nodes[own])
        straight_s.append(piece * ((num_near - 1) * inside_s + (num_ranks - num_near) * between_s))
    ranks = range(num_ranks)
    assert push_straight_s(links, ranks, num_bytes) == pytest.approx(max(straight_s))
    simulated_s = push_by_node_s(links, ranks, num_bytes, width=width)
    # Of other nodes' numbers that this one's doesn't divide, relays have one owner more or less.
    assert max(near_s) + max(far_s) <= simulated_s * 1.35
    assert simulated_s <= (max(near_s) + max(far_s)) * 1.35
    if len(set(counts)) == 1:
        assert simulated_s == pytest.approx(max(near_s) + max(far_s))
