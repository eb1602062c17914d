"""Choose how many samples a micro-batch holds: plan for 1, 2, 4, ... as long as that helps.

Larger micro-batches launch fewer kernels and read weights less often; they also keep more
activations, so that more is recomputed, and there are fewer of them to fill a pipeline. Time over
size has one valley but for rounding, so two sizes in a row that are worse end the search.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.search import PlanningResult
from lightning_hetero.planner.workload import Objective

__all__ = ["plan_best_size"]

_MOST_SAMPLES = 64
_WORSE_IN_A_ROW = 2


def plan_best_size(
    global_batch_size: int, plan_with: Callable[[int], PlanningResult]
) -> PlanningResult:
    """Return the best result over sizes of micro-batches; its bound holds for all sizes tried.

    Args:
        global_batch_size: Samples of an iteration; sizes divide it.
        plan_with: Plans with micro-batches of so many samples.

    Raises:
        PlanningError: The model fits nowhere with any of them.
    """
    best: PlanningResult | None = None
    bounds: list[float] = []
    failure: PlanningError | None = None
    num_worse = 0
    for size in _sizes(global_batch_size):
        try:
            result = plan_with(size)
        except PlanningError as error:
            if failure is None:
                failure = error
            if best is None:
                continue
            break  # Larger ones need more memory still.
        bounds.append(result.lower_bound_s)
        if best is None or _score(result) < _score(best):
            best, num_worse = result, 0
        else:
            num_worse += 1
        if num_worse == _WORSE_IN_A_ROW:
            break
    if best is None:
        assert failure is not None, "1 divides every batch"
        raise failure
    return replace(best, lower_bound_s=min(bounds))


def _sizes(global_batch_size: int) -> Iterator[int]:
    size = 1
    while size <= min(global_batch_size, _MOST_SAMPLES) and global_batch_size % size == 0:
        yield size
        size *= 2


def _score(result: PlanningResult) -> float:
    time_s, price = result.best.simulation.iteration_time_s, result.best.price_per_hour
    if result.objective is Objective.COST and price is not None:
        return price * time_s
    return time_s
