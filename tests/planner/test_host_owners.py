"""Hosts own where a model fits on no devices: only what must, and only what they have room for."""

from dataclasses import replace

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanError, PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner import Objective, PlanningOptions, Workload, plan, plan_best_size
from lightning_hetero.simulator import RooflineCost, fitting_lines, simulate
from tests.planner.every_plan import tiny_cluster, tiny_model

GIB = 2**30
MODEL = ModelSpec.load("llama-7b")
WORKLOAD = Workload(sequence_length=1024, global_batch_size=16)


def cluster(host_memory_bytes: float | None) -> Cluster:
    return Cluster(
        nodes=tuple(
            Node(device=name, count=2, host_memory_bytes=host_memory_bytes)
            for name in ("L40S", "RTX-3090")
        )
    )


def find(host_memory_bytes: float | None):
    options = PlanningOptions(tp_degrees=(1,), num_candidates=1)
    return plan(cluster(host_memory_bytes), MODEL, WORKLOAD, options)


def test_hosts_own_what_devices_have_no_room_for():
    with pytest.raises(PlanningError, match="give the nodes host_memory_bytes"):
        find(None)
    with pytest.raises(PlanningError, match=r"in its own memory, of which 1\.8 GiB may"):
        find(2 * GIB)
    found = find(256 * GIB)
    best, simulation = found.best.plan, found.best.simulation
    cost = RooflineCost(cluster(256 * GIB), MODEL)
    batches = [[WORKLOAD.microbatch] * item.num_microbatches for item in best.pipelines]
    on_devices = simulate(replace(best, host_owners=()), cost, batches)
    assert best.host_owners
    assert best.host_owners != best.ranks, "those with room own on their devices"
    for pipeline, index, stage in best.iter_stages():
        usable = cost.usable_bytes(cost.shape_of(stage).device)
        there, here = (s.stages[pipeline][index].memory for s in (on_devices, simulation))
        is_host = stage.ranks[0] in best.host_owners
        assert (there.total > usable) is is_host, "only where it must"
        assert here.total <= usable
        assert here.owned == (0 if is_host else there.owned)
        assert simulation.host_bytes[stage.ranks[0]] == (there.owned if is_host else 0)
    assert simulation.step_s > on_devices.step_s, "the host is slower, and copies take time"
    assert simulation.iteration_time_s >= found.lower_bound_s
    (line,) = [line for line in fitting_lines(best, simulation) if line.startswith("host")]
    assert f"{sum(simulation.host_bytes) / GIB:,.1f} GiB" in line


def test_the_cheapest_plan_comes_first_where_hosts_own():
    nodes = tuple(replace(node, price_per_hour=1.0) for node in cluster(256 * GIB).nodes)
    options = PlanningOptions(tp_degrees=(1,), num_candidates=8, objective=Objective.COST)
    found = plan(replace(cluster(256 * GIB), nodes=nodes), MODEL, WORKLOAD, options)
    prices = [item.score(Objective.COST) for item in found.candidates]
    assert prices == sorted(prices)
    seconds = [item.simulation.iteration_time_s for item in found.candidates]
    assert seconds != sorted(seconds), "the cheapest isn't the fastest"


def test_hosts_own_under_plans_of_other_sizes_of_micro_batches():
    cost = RooflineCost(cluster(256 * GIB), MODEL)
    workload = Workload(sequence_length=512, global_batch_size=16)
    options = PlanningOptions(tp_degrees=(1,), num_candidates=50, thorough=False)
    found = plan_best_size(cost, workload, options, sizes=(1, 4))
    usual = found.workload.sequences_per_microbatch
    assert {p.microbatch_size for item in found.candidates for p in item.plan.pipelines} == {1, 4}
    for item in found.candidates:
        batches = [
            [(512,) * (pipeline.microbatch_size or usual)] * pipeline.num_microbatches
            for pipeline in item.plan.pipelines
        ]
        assert sum(len(one) for row in batches for one in row) == 16
        assert simulate(item.plan, cost, batches) == item.simulation


