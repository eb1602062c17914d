"""The size of micro-batches is the best of all, although not every size is searched for."""

from dataclasses import replace

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import Objective, PlanningOptions, Workload, plan, plan_best_size
from lightning_hetero.planner.search import PlanSearch
from lightning_hetero.planner.unequal_sizes import sizes_of, with_unequal_sizes
from lightning_hetero.simulator import RooflineCost, simulate, split_batch
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
    assert found.best.simulation.iteration_time_s <= min(times.values())
    assert found.lower_bound_s <= min(times.values())


def test_a_search_near_a_score_that_no_plan_comes_near_finds_nothing():
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=8),))
    cost = RooflineCost(cluster, ModelSpec.load("bert-large"))
    workload = Workload(sequence_length=512, global_batch_size=16)
    best = PlanSearch(cost, workload, PlanningOptions()).run()
    near, far = (
        PlanSearch(cost, workload, PlanningOptions()).run_near(best.score * share)
        for share in (1.01, 0.5)
    )
    assert near is not None
    assert near.score == best.score
    assert far is None


def test_few_devices_get_a_size_that_only_improving_makes_best():
    cluster = Cluster(
        nodes=(Node(device="A10", count=8), Node(device="T4", count=8)),
        inter_node_bytes_per_s=1.25e9,
    )
    cost = RooflineCost(cluster, ModelSpec.load("gpt-neo-2.7b"))
    found = plan_best_size(cost, Workload(sequence_length=512, global_batch_size=8))
    assert found.workload.sequences_per_microbatch == 2


def test_the_best_size_has_a_thorough_search():
    cluster = Cluster(
        nodes=(Node(device="A10-24GB", count=4), *[Node(device="A100-80GB", count=2)] * 3),
        inter_node_bytes_per_s=12.5e9,
    )
    cost = RooflineCost(cluster, ModelSpec.load("llama-7b"))
    workload = Workload(sequence_length=2048, global_batch_size=8)
    thorough, quick = (
        plan_best_size(cost, workload, PlanningOptions(thorough=thorough))
        for thorough in (True, False)
    )
    assert thorough.score < 0.995 * quick.score
    assert thorough.workload == quick.workload


def test_a_deep_pipeline_and_a_lone_device_take_micro_batches_of_unequal_sizes():
    cost = RooflineCost(tiny_cluster((70, 4, 1.5), (989, 1, 80), bytes_per_s=100e9), tiny_model(8))
    workload = Workload(sequence_length=128, global_batch_size=256, sequences_per_microbatch=16)
    uniform = plan(cost.cluster, cost.model, workload, cost=cost)
    found = with_unequal_sizes(uniform, cost, PlanningOptions())
    pipelines = found.best.plan.pipelines
    assert sum(p.num_microbatches * p.microbatch_size for p in pipelines) == 256
    assert len({p.microbatch_size for p in pipelines}) == 2
    batches = split_batch(found.best.plan, global_batch_size=256, sequence_length=128)
    simulation = simulate(found.best.plan, cost, batches)
    assert simulation == found.best.simulation
    for p, s, stage in found.best.plan.iter_stages():
        used = simulation.stage_memory_bytes[p][s]
        assert used <= cost.usable_bytes(cost.shape_of(stage).device)
    assert simulation.iteration_time_s < 0.99 * uniform.best.simulation.iteration_time_s
    assert found.lower_bound_s < simulation.iteration_time_s
    assert sizes_of(found) == "8 and 16"


def test_unequal_sizes_for_cost_give_no_state_to_a_node_that_would_have_to_be_paid_for():
    cluster = tiny_cluster((70, 4, 1.5), (989, 1, 80), (1, 1, 80), bytes_per_s=100e9)
    prices = (0.0, 1.0, 1000.0)
    nodes = [replace(n, price_per_hour=p) for n, p in zip(cluster.nodes, prices, strict=True)]
    cost = RooflineCost(replace(cluster, nodes=tuple(nodes)), tiny_model(8))
    workload = Workload(sequence_length=128, global_batch_size=256, sequences_per_microbatch=16)
    options = PlanningOptions(objective=Objective.COST)
    uniform = plan(cost.cluster, cost.model, workload, options, cost=cost)
    found = with_unequal_sizes(uniform, cost, options)
    assert found.best is not uniform.best
    assert found.best.plan.owner_shares[5] == 0
    assert found.best.price_per_hour == 1


def test_a_model_that_fits_nowhere_with_any_size_is_refused():
    cost = RooflineCost(tiny_cluster((100, 1, 0.5)), tiny_model(4))
    with pytest.raises(PlanningError, match="fits nowhere"):
        plan_best_size(cost, Workload(sequence_length=2048, global_batch_size=4))
