"""Keep owned states in host memory if devices have no room, for as few ranks as possible.

The search runs once more as if all ranks kept what they own in host memory. In the plans that it
finds, only ranks whose devices lack room do so. Plans for samples of different lengths share one
set of such ranks: those that lack room under any of the plans.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.memory import own_microbatches
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult
from lightning_hetero.simulator import CostModel, simulate

_USABLE = 0.9
"""Share of a host's memory that states may take; the system and the data need the rest."""
_GIB = 2**30


def cost_on_hosts(cost: CostModel) -> CostModel | None:
    """Return the costs if all states are on hosts; None if no node has room, or it is already so.

    Plans for these costs may assign states to hosts that have no room: see `check_hosts`.
    """
    if not cost.layout.is_owned_by_room:
        return None
    if all(node.host_memory_bytes is None for node in cost.cluster.nodes):
        return None
    return cost.with_layout(replace(cost.layout, host_owned=True))


def candidates_on_hosts(found: PlanningResult, cost: CostModel) -> tuple[PlannedCandidate, ...]:
    """Return the plans that keep states on hosts where devices lack room, best first.

    Plans for which a host has too little memory are left out.

    Args:
        found: Plans for the costs of `cost_on_hosts`.
        cost: Costs with states on devices.

    Raises:
        PlanningError: No plan is left.
    """
    candidates: list[PlannedCandidate] = []
    failures: list[PlanningError] = []
    for item in found.candidates:
        plan, batches = item.plan, own_microbatches(item.plan, found.workload.microbatch)
        owners = {
            rank
            for pipeline, stage in simulate(plan, cost, batches).lacking_bytes
            for rank in plan.pipelines[pipeline].stages[stage].ranks
        }
        plan = replace(plan, host_owners=tuple(sorted(owners)))
        simulation = simulate(plan, cost, batches)
        try:
            check_hosts(simulation.host_bytes, cost)
        except PlanningError as error:
            failures.append(error)
        else:
            candidates.append(replace(item, plan=plan, simulation=simulation))
    if not candidates:
        raise failures[0]
    return tuple(sorted(candidates, key=lambda item: item.score(found.objective)))


def check_hosts(host_bytes: Sequence[float], cost: CostModel) -> None:
    """Refuse a plan if the bytes that its ranks keep on their hosts, by global rank, don't fit.

    Raises:
        PlanningError: A host has too little memory.
    """
    needed: Counter[int] = Counter()
    for rank, num_bytes in enumerate(host_bytes):
        needed[cost.node_of_rank[rank]] += round(num_bytes)
    for index, num_bytes in needed.items():
        node = cost.cluster.nodes[index]
        room = _USABLE * (node.host_memory_bytes or 0.0)
        if num_bytes > room:
            raise PlanningError(
                f"{cost.model.name} fits nowhere: devices have no room for masters and optimizer "
                f"states, and node {index} ({node.count} × {node.device}) would keep "
                f"{num_bytes / _GIB:.1f} GiB of them in its own memory, of which "
                f"{room / _GIB:.1f} GiB may be used. Add nodes or memory."
            )
