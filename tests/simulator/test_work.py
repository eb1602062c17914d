"""Simulated stages recompute what real ones do under a budget."""

import pytest

from lightning_hetero.core.actions import schedule_1f1b
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.recomputation import LayerBytes, fewest_recomputed, held_at_backward
from lightning_hetero.simulator import RooflineCost, Simulation, fitting_lines, simulate

COST = RooflineCost(Cluster(nodes=(Node(device="A100-80GB", count=2),)), ModelSpec.load("opt-350m"))
BATCHES = [(2048,), (8192,), (1024, 512), (4096,), (4096,), (512,)]


def plan(**first: int) -> ParallelPlan:
    stages = [{"ranks": [0], "layers": [0, 12], **first}, {"ranks": [1], "layers": [12, 24]}]
    return ParallelPlan.from_dict({"pipelines": [{"stages": stages}]})


def run(**first: int) -> Simulation:
    return simulate(plan(**first), COST, [BATCHES])


def test_a_budget_costs_the_time_and_bytes_of_the_layers_that_the_runtime_would_recompute():
    none, every = run(), run(recomputed_layers=12)
    stage = ParallelPlan.even(world_size=2, num_layers=24, num_stages=2).pipelines[0].stages[0]
    kept, of_input = COST.layer_bytes(COST.shape_of(stage))
    layer = LayerBytes(kept=kept, recomputed=of_input)
    schedule = schedule_1f1b(stage_index=0, num_stages=2, num_microbatches=len(BATCHES))
    tokens = [sum(batch) for batch in BATCHES]
    budget = int(0.6 * kept * 12 * (8192 + 2048))
    found = run(activation_budget_bytes=budget)
    counts = fewest_recomputed(budget, layer, 12, tokens, held_at_backward(schedule))
    assert 0 < sum(counts) < 12 * len(BATCHES)
    again_s = sum(
        COST.recompute_s(COST.shape_of(stage)._replace(recomputed_layers=count), batch)
        for count, batch in zip(counts, BATCHES, strict=True)
    )
    assert found.stages[0][0].recompute_s == pytest.approx(again_s)
    assert none.iteration_time_s < found.iteration_time_s < every.iteration_time_s
    memory = [item.stages[0][0].memory.activations for item in (every, found, none)]
    assert memory[0] < memory[1] < memory[2]
    of_embedding = COST.model.hidden_size * 2 * (8192 + 2048)
    assert memory[1] <= budget + of_embedding
    assert run(activation_budget_bytes=10**12).iteration_time_s == none.iteration_time_s
    with pytest.raises(PlanError, match="not even one recomputed layer"):
        run(activation_budget_bytes=10**6)


@pytest.mark.parametrize("first", [{"selective_layers": 3}, {"activation_budget_bytes": 2**31}])
def test_what_a_plan_spends_on_recomputation_is_named(first):
    found = run(**first)
    assert 0 < found.recompute_s < found.iteration_time_s
    assert fitting_lines(plan(**first), found) == [
        f"recomputation   {found.recompute_s:.4g} s of {found.iteration_time_s:.4g} s computes "
        "activations again on stage 0"
    ]
    assert fitting_lines(plan(), run()) == []


def test_ranks_with_several_stages_hold_all_of_them():
    model = ModelSpec.load("gpt-neo-2.7b")
    cost = RooflineCost(Cluster(nodes=(Node(device="A100-80GB", count=2),)), model)
    parts = [(0, 0, 8), (1, 8, 16), (1, 16, 24), (0, 24, 32)]
    stages = [{"ranks": [rank], "layers": [start, stop]} for rank, start, stop in parts]
    plan = ParallelPlan.from_dict({"pipelines": [{"stages": stages}]})
    found = simulate(plan, cost, [[(512,)] * 4])
    row, busy = zip(*((s.memory, s.busy) for s in found.stages[0]), strict=True)
    assert row[0] == row[3] != row[1] == row[2]
    assert found.memory_bytes == (row[0].total, row[1].total)
    assert busy[0] == busy[3]
    assert max(busy) <= 1
    even = ParallelPlan.even(world_size=2, num_layers=32, num_stages=2)
    usual = simulate(even, cost, [[(512,)] * 4])
    ends = model.embedding_params + model.head_params
    more = row[0].states - usual.stages[0][0].memory.states
    # The last layers' head came to the rank of the first ones.
    assert row[0].states + row[1].states == pytest.approx(
        sum(known.memory.states for known in usual.stages[0])
    )
    assert 0 < more < 20 * ends
