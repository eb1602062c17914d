"""Owners follow room, gradients travel as the simulator says, and what has no room is refused."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.autoplan import engine_choices
from lightning_hetero.autoplan.engine_choices import (
    check_room_for_states,
    find_standbys_of_run,
    state_memory,
    with_exchange,
    with_owner_shares,
)
from lightning_hetero.autoplan.facts import NUM_STATES, BatchSizes, RunFacts, RunPlans
from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.holders import PlanHolders
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec
from lightning_hetero.exchange.transfers import ExchangeKind
from lightning_hetero.models import HeteroLM, LMConfig
from lightning_hetero.runtime.exchange.by_node import relays_of
from lightning_hetero.runtime.iteration.config import EngineConfig, OwnedDevice
from lightning_hetero.runtime.setup.detect import Seat
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.simulator.links import ClusterLinks, push_by_node_s, push_straight_s
from tests.core.sample_plans import random_plan, small_model
from tests.plans import pipeline, plan_of, stage

FIRST, LATER = (
    ParallelPlan.from_dict(
        plan_of(pipeline(stage(0, 0, 4)), pipeline(stage(first, 0, 1), stage(second, 1, 4)))
    )
    for first, second in ((1, 2), (2, 1))
)
LAYOUT = ModelLayout.of(
    model := HeteroLM(
        LMConfig(vocab_size=50, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)
    )
)
NUM_PARAMS = sum(spec.numel for spec in LAYOUT.specs)
HELD_BYTES = 8
"""Of a parameter: its weight and its gradient. An owner keeps twice as much of it."""


@dataclass(frozen=True, kw_only=True)
class Facts(RunFacts):
    """Of a run on devices with so much memory to use."""

    room: tuple[float, float, float]

    def detect_seats(self) -> Any:
        devices = [SimpleNamespace(name="one kind", memory_bytes=n / 0.9) for n in self.room]
        return [SimpleNamespace(node="one", device=device) for device in devices]


def facts_of(*shares: float, **changes: Any) -> Facts:
    """Return the facts of ranks with room for so many parameters' weights and gradients each."""
    comms: Any = SimpleNamespace(world_size=3, gather_objects=lambda own: [own] * 3)
    first, second, third = (share * NUM_PARAMS * HELD_BYTES for share in shares)
    facts = Facts(
        module=model,
        layout=LAYOUT,
        comms=comms,
        device=torch.device("cpu"),
        sizes=lambda: BatchSizes(samples=6, sequence_length=128),
        room=(first, second, third),
    )
    return replace(facts, **changes)


@pytest.mark.parametrize(("what", "redundancy"), [("owner_shares", 0), ("redundancy", 1)])
def test_ranks_that_differ_in_redundancy_or_shares_are_refused(what: str, redundancy: int) -> None:
    comms: Any = SimpleNamespace(
        world_size=3, gather_objects=lambda own: [own, own | {what: "(1.0, 2.0, 1.0)"}, own]
    )
    facts = replace(facts_of(9.0, 9.0, 9.0, redundancy=redundancy), comms=comms)
    plan = replace(FIRST, owner_shares=(1.0, 1.0, 1.0))

    def start() -> None:
        find_standbys_of_run(facts, RunPlans(first=plan, candidates=(plan,)))
        check(plan, facts, ownership=Ownership.MEMORY)

    with pytest.raises(ConfigurationError, match=what):
        start()


def check(plan: ParallelPlan, facts: RunFacts, **config: Any) -> None:
    later = replace(LATER, owner_shares=plan.owner_shares, host_owners=plan.host_owners)
    plans = RunPlans(first=plan, candidates=(plan, later))
    check_room_for_states(facts, plans, EngineConfig(**config), LAYOUT.specs)


def test_shares_by_room_fit_wherever_all_states_have_room() -> None:
    # Beside the weights of one copy and of a half, at most, there are 2.2 states of 2.
    facts = facts_of(1.2, 1.8, 1.8)
    plans = RunPlans(first=FIRST, candidates=(FIRST, LATER))
    found = with_owner_shares(plans, facts)
    assert all(plan.owner_shares == found.first.owner_shares for plan in found.candidates)
    for plan in found.candidates:
        check(plan, facts, ownership=Ownership.MEMORY)
    with pytest.raises(ConfigurationError, match="Rank 0 has"):
        check(replace(FIRST, owner_shares=(1, 1, 1)), facts)


