"""Candidate plans for samples of varied lengths (Hydraulis §7): how many of which pipelines.

They are plans of the cluster that hold the longest sample, recomputing where that is needed, and
the first is the best of them without changing.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.assign import assign_iteration
from lightning_hetero.assign.pipeline_cost import sequence_times_s
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import AssignmentError, PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.core.profile import TimeFit
from lightning_hetero.planner import CandidateOptions, CandidatePlans, plan_costs, propose_plans
from lightning_hetero.planner.proposing.pipeline_costs import util_len, with_budgets
from lightning_hetero.planner.proposing.proposal import draw_iteration, estimate_plans, propose
from lightning_hetero.planner.proposing.schemes import Scheme, work_lower_bound_s
from lightning_hetero.simulator import RooflineCost, simulate
from tests.assign.cases import cost
from tests.planner.every_plan import tiny_cluster, tiny_model

MODEL, LONGEST = tiny_model(6), 16_384
UNEQUAL = RooflineCost(tiny_cluster((312, 4, 7), (100, 4, 5)), MODEL)
SHORT = RooflineCost(tiny_cluster((300, 4, 6), (100, 4, 6)), MODEL)
"""Devices that hold no sample of the longest length without recomputing."""
LARGE = RooflineCost(
    Cluster(nodes=(Node(device="A100-80GB", count=4), Node(device="H800-80GB", count=4))),
    ModelSpec.load("llama-7b"),
)


def lengths(longest: int = LONGEST) -> np.ndarray:
    drawn = 1 + np.random.default_rng(2).exponential(900, 400)
    return np.append(np.minimum(drawn, longest).astype(np.int64), longest)


def found(**changes) -> CandidatePlans:
    options = CandidateOptions(**({"num_candidate_plans": 4, "tp_degrees": (1, 2)} | changes))
    return propose_plans(lengths(), UNEQUAL, tokens_per_step=60_000, options=options)


# -- candidates ---------------------------------------------------------------------------------


def test_candidates_are_plans_of_the_cluster_and_the_first_is_the_best_alone() -> None:
    candidates = found()
    assert 1 < len(candidates.plans) <= 4
    assert len(set(candidates.plans)) == len(candidates.plans)
    for plan, costs in zip(candidates.plans, candidates.costs, strict=True):
        plan.check_world_size(8)
        plan.check_num_layers(6)
        assert costs == plan_costs(plan, UNEQUAL, context_length=LONGEST)
        for _, _, stage in plan.iter_stages():
            assert len({rank // 4 for rank in stage.ranks}) == 1
    generator = np.random.default_rng(0)
    drawn = [draw_iteration(lengths(), 60_000, generator) for _ in range(6)]

    def mean_s(plans) -> float:
        return float(np.mean([assign_iteration(i, plans).latency_s for i in drawn]))

    roomy = [c for c in candidates.costs if max(p.max_len for p in c) >= LONGEST]
    assert candidates.costs[0] in roomy
    assert candidates.static_s == pytest.approx(mean_s([candidates.costs[0]]))
    assert candidates.static_s == pytest.approx(min(mean_s([costs]) for costs in roomy))
    assert candidates.dynamic_s == pytest.approx(mean_s(candidates.costs))
    assert 0.9 * candidates.dynamic_s <= candidates.bound_s <= candidates.dynamic_s
    assert found() == candidates, "equal arguments give equal plans"
    only = propose_plans(
        lengths(),
        UNEQUAL,
        tokens_per_step=60_000,
        options=CandidateOptions(tp_degrees=(8,)),
        given=[candidates.plans[0]],
    )
    assert only.plans == candidates.plans[:1], "a given plan is tried, too"
    assert only.static_s == only.dynamic_s == only.bound_s


def test_samples_that_no_plan_holds_are_refused() -> None:
    tiny = RooflineCost(tiny_cluster((100, 2, 3)), MODEL)
    with pytest.raises(
        PlanningError, match=r"longest sample of 900,000 tokens; pipelines hold 0 at most beside"
    ):
        propose_plans(lengths(900_000), tiny, tokens_per_step=1_000_000)


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
    found, elsewhere = (
        simulate(plan, cost, [[(8192,)] * 4])
        for plan in (plans[0], replace(plans[0], host_owners=()))
    )
    assert found.fits
    assert not elsewhere.fits


# -- how many pipelines of each scheme ----------------------------------------------------------


def schemes(device: str = "gpu", speed: float = 1.0) -> list[Scheme]:
    """Return schemes: the more devices one takes, the longer its limit, the less efficient."""
    rows = [(1, 3e-4, 2048, 1), (2, 1.8e-4, 8192, 1), (4, 1.2e-4, 32768, 1), (4, 5.5e-5, 8192, 2)]
    return [
        Scheme(
            cost=cost(
                a=2e-9 / n / speed, b=b / speed, c=0.03 / speed, max_len=limit, num_stages=stages
            ),
            devices=((device, n),),
        )
        for n, b, limit, stages in rows
    ]


def long_tail(count: int = 4000) -> np.ndarray:
    """Return lengths most of which are short and a few long."""
    draws = np.random.default_rng(0).lognormal(7, 1.1, count)
    return np.clip(draws, 16, LONGEST).astype(np.int64)


def test_an_estimate_is_near_the_assignment_and_infinite_where_a_sequence_fits_nowhere() -> None:
    options = schemes()
    costs = [scheme.cost for scheme in options]
    counts = np.array([[4, 2, 2, 0], [0, 0, 2, 2], [0, 4, 2, 0]])
    generator = np.random.default_rng(1)
    iterations = [draw_iteration(long_tail(), 60_000, generator) for _ in range(4)]
    for row, plan in zip(estimate_plans(iterations, counts, costs), counts, strict=True):
        pipelines = [s.cost for s, n in zip(options, plan, strict=True) for _ in range(n)]
        for estimate_s, drawn in zip(row, iterations, strict=True):
            assigned_s = assign_iteration(drawn, [pipelines]).latency_s
            assert estimate_s == pytest.approx(assigned_s, rel=0.15)
            bound_s = work_lower_bound_s(drawn, options, {"gpu": 4 + 4 + 8 + 8})
            assert 0 < bound_s <= assigned_s
    assert work_lower_bound_s(np.array([9000]), options, {"gpu": 3}) == np.inf
    mixed = [Scheme(cost=costs[0], devices=(("gpu", 1), ("slow", 1)))]
    alone_s = mixed[0].cost.latency_s(float(sequence_times_s(np.array([900]), costs[0])[0]), 1)
    assert work_lower_bound_s(np.array([900]), mixed, {"gpu": 1, "slow": 1}) == alone_s
    few = [np.array([9000, 100]), np.array([100])]
    values = estimate_plans(few, np.array([[2, 0, 0, 0], [0, 0, 1, 0]]), costs)
    assert np.isinf(values).tolist() == [[True, False], [False, False]]


def test_proposals_are_near_the_best_of_all_plans_and_the_first_holds_any_sequence() -> None:
    options = schemes()
    one, several = (
        propose(long_tail(), options, {"gpu": 8}, tokens_per_iteration=40_000, most=number)
        for number in (1, 4)
    )
    assert len(one) == 1
    assert 1 <= len(several) <= 4
    numbers = itertools.product(range(9), range(5), range(3), range(3))
    every = [row for row in numbers if 0 < row[0] + 2 * row[1] + 4 * row[2] + 4 * row[3] <= 8]
    assert {*one, *several} <= set(every)
    used = [scheme.cost for scheme, n in zip(options, several[0], strict=True) if n]
    assert max(item.max_len for item in used) >= long_tail().max()
    generator = np.random.default_rng(9)
    iterations = [draw_iteration(long_tail(), 40_000, generator) for _ in range(16)]
    costs = [scheme.cost for scheme in options]
    best_s = estimate_plans(iterations, np.array(every), costs).mean(axis=1).min()
    mine_s = estimate_plans(iterations, np.array(one), costs).mean()
    assert mine_s <= best_s * 1.05


def test_no_scheme_for_the_longest_sequence_says_what_is_missing() -> None:
    with pytest.raises(PlanningError, match=r"16384 tokens but the roomiest .* takes 8192"):
        propose(long_tail(), schemes(), {"gpu": 3}, tokens_per_iteration=60_000, most=8)


# -- costs of a plan's pipelines ----------------------------------------------------------------


def two_pipelines() -> ParallelPlan:
    """Return one pipeline of A100 and one of H800, two stages of TP 2 each."""
    cuts = ((0, range(16)), (2, range(16, 32)))
    return ParallelPlan(
        pipelines=tuple(
            PipelinePlan(
                stages=tuple(
                    StagePlan(ranks=(base + n, base + n + 1), layers=layers) for n, layers in cuts
                )
            )
            for base in (0, 4)
        )
    )


def test_costs_follow_the_slowest_stage_and_fill_the_tightest() -> None:
    plan = two_pipelines()
    costs = plan_costs(plan, LARGE, context_length=LONGEST)
    for pipeline, found in zip(plan.pipelines, costs, strict=True):
        shapes = [LARGE.shape_of(stage) for stage in pipeline.stages]
        assert found.num_stages == 2
        for length in (1024, 8192, LONGEST):
            slowest = max(sum(LARGE.compute_s(shape, (length,))) for shape in shapes)
            fitted = sequence_times_s(np.array([length]), found)[0] + found.c
            assert fitted == pytest.approx(slowest, rel=0.05)
        for length, fits in ((found.max_len, True), (int(found.max_len * 1.03) + 256, False)):
            batches = [(length,)] * 2
            used = [LARGE.stage_memory(shape, 2, batches, 2 - i) for i, shape in enumerate(shapes)]
            assert fits == all(
                memory.total <= LARGE.usable_bytes(shape.device)
                for memory, shape in zip(used, shapes, strict=True)
            )
    for short in (16, 128, 129, 1000):
        for found in plan_costs(plan, LARGE, context_length=short):
            assert found.max_len >= short
            assert sequence_times_s(np.array([short]), found)[0] + found.c > 0


def test_a_stage_without_memory_for_tokens_is_named() -> None:
    alone = ParallelPlan.even(world_size=8, num_layers=60)
    model = RooflineCost(LARGE.cluster, ModelSpec.load("llama-32b"))
    with pytest.raises(AssignmentError, match=r"Stage 0 keeps \d+\.\d GiB of states in 75.8 GiB"):
        plan_costs(alone, model, context_length=1024)


@given(
    st.sampled_from([0.0, 1e-9, 1e-7, 1e-5]),
    st.floats(1e-6, 1e-3),
    st.sampled_from([0.0, 1e-3, 0.1, 2]),
)
def test_utillen_is_the_first_length_that_reaches_the_threshold(a, b, c) -> None:
    every = np.arange(1, 5001)
    speeds = every / (a * every**2.0 + b * every + c)
    first = util_len(TimeFit(a=a, b=b, c=c), threshold=0.85, limit=5000)
    assert abs(first - 1 - int(np.argmax(speeds >= 0.85 * speeds.max()))) <= 1


# -- recomputing for long samples ---------------------------------------------------------------


def two_stages() -> ParallelPlan:
    return ParallelPlan.even(world_size=8, num_layers=6, num_stages=2)


def test_a_budget_lets_a_pipeline_take_a_longer_sequence_and_never_more_than_its_memory() -> None:
    bare = two_stages()
    plan = with_budgets(bare, SHORT, LONGEST)
    before, after = (plan_costs(p, SHORT, context_length=LONGEST)[0] for p in (bare, plan))
    assert before.max_len < LONGEST <= after.max_len + 127
    assert after.kept_len < LONGEST
    generator = np.random.default_rng(0)
    drawn = generator.integers(1, LONGEST, size=(plan.num_pipelines, 6)).tolist()
    for rows in (drawn, [[LONGEST] * 4] * plan.num_pipelines):
        found = simulate(plan, SHORT, [[(length,) for length in row] for row in rows])
        for row, pipeline in zip(found.stage_memory_bytes, plan.pipelines, strict=True):
            for used, stage in zip(row, pipeline.stages, strict=True):
                assert used <= SHORT.usable_bytes(SHORT.shape_of(stage).device) * (1 + 1e-9)
    kept = [[(after.kept_len // 2,)] * 4] * plan.num_pipelines
    assert simulate(plan, SHORT, kept).recompute_s == 0
    longest = LONGEST - 100  # Between two multiples of 128.
    plan = with_budgets(bare, SHORT, longest)
    assert plan_costs(plan, SHORT, context_length=longest)[0].max_len >= longest
    assert with_budgets(bare, SHORT, 512) == bare, "they hold these already"
    full = RooflineCost(tiny_cluster((300, 8, 0.5)), MODEL)
    assert with_budgets(bare, full, LONGEST) == bare, "recomputing gains nothing"
    candidates = propose_plans(np.append(np.full(60, 900), LONGEST), SHORT, tokens_per_step=60_000)
    assert any(stage.activation_budget_bytes for _, _, stage in candidates.plans[0].iter_stages())


@pytest.mark.parametrize("tokens", [10_000, 16_000])
def test_the_price_is_what_the_simulator_recomputes_but_for_whole_layers(tokens: int) -> None:
    plan = with_budgets(two_stages(), SHORT, LONGEST)
    cost = plan_costs(plan, SHORT, context_length=LONGEST)[0]
    found = simulate(plan, SHORT, [[(tokens,)] * 8] * plan.num_pipelines)
    shapes = [SHORT.shape_of(stage) for stage in plan.pipelines[0].stages]
    alone_s = [sum(SHORT.compute_s(shape, (tokens,))) for shape in shapes]
    slowest = int(np.argmax(alone_s))
    layer_s = SHORT.recompute_s(shapes[slowest]._replace(recomputed_layers=1), (tokens,))
    simulated_s = found.stages[0][slowest].recompute_s / 8
    priced_s = (float(cost.stretch(np.array([float(tokens)]))[0]) - 1) * alone_s[slowest]
    assert priced_s > 0
    assert abs(simulated_s - priced_s) <= layer_s


def test_what_an_error_of_memory_has_taught_shortens_budgets_and_what_is_predicted_fills_devices():
    """A run's own count of a layer isn't corrected, so its budget must be."""
    budgets = []
    for factor in (1.0, 1.5):
        cost = SHORT.with_layout(replace(SHORT.layout, activation_factor=factor))
        plan = with_budgets(two_stages(), cost, LONGEST)
        found = simulate(plan, cost, [[(LONGEST,)] * 2] * plan.num_pipelines)
        for stage, used in zip(plan.pipelines[1].stages, found.stage_memory_bytes[1], strict=True):
            layer_bytes = cost.layer_bytes(cost.shape_of(stage))[0] * LONGEST
            usable = cost.usable_bytes(cost.shape_of(stage).device)
            assert usable - 2 * layer_bytes < used <= usable * (1 + 1e-9)
        budgets.append(plan.pipelines[1].stages[0].activation_budget_bytes)
    assert budgets[1] < budgets[0] / 1.5
