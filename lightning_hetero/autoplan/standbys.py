"""Who stands by for whom in a run with redundancy, and whether that fits into memory."""

from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.autoplan.facts import RunFacts
from lightning_hetero.autoplan.request import RunPlans
from lightning_hetero.autoplan.summary import state_memory
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.owners import find_standbys
from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.ranks.meeting import check_alike
from lightning_hetero.simulator import usable_bytes

__all__ = ["check_room_for_standbys", "find_standbys_of_run"]

_GIB = 2**30


def find_standbys_of_run(facts: RunFacts) -> tuple[int, ...]:
    """Return for each rank the one that stands by for it, none without redundancy; collective."""
    if not facts.redundancy:
        return ()
    # Other ranks compare more than this now, and see that these have something else to compare.
    check_alike(facts.comms, redundancy=facts.redundancy)
    if facts.comms.world_size == 1:
        rank_zero_warn(
            "redundancy=1 does nothing on one rank: nobody is there to stand by for it. Start "
            "more processes, or rely on LayerwiseCheckpoint."
        )
    seats = facts.detect_seats()
    return find_standbys([seat.node for seat in seats], [seat.device.name for seat in seats])


def check_room_for_standbys(
    facts: RunFacts, plans: RunPlans, config: EngineConfig, specs: Sequence[ParameterSpec]
) -> None:
    """Refuse standbys for which a rank has no room under a plan that may run; collective.

    Args:
        facts: What is known of the run.
        plans: All that may run.
        config: The engine's options.
        specs: The parameters, as tensor parallelism cuts them.

    Raises:
        ConfigurationError: On every rank; activations aside.
    """
    if not config.standbys:
        return
    slices = config.owners(specs, plans.first, world_size=facts.comms.world_size)
    room = [usable_bytes(seat.device.memory_bytes) for seat in facts.detect_seats()]
    for plan in dict.fromkeys((plans.first, *plans.candidates)):
        used = state_memory(plan, facts, specs, slices)
        for rank, (has, needs) in enumerate(zip(room, used, strict=True)):
            if needs.total > has:
                stood_by = [r for r, standby in enumerate(config.standbys) if standby == rank]
                raise ConfigurationError(
                    f"Rank {rank} has {has / _GIB:.3g} GiB to use, but weights, gradients and "
                    f"states take {needs.total / _GIB:.3g} GiB of it, activations aside: "
                    f"{needs.owned / _GIB:.3g} GiB are its own slices and those of ranks "
                    f"{stood_by}, for which it stands by. Use redundancy=0, more devices, or a "
                    "plan with more stages or tensor parallelism, so that fewer copies of the "
                    "weights are held."
                )