def test_the_step_on_a_host_takes_its_copies_and_its_memory():
    nodes = (Node(device="L40S", count=2, host_memory_bytes=GIB, host_memory_bytes_per_s=100e9),)
    cost = RooflineCost(Cluster(nodes=nodes), MODEL)
    two = ParallelPlan.even(world_size=2, num_layers=MODEL.num_layers, num_stages=2)
    stage = two.pipelines[0].stages[0]
    shape = cost.shape_in(replace(two, host_owners=(0,)), stage)
    assert shape.owns_on_host
    assert cost.shape_in(two, stage) == cost.shape_of(stage)
    expected = 1e9 * ((4 + 2) / 25e9 + 42 / 50e9)
    assert cost.update_s(shape, 1e9) == pytest.approx(expected)
    assert cost.update_s(cost.shape_of(stage), 1e9) < expected


def find_tiny(nodes, hosts_gib, *, bytes_per_s, num_candidates=1):
    """Return the result for nodes as (TFLOP/s, devices, GiB) and their hosts' GiB."""
    tiny = tiny_cluster(*nodes, bytes_per_s=bytes_per_s)
    with_hosts = tuple(
        replace(node, host_memory_bytes=gib and gib * GIB)
        for node, gib in zip(tiny.nodes, hosts_gib, strict=True)
    )
    workload = Workload(sequence_length=512, global_batch_size=8)
    options = PlanningOptions(num_candidates=num_candidates)
    return plan(replace(tiny, nodes=with_hosts), tiny_model(8), workload, options)


def test_hosts_own_nothing_where_devices_have_room():
    with_hosts, without = (
        find_tiny([(100, 2, 6)], [host], bytes_per_s=50e9).best for host in (64, None)
    )
    assert with_hosts == without
    assert not with_hosts.plan.host_owners


@pytest.mark.parametrize(
    ("device_gib", "more", "more_gib", "bytes_per_s"),
    [
        # Devices alone have room if both hold the model, but the network is slow.
        (6, (100, 1, 6), None, 1e7),
        # Both devices together would do if the second host had more memory.
        (4, (50, 1, 4), 1, 1e8),
    ],
)
def test_a_node_more_is_never_worse_where_hosts_may_own(device_gib, more, more_gib, bytes_per_s):
    first = 100, 1, device_gib
    alone = find_tiny([first], [64], bytes_per_s=bytes_per_s)
    assert 0 < alone.lower_bound_s <= alone.best.simulation.iteration_time_s
    for number in (1, 5):
        both = find_tiny(
            [first, more], [64, more_gib], bytes_per_s=bytes_per_s, num_candidates=number
        )
        seconds = [item.simulation.iteration_time_s for item in both.candidates]
        assert seconds[0] <= alone.best.simulation.iteration_time_s * 1.005
        assert seconds == sorted(seconds)
        assert len(seconds) <= number


def test_nodes_that_only_own_are_paid_for():
    tiny = tiny_cluster((989, 1, 5), (1, 1, 80), bytes_per_s=100e9)
    one, other = tiny.nodes
    nodes = replace(one, price_per_hour=1), replace(other, price_per_hour=1000)
    workload = Workload(sequence_length=512, global_batch_size=8)
    best = plan(replace(tiny, nodes=nodes), tiny_model(6), workload).best
    assert best.plan.ranks == (0,)
    assert best.plan.owner_shares[1] > 0
    assert best.price_per_hour == 1001


def test_host_owners_are_ranks_that_run():
    two = ParallelPlan.even(world_size=2, num_layers=2, num_stages=2)
    with pytest.raises(PlanError, match="name each once, ranks start at 0"):
        replace(two, host_owners=(0, 0))
    with pytest.raises(PlanError, match="host_owners name rank 2 but 2 processes run"):
        replace(two, host_owners=(2,)).check_world_size(2)
    text = "nodes: [{device: T4, count: 1, host_memory_bytes: 64 GiB}]"
    assert Cluster.from_yaml(text).nodes[0].host_memory_bytes == 64 * GIB
