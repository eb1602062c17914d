"""Laws of the ski-rental policy: at most twice the best in hindsight, only allowed moves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler import DecisionKind, Mitigation, PolicyConfig
from lightning_hetero.straggler.mitigation import MitigationPolicy, PossibleMitigation

PLAN = ParallelPlan.even(world_size=2, num_layers=2)
STEPS = (Mitigation.REBALANCE, Mitigation.SWAP, Mitigation.RESTART)


def policy_of(rebalance_s: float, swap_s: float, restart_s: float, **more) -> MitigationPolicy:
    costs = {"rebalance_cost_s": rebalance_s, "swap_cost_s": swap_s, "restart_cost_s": restart_s}
    return MitigationPolicy(PolicyConfig(**costs, **more))


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0.1, 10.0),
    st.lists(st.floats(1.0, 4.0), min_size=1, max_size=60),
    st.dictionaries(st.sampled_from(STEPS), st.floats(0.0, 1.2), max_size=3),
    st.tuples(*[st.floats(0.01, 100.0)] * 3),
)
def test_never_pays_more_than_twice_the_best_decision_in_hindsight(healthy_s, ratios, left, costs):
    """A fault's strength changes as it goes; `left` says how much of it each step leaves."""
    policy, cost_s = policy_of(*costs), dict(zip(STEPS, costs, strict=True))
    losses_s = [healthy_s * (ratio - 1.0) for ratio in ratios]
    policy.begin(healthy_s=healthy_s)
    total_s, share = 0.0, 1.0
    for loss_s in losses_s:
        options = [
            PossibleMitigation(mitigation=step, iteration_s=healthy_s + part * loss_s)
            for step, part in left.items()
        ]
        decision = policy.decide(unmitigated_s=healthy_s + loss_s, possible=options)
        if decision.kind is DecisionKind.APPLY:
            step = decision.choice.mitigation
            total_s, share = total_s + cost_s[step], left[step]
        total_s += share * loss_s
    # In hindsight one climbs to a step at once, and pays for those below it, too.
    best_s, below_s = sum(losses_s), 0.0
    for step in (step for step in STEPS if step in left):
        below_s += cost_s[step]
        best_s = min(best_s, below_s + left[step] * sum(losses_s))
    assert total_s <= 2.0 * best_s * (1 + 1e-9) + 1e-9


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
    ("policy", "seconds", "taken"),
    [
        (policy_of(3.0, 5.0, 300.0), {"REBALANCE": 1.0}, [(3, "S2")]),
        (policy_of(0.1, 5.0, 300.0), {"REBALANCE": 2.0}, []),
        (
            policy_of(1.0, 5.0, 50.0),
            {"REBALANCE": 1.5, "REPLAN": 1.2, "SWAP": 1.3, "RESTART": 1.0},
            [(2, "S2"), (17, "S2b")],
        ),
        (
            policy_of(1.0, 5.0, 300.0, allowed=(Mitigation.SWAP,)),
            {"REBALANCE": 1.0, "SWAP": 1.0, "RESTART": 1.0},
            [(5, "S3")],
        ),
    ],
)
def test_a_step_is_taken_when_the_time_it_would_have_saved_reaches_its_cost(policy, seconds, taken):
    assert run_slowly(policy, 60, **seconds) == taken
    undo, last = policy.end(), taken[-1][1] if taken else "S1"
    assert undo.choice.mitigation.value == last
    assert undo.kind is (DecisionKind.UNDO if taken else DecisionKind.KEEP)
    assert policy.end().kind is DecisionKind.KEEP


def test_measured_costs_replace_guesses_and_must_be_above_nothing():
    policy = policy_of(1.0, 8.0, 300.0)
    for _ in range(20):
        policy.record_cost(Mitigation.SWAP, 2.0)
    assert run_slowly(policy, 3, SWAP=1.0) == [(3, "S3")]
    with pytest.raises(ConfigurationError, match="above 0"):
        PolicyConfig(swap_cost_s=0.0)
