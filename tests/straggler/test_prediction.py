"""The model of a run must give back what was measured, and rank plans as their traffic does."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec
from lightning_hetero.exchange.transfers import TransferTable
from lightning_hetero.straggler import Finding, FindingKind, Mitigation
from lightning_hetero.straggler.mitigation import find_mitigations, mitigation_of
from lightning_hetero.straggler.paces import Observation
from lightning_hetero.straggler.prediction import (
    MeasuredRun,
    RunPrediction,
    move_ranks,
    true_causes,
)

NUM_LAYERS, ROWS = 4, 1000
SPECS = [
    ParameterSpec(name=f"layers.{layer}.weight", shape=(ROWS,), layer=layer)
    for layer in range(NUM_LAYERS)
]


KINDS = (FindingKind.HOST, FindingKind.LINK)


def slow(*items):
    """Return findings of (rank or link, ratio)."""
    ranks = [((which,) if isinstance(which, int) else which, ratio) for which, ratio in items]
    return [Finding(kind=KINDS[len(r) - 1], ranks=r, ratio=ratio) for r, ratio in ranks]


def even(num_stages: int, world_size: int = 4) -> ParallelPlan:
    return ParallelPlan.even(world_size=world_size, num_layers=NUM_LAYERS, num_stages=num_stages)


def measured(plan: ParallelPlan, count: int = 8, **options) -> MeasuredRun:
    slices = assign_owners(SPECS, plan, world_size=4, ownership=Ownership.HOLDERS)
    facts = {
        "plan": plan,
        "counts": (count,) * plan.num_pipelines,
        "iteration_s": 10.0,
        "places": {rank: Observation(step=0, forward_s=0.3, backward_s=0.7) for rank in range(4)},
        "probe_s": {},
        "link_s_per_byte": 1e-5,
        "hidden_bytes": 100,
        "value_bytes": 4,
        "table_of": lambda plan: TransferTable(SPECS, slices, plan),
    }
    return MeasuredRun(**{**facts, **options})


def mitigations_of(facts, slowness, plans=(), has_room=bool):
    return find_mitigations(RunPrediction(facts, slowness), plans or (facts.plan,), has_room)


def test_a_slow_rank_costs_its_time_and_balancing_gives_most_of_it_back():
    plan, slowness = even(1), slow((3, 1.9))
    model = RunPrediction(measured(plan), slowness)
    assert model.iteration_s(plan) == pytest.approx(10.0 + 8 * 0.9)
    balanced = model.balanced(plan)
    assert model.counts(balanced) == (9, 9, 9, 5)
    assert model.iteration_s(balanced) == pytest.approx(10.0 + 5 * 1.9 - 8)
    (found,) = mitigations_of(measured(plan), slowness)
    assert found.mitigation is Mitigation.REBALANCE
    assert found.effect == "moved 3 of 32 micro-batches away"
    assert found.iteration_s == model.iteration_s(balanced)
    two = tuple(replace(p, microbatch_size=2) for p in plan.pipelines)
    assert model.counts(model.balanced(replace(plan, pipelines=two))) == (9, 9, 9, 5)
    sized = replace(plan, pipelines=(*plan.pipelines[:1], *two[1:]))
    assert model.balanced(sized) == sized, "other numbers would change the sizes"


def test_a_slow_gradient_link_is_left_by_both_its_ends():
    plan, slowness = even(2), slow(((0, 2), 200.0))
    model = RunPrediction(measured(plan), slowness)
    (found,) = mitigations_of(measured(plan), slowness)
    assert found.mitigation is Mitigation.SWAP
    assert [p.ranks for p in found.plans[0].pipelines] == [(1, 0), (3, 2)]
    assert found.iteration_s < 0.5 * model.iteration_s(plan)
    assert mitigations_of(measured(plan), slowness, has_room=lambda plan: False) == ()
    # Moving one end alone helps nothing: what the other end holds belongs half to the first.
    one = move_ranks(plan, {0: 1, 1: 0})
    assert model.iteration_s(one) >= model.iteration_s(plan)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.data())
def test_a_swap_only_permutes_ranks_and_never_does_harm(num_stages, data):
    plan = even(num_stages)
    pairs = list(itertools.combinations(range(4), 2))
    ranks = data.draw(st.dictionaries(st.integers(0, 3), st.floats(1.1, 4.0), max_size=3))
    links = data.draw(st.lists(st.sampled_from(pairs), max_size=2, unique=True))
    findings = slow(*ranks.items(), *((pair, 50.0) for pair in links))
    probe_s = dict(enumerate(data.draw(st.permutations([1.0, 1.0, 1.5, 2.0]))))
    facts = measured(plan, probe_s=probe_s)
    assert RunPrediction(facts).iteration_s(plan) == pytest.approx(10.0), "as was measured"
    for found in mitigations_of(facts, findings):
        (swapped,) = found.plans
        assert sorted(swapped.ranks) == sorted(plan.ranks)
        assert found.iteration_s <= RunPrediction(facts, findings).iteration_s(plan)


def cut_as(plan: ParallelPlan) -> list[list[int]]:
    return [[len(stage.layers) for stage in p.stages] for p in plan.pipelines]


@pytest.mark.parametrize("head_s", [0.0, 0.5, 1.0])
def test_stages_are_cut_anew_for_slow_ranks_and_for_what_the_last_stage_has_besides(head_s):
    plan = even(2, world_size=2)
    last = Observation(step=0, forward_s=0.3 + 0.3 * head_s, backward_s=0.7 + 0.7 * head_s)
    facts = measured(plan, places={0: Observation(step=0, forward_s=0.3, backward_s=0.7), 1: last})
    # A layer takes half a second.
    for ratio, rank in ((3.0, 0), (1.0, 0), (3.0, 1)):
        slowness = slow((rank, ratio)) if ratio > 1 else []
        model = RunPrediction(facts, slowness)
        cut = model.with_layers_moved(plan)
        factors = (ratio, 1.0) if rank == 0 else (1.0, ratio)
        times = [
            max(factors[0] * n / 2, factors[1] * ((NUM_LAYERS - n) / 2 + head_s))
            for n in range(1, NUM_LAYERS)
        ]
        assert times[cut_as(cut)[0][0] - 1] == pytest.approx(min(times))
        steps = {m.mitigation: m for m in mitigations_of(facts, slowness)}
        if cut != plan:
            found = steps[Mitigation.REPLAN]
            assert found.plans == (cut,)
            assert found.iteration_s <= model.iteration_s(plan)
            assert "cut stages to" in found.effect
    assert cut_as(RunPrediction(facts).with_layers_moved(plan)) == [[3, 1] if head_s else [2, 2]]


def test_a_data_module_gives_every_pipeline_the_same_time_and_its_plans_change_alike():
    (found,) = mitigations_of(measured(even(1), is_assigned=True), slow((3, 2.0)))
    assert found.mitigation is Mitigation.REBALANCE
    # Of the 10 s the pipelines take 8: four of them at speeds 1, 1, 1 and 1/2.
    assert found.iteration_s == pytest.approx((10.0 - 8.0) + 8.0 * 4 / 3.5)
    assert found.slowdowns == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}
    assert found.plans == found.first_plans == (even(1),)
    plans, slowness = (even(2), even(4), even(1)), slow(((0, 2), 200.0))
    (found,) = mitigations_of(measured(plans[0], is_assigned=True), slowness, plans)
    assert found.mitigation is Mitigation.SWAP
    assert [[p.ranks for p in plan.pipelines] for plan in found.plans] == [
        [(1, 0), (3, 2)],
        [(1, 0, 3, 2)],
        [(1,), (0,), (3,), (2,)],
    ]
    assert found.first_plans == plans


def test_a_rank_that_takes_a_faster_ones_place_takes_its_own_time_there_and_is_given_less():
    """What micro-batches weigh in a place isn't the rank's doing."""
    places = {
        rank: Observation(step=0, forward_s=0.3 * work, backward_s=0.7 * work, work=work)
        for rank, work in enumerate((1.0, 2.0, 1.0, 2.0))
    }
    probe_s = {0: 1.0, 1: 3.0, 2: 1.0, 3: 3.0}
    facts = measured(even(2), places=places, probe_s=probe_s, is_assigned=True)
    model = RunPrediction(facts, slow((1, 2.0)))
    swap = partial(move_ranks, taken_by={0: 1, 1: 0})
    before, after = (model.paces(plan) for plan in (facts.plan, swap(facts.plan)))
    # Each place has half of the layers.
    assert before[0] == before[1] == pytest.approx(2.0)
    assert (after[0], after[1]) == pytest.approx((2.0 / 3, 6.0))
    found = mitigation_of(model, (even(2),), Mitigation.SWAP, swap, "")
    assert found.slowdowns == {0: pytest.approx(1 / 3), 1: 6.0, 2: 1.0, 3: 1.0}
    assert found.factors == {0: pytest.approx(3.0), 1: pytest.approx(1 / 3), 2: 1.0, 3: 1.0}


@pytest.mark.parametrize(
    ("rank_ratio", "link_ratio", "excess_s", "kept"),
    [
        (1.25, 400.0, math.nan, [FindingKind.LINK]),
        (3.0, 400.0, math.nan, list(KINDS)),
        (3.0, 1.6, math.nan, [FindingKind.HOST]),
        (1.25, None, 2.0, [FindingKind.HOST]),
        (1.25, None, 60.0, []),
    ],
)
def test_what_explains_little_of_a_slowdown_is_no_cause(rank_ratio, link_ratio, excess_s, kept):
    ratios = (rank_ratio, (1,)), (link_ratio, (0, 2))
    pairs = zip(KINDS, ratios, strict=True)
    findings = [Finding(kind=k, ranks=ranks, ratio=r) for k, (r, ranks) in pairs if r]
    found = true_causes(findings, measured(even(2)), excess_s=excess_s)
    assert [finding.kind for finding in found] == kept
    # Iterations are no longer than before.
    found = true_causes(findings, measured(even(2)), excess_s=0.2, known=findings[:1])
    assert {*found} <= {*findings[:1]}


def test_two_devices_that_are_equally_slow_are_both_causes():
    findings = [Finding(kind=FindingKind.DEVICE, ranks=(r,), ratio=2.0) for r in (1, 3)]
    assert true_causes(findings, measured(even(1))) == tuple(findings)
    assert true_causes(findings, None) == tuple(findings), "nothing is known of the run"