def test_states_without_room_are_refused_with_the_bytes_and_the_remedy() -> None:
    plans = RunPlans(first=FIRST, candidates=(FIRST,))
    with pytest.raises(ConfigurationError, match=r"Rank 0 has .* GiB less than weights .*fewer"):
        with_owner_shares(plans, facts_of(0.9, 5, 5))
    tight = facts_of(1.1, 1.1, 1.1)
    with pytest.raises(ConfigurationError, match=r"states take .* all ranks together .*Add"):
        with_owner_shares(plans, tight)
    with_owner_shares(plans, replace(tight, owned_device=OwnedDevice.CPU))


def test_shares_that_exceed_a_device_are_refused_with_the_bytes_and_the_remedy() -> None:
    shared = replace(FIRST, owner_shares=(0.0, 1.0, 9.0))
    roomy, tight = facts_of(2, 4, 4), facts_of(2, 4, 2)
    check(shared, roomy)
    own = r"GiB are its own slices, 90\.0% by the plan's owner_shares\. Use a smaller share"
    with pytest.raises(ConfigurationError, match=f"Rank 2 has .* activations aside: .* {own}"):
        check(shared, tight)
    check(shared, replace(tight, owned_device=OwnedDevice.CPU))
    check(replace(shared, host_owners=(2,)), tight)
    both = r"and those of ranks \[2\], for which it stands by\. Use .*, redundancy=0, more devices"
    with pytest.raises(ConfigurationError, match=both):
        check(shared, tight, standbys=(1, 2, 0))


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
    assert found.node_of_rank == (0,) * 8 + (8,) * 8 + (16,) * 4
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


@pytest.mark.parametrize("counts", [(8, 8, 8), (3, 1, 2)])
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
    piece, near_s, far_s, straight_s = num_bytes / num_ranks, [], [], []
    for own, node in enumerate(nodes):
        relays = relays_of(nodes, node)
        assert relays[own] == own
        assert {nodes[relay] for relay in relays} == {node}
        near_s.append((num_ranks - relays.count(own)) * piece * inside_s)
        relayed = [peer for peer, relay in enumerate(relays) if relay == own != peer]
        far_s.append(len(relayed) * piece * width * between_s)
        num_near = nodes.count(node)
        straight_s.append(piece * ((num_near - 1) * inside_s + (num_ranks - num_near) * between_s))
    ranks = range(num_ranks)
    assert push_straight_s(links, ranks, num_bytes) == pytest.approx(max(straight_s))
    simulated_s = push_by_node_s(links, ranks, num_bytes, width=width)
    # Of other nodes' numbers that this one's doesn't divide, relays have one owner more or less.
    assert simulated_s == pytest.approx(max(near_s) + max(far_s), rel=0.35)
    if len(set(counts)) == 1:
        assert simulated_s == pytest.approx(max(near_s) + max(far_s), rel=0.05)


RULES = st.sampled_from([Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER])


def counted_one_by_one(specs, plan, slices, world_size: int) -> list[tuple[float, float, float]]:
    holders, found = PlanHolders(plan), [[0.0, 0.0, 0.0] for _ in range(world_size)]
    for spec in specs:
        for holding in holders.of(spec).holdings:
            numel = spec.row_numel * sum(stop - start for start, stop in holding.intervals)
            found[holding.global_rank][0] += 2 * numel
            found[holding.global_rank][1] += 4 * numel * spec.requires_grad
        for item in slices[spec.name]:
            numel = spec.row_numel * (item.stop - item.start)
            for rank in item.ranks:
                found[rank][2] += 4 * numel * (NUM_STATES if spec.requires_grad else 1)
    return [tuple(terms) for terms in found]


@given(rng=st.randoms(use_true_random=False), rule=RULES, stood_by=st.booleans())
def test_groups_of_parameters_take_what_their_parameters_take(rng, rule, stood_by) -> None:
    plan, world_size = random_plan(rng)
    specs = small_model(plan.num_layers, tied=False)
    specs.append(ParameterSpec(name="frozen", shape=(5, 3), layer=0, requires_grad=False))
    standbys = [(rank + 1) % world_size for rank in range(world_size)] if stood_by else []
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule, standbys=standbys)
    facts = SimpleNamespace(
        comms=SimpleNamespace(world_size=world_size),
        compute_bytes=2,
        summed_bytes=4,
        master_bytes=4,
        owned_device=OwnedDevice.DEVICE,
    )
    found = state_memory(plan, facts, specs, slices)
    assert [(terms.weights, terms.gradients, terms.owned) for terms in found] == counted_one_by_one(
        specs, plan, slices, world_size
    )
