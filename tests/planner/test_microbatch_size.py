"""The size of micro-batches is the best of all, although not every size is searched for."""

import pytest

from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner import Workload, plan, plan_best_size
from lightning_hetero.planner.search import PlanSearch
from lightning_hetero.simulator import RooflineCost
from tests.planner.every_plan import tiny_cluster, tiny_model


@pytest.mark.parametrize("length", [64, 4096])
def test_no_other_size_is_faster(length, monkeypatch):
    cluster = tiny_cluster((100, 2, 10), (312, 1, 10), bytes_per_s=12e9)
    model, batch, sizes = tiny_model(4), 16, []
    searched = PlanSearch.run

    def run(self):
        sizes.append(self.workload.sequences_per_microbatch)
        return searched(self)

    monkeypatch.setattr(PlanSearch, "run", run)
    workload = Workload(sequence_length=length, global_batch_size=batch)
    found = plan_best_size(RooflineCost(cluster, model), workload)
    assert len(sizes) < 5, "sizes that can't be better are not searched for"
    times = {}
    for size in (1, 2, 4, 8, 16):
        sized = Workload(
            sequence_length=length, global_batch_size=batch, sequences_per_microbatch=size
        )
        times[size] = plan(cluster, model, sized).best.simulation.iteration_time_s
    assert found.best.simulation.iteration_time_s == min(times.values())
    assert found.lower_bound_s <= min(times.values())


def test_a_model_that_fits_nowhere_with_any_size_is_refused():
    cost = RooflineCost(tiny_cluster((100, 1, 0.5)), tiny_model(4))
    with pytest.raises(PlanningError, match="fits nowhere"):
        plan_best_size(cost, Workload(sequence_length=2048, global_batch_size=4))
