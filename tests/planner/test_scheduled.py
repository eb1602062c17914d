"""Plans under solved schedules: never slower than under 1F1B, within memory, and really gained."""

from dataclasses import replace

import pytest

from lightning_hetero.core.actions import ActionKind
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.contingency import PlanBasis, PlanningTask
from lightning_hetero.planner.placement import without_chunks
from lightning_hetero.planner.result import PlanningResult
from lightning_hetero.planner.scheduled import Scheduled, _problem, simulate_scheduled
from lightning_hetero.planner.workload import PlanningOptions, Workload
from lightning_hetero.schedules import Schedule
from lightning_hetero.simulator import RooflineCost, StateLayout

SAMPLE = (512,)


def scheduled(schedule: Schedule, *, bytes_per_s: float) -> Scheduled:
    """Four nodes of one device each, one pipeline, 16 micro-batches."""
    nodes = [Node(device="A100-80GB", count=1) for _ in range(4)]
    cluster = Cluster(nodes=tuple(nodes), inter_node_bytes_per_s=bytes_per_s)
    model = ModelSpec.load("gpt-neo-2.7b")
    plan = ParallelPlan.even(world_size=4, num_layers=model.num_layers, num_stages=4)
    return simulate_scheduled(plan, RooflineCost(cluster, model), [[SAMPLE] * 16], schedule)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("bytes_per_s", [1.25e8, 1.25e9, 1.25e10])
def test_no_schedule_is_slower_than_1f1b_or_needs_memory_there_is_not(
    schedule: Schedule, bytes_per_s: float
) -> None:
    found = scheduled(schedule, bytes_per_s=bytes_per_s)
    assert found.simulation.iteration_time_s <= found.usual.iteration_time_s
    assert found.simulation.fits
    assert any(found.orders) == schedule.is_solved or bytes_per_s != 1.25e9


def test_stages_run_ahead_over_slow_links() -> None:
    split, deep = (scheduled(item, bytes_per_s=1.25e9) for item in (Schedule.SPLIT, Schedule.DEEP))
    assert deep.simulation.iteration_time_s < split.simulation.iteration_time_s
    assert deep.usual.iteration_time_s / deep.simulation.iteration_time_s > 1.1
    (orders,) = deep.orders
    assert orders is not None
    assert any(action.kind is ActionKind.WEIGHT for action in orders[0])
    assert "less than 1F1B" in str(deep)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.AUTO])
def test_a_runs_plan_is_judged_under_the_schedule_that_it_runs(schedule: Schedule) -> None:
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=4),))
    basis = PlanBasis(
        cluster=cluster,
        model=ModelSpec.load("llama-7b"),
        states=StateLayout(),
        workload=Workload(global_batch_size=8, sequence_length=2048),
        profile=None,
    )
    options = PlanningOptions(tp_degrees=(1,), num_candidates=4, thorough=False)
    task = PlanningTask(basis=basis, options=options, schedule=schedule)
    usual = replace(task, schedule=Schedule.ONE_F_ONE_B).solve()
    found = task.solve()
    assert isinstance(usual, PlanningResult)
    assert isinstance(found, PlanningResult)
    seconds = [item.best.simulation.iteration_time_s for item in (found, usual)]
    assert (seconds[0] < 0.95 * seconds[1]) == schedule.is_solved
    assert any(p.has_chunks for p in found.best.plan.pipelines) == schedule.is_solved
    assert found.best.simulation.fits


def test_estimates_see_all_layers_of_ranks_with_chunks_in_one_stage() -> None:
    parts = [([1], 0, 2, 1), ([0, 2], 2, 5, 2), ([1], 5, 6, None), ([0, 2], 6, 9, 1)]
    stages = [
        {"ranks": ranks, "layers": [start, stop], "recomputed_layers": count}
        for ranks, start, stop, count in parts
    ]
    found = without_chunks(ParallelPlan.from_dict({"pipelines": [{"stages": stages}]}).pipelines[0])
    assert [(s.ranks, s.layers, s.recomputed_layers) for s in found.stages] == [
        ((1,), range(3), 1),
        ((0, 2), range(3, 9), 3),
    ]


def test_what_ranks_with_chunks_own_takes_their_memory_once() -> None:
    model = ModelSpec.load("gpt-neo-2.7b")
    cost = RooflineCost(Cluster(nodes=(Node(device="A100-80GB", count=2),)), model)
    layers = [[0, 8], [8, 16], [16, 24], [24, 32]]
    stages = [{"ranks": [i % 2], "layers": cut} for i, cut in enumerate(layers)]
    plan = ParallelPlan.from_dict({"pipelines": [{"stages": stages}]})
    rooms = [
        _problem(item, 0, cost, [SAMPLE] * 8).room_bytes
        for item in (plan, replace(plan, owner_shares=(1.0, 1.0)))
    ]
    assert rooms[1] == pytest.approx(rooms[0], rel=0.05)
