"""Who stands by for whom in a run with redundancy."""

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.autoplan.facts import RunFacts
from lightning_hetero.core.owners import find_standbys
from lightning_hetero.runtime.ranks.meeting import check_alike

__all__ = ["find_standbys_of_run"]


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
