"""Laws of the ski-rental policy: at most twice the best in hindsight, only allowed moves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler import DecisionKind, Mitigation, PolicyConfig
from lightning_hetero.straggler.mitigation import FaultAccount, PossibleMitigation

PLAN = ParallelPlan.even(world_size=2, num_layers=2)
STEPS = (Mitigation.REBALANCE, Mitigation.SWAP, Mitigation.RESTART)


def costs_of(rebalance_s: float, swap_s: float, restart_s: float, **more) -> PolicyConfig:
    costs = {"rebalance_cost_s": rebalance_s, "swap_cost_s": swap_s, "restart_cost_s": restart_s}
    return PolicyConfig(**costs, **more)


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0.1, 10.0),
    st.floats(1.0, 4.0),
    st.integers(1, 60),
    st.dictionaries(st.sampled_from(STEPS), st.floats(0.0, 1.2), max_size=3),
    st.tuples(*[st.floats(0.01, 100.0)] * 3),
)
def test_never_pays_more_than_twice_the_best_decision_in_hindsight(
    healthy_s, ratio, num_slow, left, costs
):
    """`left` says how much of a fault's loss each step leaves."""
    cost_s, loss_s = dict(zip(STEPS, costs, strict=True)), healthy_s * (ratio - 1.0)
    possible = [
        PossibleMitigation(mitigation=step, iteration_s=healthy_s + part * loss_s)
        for step, part in left.items()
    ]
    fault = FaultAccount(healthy_s, healthy_s + loss_s, possible, costs_of(*costs).costs_s)
    total_s, share = 0.0, 1.0
    for _ in range(num_slow):
        decision = fault.decide()
        if decision.kind is DecisionKind.APPLY:
            step = decision.choice.mitigation
            total_s, share = total_s + cost_s[step], left[step]
        total_s += share * loss_s
    # In hindsight one climbs to a step at once, and pays for those below it, too.
    best_s, below_s = num_slow * loss_s, 0.0
    for step in (step for step in STEPS if step in left):
        below_s += cost_s[step]
        best_s = min(best_s, below_s + left[step] * num_slow * loss_s)
    assert total_s <= 2.0 * best_s * (1 + 1e-9) + 1e-9


def fault_of(config: PolicyConfig, **seconds: float) -> FaultAccount:
    """Return a fault under which iterations take 2 s instead of 1 s."""
    possible = [
        PossibleMitigation(mitigation=Mitigation[name], iteration_s=left, plans=(PLAN,))
        for name, left in seconds.items()
    ]
    return FaultAccount(1.0, 2.0, possible, config.costs_s)


def taken_by(fault: FaultAccount, num_iterations: int) -> list[tuple[int, str]]:
    """Return the steps taken in some iterations, each after how many of them."""
    decisions = [fault.decide() for _ in range(num_iterations)]
    taken = [(i, d) for i, d in enumerate(decisions, 1) if d.kind is DecisionKind.APPLY]
    return [(number, decision.choice.mitigation.value) for number, decision in taken]


@pytest.mark.parametrize(
    ("config", "seconds", "taken"),
    [
        (costs_of(3.0, 5.0, 300.0), {"REBALANCE": 1.0}, [(3, "S2")]),
        (costs_of(0.1, 5.0, 300.0), {"REBALANCE": 2.0}, []),
        (
            costs_of(1.0, 5.0, 50.0),
            {"REBALANCE": 1.5, "REPLAN": 1.2, "SWAP": 1.3, "RESTART": 1.0},
            [(2, "S2"), (17, "S2b")],
        ),
        (
            costs_of(1.0, 5.0, 300.0, allowed=(Mitigation.SWAP,)),
            {"REBALANCE": 1.0, "SWAP": 1.0, "RESTART": 1.0},
            [(5, "S3")],
        ),
    ],
)
def test_a_step_is_taken_when_the_time_it_would_have_saved_reaches_its_cost(config, seconds, taken):
    fault = fault_of(config, **seconds)
    assert taken_by(fault, 60) == taken
    undo, last = fault.end(), taken[-1][1] if taken else "S1"
    assert undo.choice.mitigation.value == last
    assert undo.kind is (DecisionKind.UNDO if taken else DecisionKind.KEEP)


def test_a_step_that_is_refused_leaves_the_one_below_it_in_force():
    fault = fault_of(costs_of(1.0, 5.0, 300.0), REBALANCE=1.5, SWAP=1.2)
    assert [step for _, step in taken_by(fault, 40)] == ["S2", "S3"]
    fault.refuse_plans()
    assert taken_by(fault, 40) == []
    undo = fault.end()
    assert (undo.kind, undo.choice.mitigation) == (DecisionKind.UNDO, Mitigation.REBALANCE)


def test_costs_must_be_above_nothing():
    with pytest.raises(ConfigurationError, match="above 0"):
        PolicyConfig(swap_cost_s=0.0)
