"""Decide, by the simulator, whether gradients are summed on each node before they leave it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from lightning_hetero.autoplan.facts import RunFacts
from lightning_hetero.autoplan.request import RunPlans
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.core.transfers import ExchangeKind, TransferTable
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.ranks.meeting import check_alike
from lightning_hetero.runtime.setup.detect import cluster_of
from lightning_hetero.simulator.links import ClusterLinks, push_by_node_s, push_straight_s

__all__ = ["with_exchange"]

_LEAST_GAIN = 1.05
"""Least speed-up of a push by node; below it one leg is used, which needs fewer communicators."""


def with_exchange(
    config: EngineConfig, facts: RunFacts, plans: RunPlans, specs: Sequence[ParameterSpec]
) -> EngineConfig:
    """Return the engine's options with the kind of exchange decided; collective.

    "auto" becomes "by-node" if the first plan's push, of all units together, is faster that way
    over the links of the given or detected cluster. Never on gloo or with standbys.

    Raises:
        ConfigurationError: Ranks have different kinds of exchange.
    """
    backend = None if facts.comms.exchange is None else dist.get_backend(facts.comms.exchange)
    is_open = config.exchange is ExchangeKind.AUTO and backend not in (None, "gloo")
    if config.exchange is not ExchangeKind.BY_NODE and (not is_open or facts.redundancy):
        return config
    # Ranks with another kind compare other facts at this point, so the difference is found.
    check_alike(facts.comms, exchange=config.exchange)
    seats = facts.detect_seats()
    hosts = list(dict.fromkeys(seat.node for seat in seats))
    config = replace(config, node_of_rank=tuple(hosts.index(seat.node) for seat in seats))
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
        for circle in kind.circles(push=True) or ():
            sizes = zip(circle.held, kind.row_numels, strict=True)
            held = facts.compute_bytes * sum((end - start) * numel for (start, end), numel in sizes)
            straight_s += number * push_straight_s(links, circle.members, held)
            by_node_s += number * push_by_node_s(links, circle.members, held, width=width)
    return straight_s / by_node_s if by_node_s else 1.0
