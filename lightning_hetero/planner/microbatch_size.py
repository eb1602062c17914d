"""Choose how many samples a micro-batch holds: plan for 1, 2, 4, ... as long as that helps.

Larger micro-batches launch fewer kernels and read weights less often; they also keep more
activations, so that more is recomputed, and there are fewer of them to fill a pipeline. Iteration
time over size has a single minimum, but for rounding, so two worse sizes in a row end the search. A
size counts as worse without a search if the likeliest arrangements of the size before, estimated
with the new one, are too slow to be improved as far as the best plan. On many devices its search
leaves out all arrangements that are so slow. Only the best size has a thorough search. Finally,
pipelines of one kind may take another size than the best one (`unequal_sizes`).
"""

from collections.abc import Iterator
from dataclasses import replace

from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.result import PlanningResult, ProgressCallback
from lightning_hetero.planner.search import PlanSearch
from lightning_hetero.planner.unequal_sizes import with_unequal_sizes
from lightning_hetero.planner.workload import PlanningOptions, Workload
from lightning_hetero.simulator import CostModel

__all__ = ["plan_best_size"]

_MOST_SAMPLES = 64
_WORSE_IN_A_ROW = 2
_FEW_DEVICES = 32
"""Up to this many devices a full search is cheap, and may improve slow arrangements to the best."""


def plan_best_size(
    cost: CostModel,
    workload: Workload,
    options: PlanningOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> PlanningResult:
    """Return the best result over sizes of micro-batches; its bounds hold for all sizes tried.

    Args:
        cost: Times and bytes on the cluster.
        workload: The iteration to plan for; its size of micro-batches is ignored.
        options: How to search.
        progress: Told what is being done; starts from 0 for every size.

    Raises:
        PlanningError: The model doesn't fit with any size.
    """
    options = options or PlanningOptions()
    quick = replace(options, thorough=False)
    best: PlanningResult | None = None
    failures: list[PlanningError] = []
    bounds: list[tuple[float, float | None]] = []
    before: PlanSearch | None = None
    num_worse = 0
    for size in _sizes(workload.global_batch_size):
        sized = replace(workload, sequences_per_microbatch=size)
        search = PlanSearch(cost, sized, quick, progress)
        try:
            found = _plan_size(search, before, best)
        except PlanningError as error:
            failures.append(error)
            if best is None:
                continue
            break  # Larger ones need more memory still.
        if found is not None:
            before = search
            bounds.append((found.lower_bound_s, found.lower_bound_price))
        elif best is not None:
            bounds.append(search.lower_bounds(best.best.simulation.iteration_time_s))
        if found is not None and (best is None or search.score(found) < search.score(best)):
            best, num_worse = found, 0
        else:
            num_worse += 1
        if num_worse == _WORSE_IN_A_ROW:
            break
    if best is None:
        raise failures[0]
    thorough = PlanSearch(cost, best.workload, options, progress)
    if thorough.is_worth_running(best):
        best = min(best, thorough.run(), key=thorough.score)
    prices = [price for _, price in bounds if price is not None]
    uniform = replace(
        best,
        lower_bound_s=min(seconds for seconds, _ in bounds),
        lower_bound_price=min(prices, default=None),
    )
    return with_unequal_sizes(uniform, cost, options)


def _plan_size(
    search: PlanSearch, before: PlanSearch | None, best: PlanningResult | None
) -> PlanningResult | None:
    """Return the result of a size, or None if it is worse than the best of the sizes before it."""
    if best is None or before is None or best.best.plan.host_owners:
        return search.run()
    score = search.score(best)
    if not search.comes_close(before, score):
        return None
    is_cheap = search.cost.cluster.num_ranks <= _FEW_DEVICES
    return search.run_near(float("inf") if is_cheap else score)


def _sizes(global_batch_size: int) -> Iterator[int]:
    size = 1
    while size <= min(global_batch_size, _MOST_SAMPLES) and global_batch_size % size == 0:
        yield size
        size *= 2
