"""What ranks keep in their hosts' memory."""

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator.cost import CostModel

__all__ = ["host_bytes"]


def host_bytes(plan: ParallelPlan, cost: CostModel) -> tuple[float, ...]:
    """Return the bytes of masters, states and summed gradients on its host, by global rank."""
    found = [0.0] * len(cost.node_of_rank)
    layout = cost.layout
    for _, _, stage in plan.iter_stages():
        for rank in stage.ranks:
            if layout.host_owned or rank in plan.host_owners:
                found[rank] = cost.owned_params(plan, stage) * layout.kept_bytes
    return tuple(found)
