"""The size of micro-batches is the best of all, although not every size is searched for."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import Objective, PlanningOptions, Workload, plan, plan_best_size
from lightning_hetero.planner.search import sizes_of
from lightning_hetero.simulator import RooflineCost, simulate, split_batch
from tests.planner.every_plan import tiny_cluster, tiny_model


@pytest.mark.parametrize("length", [64, 4096])
def test_no_other_size_is_faster(length):
    cluster = tiny_cluster((100, 2, 10), (312, 1, 10), bytes_per_s=12e9)
    model, batch = tiny_model(4), 16
    workload = Workload(sequence_length=length, global_batch_size=batch)
    found = plan_best_size(RooflineCost(cluster, model), workload)
    times = {}
    for size in (1, 4, 16):
        sized = Workload(
            sequence_length=length, global_batch_size=batch, sequences_per_microbatch=size
        )
        times[size] = plan(cluster, model, sized).best.simulation.iteration_time_s
    assert found.best.simulation.iteration_time_s <= min(times.values())
    assert found.lower_bound_s <= min(times.values())


def test_of_nodes_that_cost_nothing_size_and_plan_are_the_fastest():
    nodes = (
        Node(device="A100-80GB", count=2, price_per_hour=0.0),
        Node(device="T4", count=1, price_per_hour=1.0),
    )
    workload = Workload(sequence_length=64, global_batch_size=16)
    cheap, fast = (
        plan_best_size(
            RooflineCost(Cluster(nodes=used), ModelSpec.load("bert-large")),
            workload,
            PlanningOptions(objective=objective, thorough=False),
        )
        for used, objective in ((nodes, Objective.COST), (nodes[:1], Objective.THROUGHPUT))
    )
    assert cheap.workload.sequences_per_microbatch > 1
    seconds = [found.best.simulation.iteration_time_s for found in (cheap, fast)]
    assert seconds[0] == pytest.approx(seconds[1])


_UNEQUAL_SIZES = """
from dataclasses import replace
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import find_device
from lightning_hetero.planner import PlanningOptions, Workload, plan_best_size
from lightning_hetero.simulator import RooflineCost
from tests.planner.every_plan import tiny_model
devices = tuple(replace(find_device("A100-80GB", ()), name=name) for name in ("Red", "Blue"))
nodes = tuple(Node(device=device.name, count=1) for device in devices)
cluster = Cluster(nodes=nodes, devices=devices, inter_node_bytes_per_s=1e13)
cost = RooflineCost(cluster, tiny_model(4, vocab_size=512))
workload = Workload(sequence_length=64, global_batch_size=40, sequences_per_microbatch=8)
options = PlanningOptions(thorough=False)
found = plan_best_size(cost, workload, options)
print([(p.microbatch_size, p.num_microbatches) for p in found.best.plan.pipelines])
"""


def test_the_same_plan_is_found_in_every_process():
    found = {
        subprocess.run(
            [sys.executable, "-c", _UNEQUAL_SIZES],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_deep_pipeline_and_a_lone_device_take_micro_batches_of_unequal_sizes():
    cost = RooflineCost(tiny_cluster((70, 4, 1.5), (989, 1, 80), bytes_per_s=100e9), tiny_model(8))
    workload = Workload(sequence_length=128, global_batch_size=256, sequences_per_microbatch=16)
    options = PlanningOptions(thorough=False)
    uniform = plan(cost.cluster, cost.model, workload, options, cost=cost)
    found = plan_best_size(cost, workload, options, sizes=(2, 16))
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
    assert " and " in sizes_of(found)


def test_unequal_sizes_for_cost_give_no_state_to_a_node_that_would_have_to_be_paid_for():
    cluster = tiny_cluster((70, 4, 1.5), (989, 1, 80), (1, 1, 80), bytes_per_s=100e9)
    prices = (0.0, 1.0, 1000.0)
    nodes = [replace(n, price_per_hour=p) for n, p in zip(cluster.nodes, prices, strict=True)]
    cost = RooflineCost(replace(cluster, nodes=tuple(nodes)), tiny_model(8))
    workload = Workload(sequence_length=128, global_batch_size=256)
    options = PlanningOptions(objective=Objective.COST, thorough=False)
    best = plan_best_size(cost, workload, options, sizes=(2, 16)).best
    assert {pipeline.microbatch_size for pipeline in best.plan.pipelines} == {2, 16}
    assert best.plan.owner_shares[5] == 0
    assert best.price_per_hour == 1


def test_a_model_that_fits_nowhere_with_any_size_is_refused():
    cost = RooflineCost(tiny_cluster((100, 1, 0.5)), tiny_model(4))
    with pytest.raises(PlanningError, match="fits nowhere"):
        plan_best_size(cost, Workload(sequence_length=2048, global_batch_size=4))


@pytest.mark.parametrize("equally", [False, True])
def test_every_candidate_is_one_of_the_results_workload(equally):
    cost = RooflineCost(tiny_cluster((70, 4, 1.5), (989, 1, 80), bytes_per_s=100e9), tiny_model(8))
    workload = Workload(sequence_length=16, global_batch_size=256, sequences_per_microbatch=2)
    options = PlanningOptions(thorough=False, equal_microbatches=equally, num_candidates=1000)
    start = plan(cost.cluster, cost.model, workload, options, cost=cost).best.plan
    found = plan_best_size(cost, workload, options, start=start, sizes=(2, 16))
    usual = found.workload.sequences_per_microbatch
    assert usual == 16
    for item in found.candidates:
        sizes = [p.microbatch_size or usual for p in item.plan.pipelines]
        counts = [p.num_microbatches for p in item.plan.pipelines]
        assert sum(size * count for size, count in zip(sizes, counts, strict=True)) == 256
        batches = [[(16,) * size] * count for size, count in zip(sizes, counts, strict=True)]
        assert simulate(item.plan, cost, batches) == item.simulation
        assert not equally or max(counts) - min(counts) <= 1
