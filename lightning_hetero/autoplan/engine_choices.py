"""Decide what the user leaves open: which rank owns what, standbys, and how gradients travel.

Under `ownership="memory"` ranks own in proportion to the device memory that weights and summed
gradients of their stages leave; activations aren't counted. If there are several plans, the one
that leaves the least counts for each rank. A plan may set other shares (`owner_shares`). Gradients
are summed on each node before they leave it if the simulator predicts that this is faster.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.autoplan.facts import NUM_STATES, RunFacts, RunPlans
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.holders import Holding, PlanHolders
from lightning_hetero.exchange.owners import find_standbys
from lightning_hetero.exchange.slices import ParameterSpec, Slice
from lightning_hetero.exchange.transfers import ExchangeKind, TransferTable
from lightning_hetero.runtime.iteration.config import EngineConfig, OwnedDevice
from lightning_hetero.runtime.ranks.meeting import check_alike
from lightning_hetero.runtime.setup.detect import cluster_of
from lightning_hetero.simulator import MemoryTerms, usable_bytes
from lightning_hetero.simulator.links import ClusterLinks, push_by_node_s, push_straight_s

_GIB = 2**30
_LEAST_GAIN = 1.05
"""Least speed-up for which gradients are pushed by node, since a direct push needs fewer
communicators."""


def with_owner_shares(plans: RunPlans, facts: RunFacts) -> RunPlans:
    """Return the plans with shares of ownership by free memory; collective over all ranks.

    Raises:
        ConfigurationError: All ranks together have no room for the states.
    """
    if plans.first.owner_shares is not None:
        return plans
    specs = facts.layout.specs
    room = _room(facts)
    free = list(room)
    for plan in (plans.first, *plans.candidates):
        held = state_memory(plan, facts, specs, {spec.name: () for spec in specs})
        free = [min(a, b - used.total) for a, b, used in zip(free, room, held, strict=True)]
    full = {rank: value for rank, value in enumerate(free) if value < 0}
    if full:
        rank = min(full, key=full.__getitem__)
        raise ConfigurationError(
            f"Rank {rank} has {room[rank] / _GIB:.3g} GiB to use, {-full[rank] / _GIB:.3g} GiB "
            "less than weights and gradients of its stage take, even if it owns no states. Give "
            "its stage fewer layers, or more tensor parallelism."
        )
    states = (1 + facts.redundancy) * sum(
        spec.numel * facts.master_bytes * (NUM_STATES if spec.requires_grad else 1)
        for spec in specs
    )
    if states > sum(free) and facts.owned_device is not OwnedDevice.CPU:
        raise ConfigurationError(
            f"Masters and optimizer states take {states / _GIB:.3g} GiB, but all ranks together "
            f"have {sum(free) / _GIB:.3g} GiB beside weights and gradients. Add devices, or more "
            "stages or tensor parallelism, so that fewer copies of the weights are held."
        )
    shares = tuple(value / sum(free) for value in free)
    return replace(
        plans,
        first=replace(plans.first, owner_shares=shares),
        candidates=tuple(replace(plan, owner_shares=shares) for plan in plans.candidates),
    )


def check_room_for_states(
    facts: RunFacts, plans: RunPlans, config: EngineConfig, specs: Sequence[ParameterSpec]
) -> None:
    """Refuse shares or standbys for which a rank has no room; called by all ranks.

    Args:
        facts: The facts of the run.
        plans: All plans that may run.
        config: The engine's options.
        specs: The parameters, as tensor parallelism cuts them.

    Raises:
        ConfigurationError: A rank lacks room, even without activations; on every rank.
    """
    shares = plans.first.owner_shares
    if not config.standbys and shares is None:
        return
    if not config.standbys:
        # A rank whose plan has no shares compares other facts at this point; the error says so.
        check_alike(facts.comms, owner_shares=shares)
    slices = config.owners(specs, plans.first, world_size=facts.comms.world_size)
    room = _room(facts)
    for plan in dict.fromkeys((plans.first, *plans.candidates)):
        used = state_memory(plan, facts, specs, slices)
        for rank, (has, needs) in enumerate(zip(room, used, strict=True)):
            if needs.total > has:
                stood_by = [r for r, standby in enumerate(config.standbys) if standby == rank]
                whose, remedy = "its own slices", ""
                if shares is not None:
                    whose += f", {shares[rank] / sum(shares):.1%} by the plan's owner_shares"
                    remedy = "a smaller share in owner_shares, "
                if config.standbys:
                    whose += f", and those of ranks {stood_by}, for which it stands by"
                    remedy += "redundancy=0, "
                raise ConfigurationError(
                    f"Rank {rank} has {has / _GIB:.3g} GiB to use, but weights, gradients and "
                    f"states take {needs.total / _GIB:.3g} GiB of it, activations aside: "
                    f"{needs.owned / _GIB:.3g} GiB are {whose}. Use {remedy}more devices, or a "
                    "plan with more stages or tensor parallelism, so that fewer copies of the "
                    "weights are held."
                )


def find_standbys_of_run(facts: RunFacts, plans: RunPlans) -> tuple[int, ...]:
    """Return the standby of each rank; an empty tuple without redundancy; collective.

    Raises:
        ConfigurationError: Ranks differ in redundancy or shares of ownership; on every rank.
    """
    if not facts.redundancy:
        return ()
    # A rank without redundancy compares other facts at this point; the error says so.
    shares = plans.first.owner_shares
    check_alike(facts.comms, redundancy=facts.redundancy, owner_shares=shares)
    if facts.comms.world_size == 1:
        rank_zero_warn(
            "redundancy=1 does nothing on one rank: no other rank can keep a copy. Start "
            "more processes, or rely on LayerwiseCheckpoint."
        )
    seats = facts.detect_seats()
    return find_standbys([seat.node for seat in seats], [seat.device.name for seat in seats])


def _room(facts: RunFacts) -> list[float]:
    """Return the bytes of each rank's device that a plan may fill; collective the first time."""
    return [usable_bytes(seat.device.memory_bytes) for seat in facts.detect_seats()]


