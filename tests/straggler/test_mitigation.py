"""Laws of the ski-rental policy: at most twice the best in hindsight, only allowed moves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler import DecisionKind, Mitigation, PolicyConfig
from lightning_hetero.straggler.mitigation import MitigationPolicy, PossibleMitigation
from tests.straggler.ski_rental import RandomFault, hindsight_s, online_s

PLAN = ParallelPlan.even(world_size=2, num_layers=2)
STEPS = (Mitigation.REBALANCE, Mitigation.SWAP, Mitigation.RESTART)


@st.composite
def faults(draw):
    """Draw a fault whose strength changes as it goes, and how much of it each step removes."""
    healthy_s = draw(st.floats(0.1, 10.0))
    slow_s = [healthy_s * r for r in draw(st.lists(st.floats(1.0, 4.0), min_size=1, max_size=60))]
    steps = draw(st.lists(st.sampled_from(STEPS), unique=True, max_size=3))
    left = {step: draw(st.floats(0.0, 1.2)) for step in steps}
    costs_s = tuple(draw(st.floats(0.01, 100.0)) for _ in STEPS)
    return RandomFault(healthy_s=healthy_s, slow_s=tuple(slow_s), left=left, costs_s=costs_s)


@settings(max_examples=200, deadline=None)
@given(faults())
def test_never_pays_more_than_twice_the_best_decision_in_hindsight(fault):
    assert online_s(fault) <= 2.0 * hindsight_s(fault) * (1 + 1e-9) + 1e-9


def slow_run(policy, num_iterations, options, *, healthy_s=1.0, slow_s=2.0):
    policy.begin(healthy_s=healthy_s)
    return [policy.decide(unmitigated_s=slow_s, possible=options) for _ in range(num_iterations)]


def test_a_step_is_taken_when_the_time_lost_reaches_its_cost():
    policy = MitigationPolicy(PolicyConfig(rebalance_cost_s=3.0))
    options = [PossibleMitigation(mitigation=Mitigation.REBALANCE, iteration_s=1.0)]
    decisions = slow_run(policy, 4, options)
    kinds = [decision.kind for decision in decisions]
    assert kinds == [DecisionKind.KEEP] * 2 + [DecisionKind.APPLY, DecisionKind.KEEP]
    assert "3.00 s lost over 3 slow iterations" in decisions[2].reason
    assert policy.mitigation is Mitigation.REBALANCE


def test_steps_are_climbed_in_order_of_cost_and_undone_at_the_end():
    policy = MitigationPolicy(
        PolicyConfig(rebalance_cost_s=1.0, swap_cost_s=5.0, restart_cost_s=50.0)
    )
    options = [
        PossibleMitigation(mitigation=Mitigation.REBALANCE, iteration_s=1.5),
        PossibleMitigation(mitigation=Mitigation.SWAP, iteration_s=1.2, plans=(PLAN,)),
        PossibleMitigation(mitigation=Mitigation.RESTART, iteration_s=1.0),
    ]
    taken = [
        d.choice.mitigation for d in slow_run(policy, 60, options) if d.kind is DecisionKind.APPLY
    ]
    assert taken == [Mitigation.REBALANCE, Mitigation.SWAP]
    undo = policy.end()
    assert (undo.kind, undo.choice.mitigation) == (DecisionKind.UNDO, Mitigation.SWAP)
    assert policy.mitigation is Mitigation.IGNORE
    assert policy.end().kind is DecisionKind.KEEP


def test_a_step_that_does_not_help_is_never_taken():
    policy = MitigationPolicy(PolicyConfig(rebalance_cost_s=0.1))
    options = [PossibleMitigation(mitigation=Mitigation.REBALANCE, iteration_s=2.0)]
    assert all(d.kind is DecisionKind.KEEP for d in slow_run(policy, 500, options))


def test_a_step_that_is_not_allowed_is_never_taken():
    policy = MitigationPolicy(PolicyConfig(allowed=(Mitigation.IGNORE, Mitigation.SWAP)))
    options = [PossibleMitigation(mitigation=step, iteration_s=1.0) for step in STEPS]
    taken = [
        d.choice.mitigation for d in slow_run(policy, 500, options) if d.kind is DecisionKind.APPLY
    ]
    assert taken == [Mitigation.SWAP]


def test_measured_costs_replace_guesses():
    policy = MitigationPolicy(PolicyConfig(swap_cost_s=8.0))
    for _ in range(20):
        policy.record_cost(Mitigation.SWAP, 2.0)
    options = [PossibleMitigation(mitigation=Mitigation.SWAP, iteration_s=1.0)]
    taken = [decision.kind for decision in slow_run(policy, 3, options)]
    assert taken == [DecisionKind.KEEP, DecisionKind.KEEP, DecisionKind.APPLY]


def test_a_cost_of_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="above 0"):
        PolicyConfig(swap_cost_s=0.0)
