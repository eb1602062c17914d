"""Pipelines take longer sequences by recomputing, within their devices, and costs say the price."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.assign import assign_iteration
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner import plan_costs, propose_plans
from lightning_hetero.planner.proposing.sequence_room import with_budgets
from lightning_hetero.simulator import RooflineCost, simulate
from tests.planner.every_plan import tiny_cluster, tiny_model

COST = RooflineCost(tiny_cluster((300, 4, 6), (100, 4, 6)), tiny_model(6))
LONGEST = 16_384


def two_stages() -> ParallelPlan:
    return ParallelPlan.even(world_size=8, num_layers=6, num_stages=2)


def test_a_budget_lets_a_pipeline_take_a_longer_sequence_and_never_more_than_its_memory() -> None:
    bare = two_stages()
    plan = with_budgets(bare, COST, LONGEST)
    before, after = (plan_costs(p, COST, context_length=LONGEST)[0] for p in (bare, plan))
    assert before.max_len < LONGEST <= after.max_len + 127
    assert after.kept_len < LONGEST
    generator = np.random.default_rng(0)
    drawn = generator.integers(1, LONGEST, size=(plan.num_pipelines, 6)).tolist()
    for rows in (drawn, [[LONGEST] * 4] * plan.num_pipelines):
        found = simulate(plan, COST, [[(length,) for length in row] for row in rows])
        for row, pipeline in zip(found.stage_memory_bytes, plan.pipelines, strict=True):
            for used, stage in zip(row, pipeline.stages, strict=True):
                assert used <= COST.usable_bytes(COST.shape_of(stage).device) * (1 + 1e-9)
    kept = [[(after.kept_len // 2,)] * 4] * plan.num_pipelines
    assert simulate(plan, COST, kept).recompute_s == 0


@pytest.mark.parametrize("tokens", [10_000, 12_000, 16_000])
def test_the_price_is_what_the_simulator_recomputes_but_for_whole_layers(tokens: int) -> None:
    plan = with_budgets(two_stages(), COST, LONGEST)
    cost = plan_costs(plan, COST, context_length=LONGEST)[0]
    found = simulate(plan, COST, [[(tokens,)] * 8] * plan.num_pipelines)
    stages = plan.pipelines[0].stages
    alone_s = [sum(COST.compute_s(COST.shape_of(stage), (tokens,))) for stage in stages]
    layer_s = [
        COST.recompute_s(COST.shape_of(stage)._replace(recomputed_layers=1), (tokens,))
        for stage in stages
    ]
    slowest = int(np.argmax(alone_s))
    simulated_s = found.stage_recompute_s[0][slowest] / 8
    priced_s = (float(cost.stretch(np.array([float(tokens)]))[0]) - 1) * alone_s[slowest]
    assert priced_s > 0
    assert abs(simulated_s - priced_s) <= layer_s[slowest]


def test_what_an_error_of_memory_has_taught_shortens_budgets_and_what_is_predicted_fills_devices():
    """A run's own count of a layer isn't corrected, so its budget must be."""
    corrected = COST.with_layout(replace(COST.layout, activation_factor=1.5))
    for cost in (COST, corrected):
        plan = with_budgets(two_stages(), cost, LONGEST)
        found = simulate(plan, cost, [[(LONGEST,)] * 2] * plan.num_pipelines)
        for stage, used in zip(plan.pipelines[1].stages, found.stage_memory_bytes[1], strict=True):
            layer_bytes = cost.layer_bytes(cost.shape_of(stage))[0] * LONGEST
            usable = cost.usable_bytes(cost.shape_of(stage).device)
            assert usable - 2 * layer_bytes < used <= usable * (1 + 1e-9)
    first, second = (
        with_budgets(two_stages(), cost, LONGEST).pipelines[1].stages[0].activation_budget_bytes
        for cost in (COST, corrected)
    )
    assert second < first / 1.5


def test_samples_between_two_multiples_of_128_are_held() -> None:
    longest = LONGEST - 100
    plan = with_budgets(two_stages(), COST, longest)
    assert plan_costs(plan, COST, context_length=longest)[0].max_len >= longest


def test_a_pipeline_that_holds_the_longest_or_gains_nothing_stays_as_it_is() -> None:
    assert with_budgets(two_stages(), COST, 512) == two_stages()
    full = RooflineCost(tiny_cluster((300, 8, 0.5)), tiny_model(6))
    assert with_budgets(two_stages(), full, LONGEST) == two_stages()


def test_samples_that_fit_nowhere_without_recomputing_are_planned_with_it() -> None:
    lengths = np.append(np.full(60, 900), LONGEST)
    found = propose_plans(lengths, COST, tokens_per_step=60_000)
    budgets = [stage.activation_budget_bytes for _, _, stage in found.plans[0].iter_stages()]
    assert any(budgets)
    found_cost = max(found.costs[0], key=lambda cost: cost.max_len)
    assert found_cost.kept_len < LONGEST <= found_cost.max_len + 127


def test_hosts_own_only_where_the_longest_sample_leaves_devices_no_room_for_states() -> None:
    def find(host_memory_bytes: float | None):
        cluster = tiny_cluster((312, 1, 2.5), (100, 1, 6))
        nodes = [replace(node, host_memory_bytes=host_memory_bytes) for node in cluster.nodes]
        cost = RooflineCost(replace(cluster, nodes=tuple(nodes)), tiny_model(6))
        lengths = np.append(np.full(60, 900), 8192)
        return cost, propose_plans(lengths, cost, tokens_per_step=60_000).plans

    with pytest.raises(PlanningError, match="how much host_memory_bytes every node has"):
        find(None)
    with pytest.raises(PlanningError, match=r"in its own memory, of which 0\.9 GiB may"):
        find(2**30)
    cost, plans = find(2**36)
    assert {plan.host_owners for plan in plans} == {(0,)}
    found = simulate(plans[0], cost, [[(8192,)] * 4])
    for used, stage in zip(found.stage_memory_bytes[0], plans[0].pipelines[0].stages, strict=True):
        assert used <= cost.usable_bytes(cost.shape_of(stage).device)
    elsewhere = simulate(replace(plans[0], host_owners=()), cost, [[(8192,)] * 4])
    assert elsewhere.memory_bytes[0] > cost.usable_bytes(cost.cluster.device_of(0).name)


def test_the_assignment_gives_a_long_sequence_to_who_needn_t_recompute_it() -> None:
    plan = with_budgets(two_stages(), COST, LONGEST)
    first = plan_costs(plan, COST, context_length=LONGEST)[0]
    # A little slower, but with room.
    roomy = replace(first, b=1.02 * first.b, kept_len=2**40, recompute_share=0.0)
    chosen = assign_iteration([LONGEST - 384], [[first, roomy]])
    assert [len(batches) for batches in chosen.microbatches] == [0, 1]
    blind = replace(first, recompute_share=0.0)
    chosen = assign_iteration([LONGEST - 384], [[blind, roomy]])
    assert [len(batches) for batches in chosen.microbatches] == [1, 0]
