"""Who owns how much where `ownership="memory"` is asked for and the plan doesn't say it.

Ranks own in proportion to what weights and summed gradients of their stages leave free on their
devices, activations aside; of several plans that may run, what they leave free at worst.
"""

from dataclasses import replace

from lightning_hetero.autoplan.facts import NUM_STATES, RunFacts
from lightning_hetero.autoplan.request import RunPlans
from lightning_hetero.autoplan.summary import state_memory
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.iteration.config import OwnedDevice
from lightning_hetero.simulator import usable_bytes

__all__ = ["with_owner_shares"]

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
