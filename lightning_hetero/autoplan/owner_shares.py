"""Decide the owner shares of `ownership="memory"` and the standbys, and check that all fit.

Ranks own in proportion to the memory that weights and summed gradients of their stages leave free
on their devices, without activations; with several plans, the worst one counts for each rank. A
plan may name other shares.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.autoplan.facts import NUM_STATES, RunFacts
from lightning_hetero.autoplan.request import RunPlans
from lightning_hetero.autoplan.summary import state_memory
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.owners import find_standbys
from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.runtime.iteration.config import EngineConfig, OwnedDevice
from lightning_hetero.runtime.ranks.meeting import check_alike
from lightning_hetero.simulator import usable_bytes

__all__ = ["check_room_for_states", "find_standbys_of_run", "with_owner_shares"]

_GIB = 2**30


def with_owner_shares(plans: RunPlans, facts: RunFacts) -> RunPlans:
    """Return the plans with shares of ownership by free memory; collective over all ranks.

    Raises:
        ConfigurationError: All ranks together have no room for the states.
    """
    if plans.first.owner_shares is not None:
        return plans
    specs = facts.layout.specs
    room = [usable_bytes(seat.device.memory_bytes) for seat in facts.detect_seats()]
    free = list(room)
    for plan in (plans.first, *plans.candidates):
        held = state_memory(plan, facts, specs, {spec.name: () for spec in specs})
        free = [min(a, b - used.total) for a, b, used in zip(free, room, held, strict=True)]
    full = {rank: value for rank, value in enumerate(free) if value < 0}
    if full:
        rank = min(full, key=full.__getitem__)
        raise ConfigurationError(
            f"Rank {rank} has {room[rank] / _GIB:.3g} GiB to use, {-full[rank] / _GIB:.3g} GiB "
            "less than weights and gradients of its stage take, whoever owns their states. Give "
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
    """Refuse shares or standbys for which a rank has no room under a plan that may run; collective.

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
        # Ranks whose plan has no shares compare other facts at this point, so it is found.
        check_alike(facts.comms, owner_shares=shares)
    slices = config.owners(specs, plans.first, world_size=facts.comms.world_size)
    room = [usable_bytes(seat.device.memory_bytes) for seat in facts.detect_seats()]
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
    # Ranks without redundancy compare other facts at this point, so the difference is found.
    shares = plans.first.owner_shares
    check_alike(facts.comms, redundancy=facts.redundancy, owner_shares=shares)
    if facts.comms.world_size == 1:
        rank_zero_warn(
            "redundancy=1 does nothing on one rank: nobody is there to stand by for it. Start "
            "more processes, or rely on LayerwiseCheckpoint."
        )
    seats = facts.detect_seats()
    return find_standbys([seat.node for seat in seats], [seat.device.name for seat in seats])