def with_exchange(
    config: EngineConfig, facts: RunFacts, plans: RunPlans, specs: Sequence[ParameterSpec]
) -> EngineConfig:
    """Return the engine's options with the kind of exchange decided; collective.

    "auto" becomes "by-node" if, over the links of the given or detected cluster, all pushes of the
    first plan together are faster that way. Never on gloo or with standbys.

    Raises:
        ConfigurationError: Ranks have different kinds of exchange.
    """
    backend = None if facts.comms.exchange is None else dist.get_backend(facts.comms.exchange)
    is_open = config.exchange is ExchangeKind.AUTO and backend not in (None, "gloo")
    if config.exchange is not ExchangeKind.BY_NODE and (not is_open or facts.redundancy):
        return config
    # A rank with another kind compares other facts at this point; the error says so.
    check_alike(facts.comms, exchange=config.exchange)
    seats = facts.detect_seats()
    nodes = [seat.node for seat in seats]
    config = replace(config, node_of_rank=tuple(map(nodes.index, nodes)))
    if config.exchange is ExchangeKind.BY_NODE:
        return config
    basis = None if plans.auto is None else plans.auto.basis
    links = ClusterLinks(cluster_of(seats) if basis is None else basis.cluster)
    is_by_node = _gain(links, config, facts, plans.first, specs) >= _LEAST_GAIN
    return replace(config, exchange=ExchangeKind.BY_NODE) if is_by_node else config


def _gain(
    links: ClusterLinks,
    config: EngineConfig,
    facts: RunFacts,
    plan: ParallelPlan,
    specs: Sequence[ParameterSpec],
) -> float:
    """Return how many times faster a plan's push is by node."""
    slices = config.owners(specs, plan, world_size=facts.comms.world_size)
    width, straight_s, by_node_s = 4 / facts.compute_bytes, 0.0, 0.0
    kinds = Counter(unit.kind for unit in TransferTable(specs, slices, plan).trainable_units)
    for kind, number in kinds.items():
        for shard_group in kind.shard_groups(push=True) or ():
            sizes = zip(shard_group.held, kind.row_numels, strict=True)
            held = facts.compute_bytes * sum((end - start) * numel for (start, end), numel in sizes)
            straight_s += number * push_straight_s(links, shard_group.members, held)
            by_node_s += number * push_by_node_s(links, shard_group.members, held, width=width)
    return straight_s / by_node_s if by_node_s else 1.0


def state_memory(
    plan: ParallelPlan,
    facts: RunFacts,
    specs: Sequence[ParameterSpec],
    slices: Mapping[str, Sequence[Slice]],
) -> list[MemoryTerms]:
    """Return each rank's memory for weights, gradients and Adam's states, by global rank.

    A holder keeps weights in the compute dtype and sums gradients in fp32, unless told otherwise;
    an owner or standby keeps the master, the gradient summed over pipelines, and two moments.
    Frozen parameters have neither gradients nor moments.
    """
    used = [[0.0, 0.0, 0.0] for _ in range(facts.comms.world_size)]
    holders = PlanHolders(plan)
    # Bytes of a row, summed over all parameters with the same holders, or the same owners.
    held: dict[int, tuple[tuple[Holding, ...], list[float]]] = {}
    owned: dict[int, tuple[Sequence[Slice], list[float]]] = {}
    for spec in specs:
        holdings, items = holders.of(spec).holdings, slices[spec.name]
        _, of_row = held.setdefault(id(holdings), (holdings, [0.0, 0.0]))
        of_row[0] += spec.held_bytes(facts.compute_bytes) / max(1, spec.cut_length)
        of_row[1] += spec.row_numel * facts.summed_bytes * spec.requires_grad
        _, of_owned_row = owned.setdefault(id(items), (items, [0.0]))
        num_states = NUM_STATES if spec.requires_grad else 1
        of_owned_row[0] += spec.row_numel * facts.master_bytes * num_states
    for holdings, (weight_bytes, gradient_bytes) in held.values():
        for holding in holdings:
            rows = sum(stop - start for start, stop in holding.intervals)
            used[holding.global_rank][0] += rows * weight_bytes
            used[holding.global_rank][1] += rows * gradient_bytes
    for items, (owned_bytes,) in owned.values():
        for item in items:
            for rank in item.ranks:
                if not facts.owned_device.is_on_host(plan, rank):
                    used[rank][2] += (item.stop - item.start) * owned_bytes
    return [MemoryTerms(*terms) for terms in used]
