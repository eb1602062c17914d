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


def run_slowly(policy, num_iterations, **seconds):
    """Return the steps taken in iterations of 2 s instead of 1 s, each after how many of them."""
    options = [
        PossibleMitigation(mitigation=Mitigation[name], iteration_s=left, plans=(PLAN,))
        for name, left in seconds.items()
    ]
    policy.begin(healthy_s=1.0)
    decisions = [policy.decide(unmitigated_s=2.0, possible=options) for _ in range(num_iterations)]
    taken = [(i, d) for i, d in enumerate(decisions, 1) if d.kind is DecisionKind.APPLY]
    return [(number, decision.choice.mitigation.value) for number, decision in taken]


@pytest.mark.parametrize(
    ("config", "seconds", "taken"),
    [
        ({"rebalance_cost_s": 3.0}, {"REBALANCE": 1.0}, [(3, "S2")]),
        ({"rebalance_cost_s": 0.1}, {"REBALANCE": 2.0}, []),
        (
            {"rebalance_cost_s": 1.0, "restart_cost_s": 50.0},
            {"REBALANCE": 1.5, "REPLAN": 1.2, "SWAP": 1.3, "RESTART": 1.0},
            [(2, "S2"), (17, "S2b")],
        ),
        ({"allowed": (STEPS[1],)}, {"REBALANCE": 1.0, "SWAP": 1.0, "RESTART": 1.0}, [(5, "S3")]),
    ],
)
def test_a_step_is_taken_when_the_time_it_would_have_saved_reaches_its_cost(config, seconds, taken):
    policy = MitigationPolicy(PolicyConfig(**config))
    assert run_slowly(policy, 60, **seconds) == taken
    undo, last = policy.end(), taken[-1][1] if taken else "S1"
    assert undo.choice.mitigation.value == last
    assert undo.kind is (DecisionKind.UNDO if taken else DecisionKind.KEEP)
    assert policy.mitigation is Mitigation.IGNORE
    assert policy.end().kind is DecisionKind.KEEP


def test_measured_costs_replace_guesses():
    policy = MitigationPolicy(PolicyConfig(swap_cost_s=8.0))
    for _ in range(20):
        policy.record_cost(Mitigation.SWAP, 2.0)
    assert run_slowly(policy, 3, SWAP=1.0) == [(3, "S3")]


def test_a_cost_of_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="above 0"):
        PolicyConfig(swap_cost_s=0.0)
