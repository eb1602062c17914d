"""Candidate plans are plans of the cluster, and the first is the best of them without changing."""

import numpy as np
import pytest

from lightning_hetero.assign import assign_iteration
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner import CandidateOptions, CandidatePlans, plan_costs, propose_plans
from lightning_hetero.planner.proposing.proposal import draw_iteration
from lightning_hetero.simulator import RooflineCost
from tests.planner.every_plan import tiny_cluster, tiny_model

MODEL = tiny_model(6)
UNEQUAL = tiny_cluster((312, 4, 7), (100, 4, 5))


def lengths(longest: int = 16_384) -> np.ndarray:
    drawn = 1 + np.random.default_rng(2).exponential(900, 400)
    return np.append(np.minimum(drawn, longest).astype(np.int64), longest)


def found(**changes) -> CandidatePlans:
    options = CandidateOptions(**({"num_candidate_plans": 4, "tp_degrees": (1, 2)} | changes))
    cost = RooflineCost(UNEQUAL, MODEL)
    return propose_plans(lengths(), cost, tokens_per_step=60_000, options=options)


def test_candidates_are_different_plans_whose_tensor_parallel_groups_stay_in_a_node() -> None:
    candidates = found()
    assert 1 < len(candidates.plans) <= 4
    assert len(set(candidates.plans)) == len(candidates.plans)
    for plan, costs in zip(candidates.plans, candidates.costs, strict=True):
        plan.check_world_size(8)
        plan.check_num_layers(6)
        assert costs == plan_costs(plan, RooflineCost(UNEQUAL, MODEL), context_length=16_384)
        for _, _, stage in plan.iter_stages():
            assert len({rank // 4 for rank in stage.ranks}) == 1
    assert found() == candidates


def test_the_first_holds_the_longest_sample_and_is_the_best_alone() -> None:
    candidates = found()
    assert max(cost.max_len for cost in candidates.costs[0]) >= 16_384
    generator = np.random.default_rng(0)
    drawn = [draw_iteration(lengths(), 60_000, generator) for _ in range(6)]

    def mean_s(plans) -> float:
        return float(np.mean([assign_iteration(i, plans).latency_s for i in drawn]))

    roomy = [c for c in candidates.costs if max(p.max_len for p in c) >= 16_384]
    assert candidates.static_s == pytest.approx(mean_s([candidates.costs[0]]))
    assert candidates.static_s == pytest.approx(min(mean_s([costs]) for costs in roomy))
    assert candidates.dynamic_s == pytest.approx(mean_s(candidates.costs))
    assert 0.9 * candidates.dynamic_s <= candidates.bound_s <= candidates.dynamic_s
    assert candidates.dynamic_s <= candidates.static_s


def test_a_given_plan_is_tried_too() -> None:
    given = ParallelPlan.even(world_size=8, num_layers=6, num_stages=4)
    best = found().plans[0]
    cost = RooflineCost(UNEQUAL, MODEL)
    options = CandidateOptions(num_candidate_plans=20, tp_degrees=(1, 2))
    candidates = propose_plans(
        lengths(), cost, tokens_per_step=60_000, options=options, given=[given]
    )
    assert candidates.static_s <= found(num_candidate_plans=20).static_s
    only = propose_plans(
        lengths(),
        cost,
        tokens_per_step=60_000,
        options=CandidateOptions(tp_degrees=(8,)),
        given=[best],
    )
    assert only.plans == (best,)
    assert only.static_s == only.dynamic_s
    assert only.bound_s == only.dynamic_s


def test_samples_that_no_plan_holds_are_refused() -> None:
    cost = RooflineCost(tiny_cluster((100, 2, 3)), MODEL)
    with pytest.raises(
        PlanningError, match=r"longest sample of 900,000 tokens; pipelines hold 0 at most beside"
    ):
        propose_plans(lengths(900_000), cost, tokens_per_step=1_000_000)
