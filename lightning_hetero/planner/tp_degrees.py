"""Which tensor-parallel degrees a plan may have: nodes hold them, heads divide, times are known."""

from lightning_hetero.core.errors import PlanningError, ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner.estimator import Estimator
from lightning_hetero.planner.workload import PlanningOptions, Workload
from lightning_hetero.simulator import CostModel

__all__ = ["valid_tp_degrees"]


def valid_tp_degrees(
    cost: CostModel, workload: Workload, options: PlanningOptions
) -> tuple[int, ...]:
    """Return the TP degrees that nodes can hold, heads divide and the cost model knows.

    Raises:
        PlanningError: A degree that was asked for can't be had.
        ProfileError: The profile knows none of those that can.
    """
    if options.tp_degrees is not None:
        for degree in options.tp_degrees:
            _check_tp_degree(cost, degree)
        return tuple(sorted(set(options.tp_degrees)))
    largest = max(node.count for node in cost.cluster.nodes)
    degrees = [degree for degree in range(1, largest + 1) if _heads_divide(cost.model, degree)]
    problems = {degree: _missing_times(cost, workload, degree) for degree in degrees}
    known = tuple(degree for degree in degrees if problems[degree] is None)
    first = problems[degrees[0]]
    if not known and first is not None:
        raise first
    return known


def _check_tp_degree(cost: CostModel, degree: int) -> None:
    model, largest = cost.model, max(node.count for node in cost.cluster.nodes)
    if degree > largest:
        raise PlanningError(
            f"TP degree {degree} needs {degree} devices in one node, but the largest node has "
            f"{largest}. Ask for a degree of at most {largest}."
        )
    if not _heads_divide(model, degree):
        raise PlanningError(
            f"TP degree {degree} doesn't divide the {model.num_heads} heads and "
            f"{model.num_kv_heads} key-value heads of {model.name}. Ask for a divisor."
        )


def _heads_divide(model: ModelSpec, degree: int) -> bool:
    return not (model.num_heads % degree or model.num_kv_heads % degree)


def _missing_times(cost: CostModel, workload: Workload, degree: int) -> ProfileError | None:
    """Return why a degree can't be timed on a device type that could form such a group."""
    estimator = Estimator(cost, workload, equal_microbatches=True)
    try:
        for node, entry in enumerate(cost.cluster.nodes):
            if entry.count >= degree:
                estimator.stage_times_s(node, degree, first=False, last=False)
    except ProfileError as error:
        return error
    return None
