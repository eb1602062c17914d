"""Play random faults against the policy, and against the best decision made in hindsight."""

from dataclasses import dataclass

from lightning_hetero.straggler import DecisionKind, Mitigation, PolicyConfig
from lightning_hetero.straggler.mitigation import MitigationPolicy, PossibleMitigation

STEPS = (Mitigation.REBALANCE, Mitigation.SWAP, Mitigation.RESTART)


@dataclass(frozen=True, kw_only=True)
class RandomFault:
    """A fault: iteration times without any step, and the share of the loss each step leaves."""

    healthy_s: float
    slow_s: tuple[float, ...]
    left: dict[Mitigation, float]
    costs_s: tuple[float, float, float]

    def loss_s(self, step: Mitigation, iteration: int) -> float:
        """Return what an iteration loses under a step."""
        share = 1.0 if step is Mitigation.IGNORE else self.left[step]
        return share * (self.slow_s[iteration] - self.healthy_s)

    def cost_s(self, step: Mitigation) -> float:
        """Return what taking a step costs."""
        return 0.0 if step is Mitigation.IGNORE else self.costs_s[STEPS.index(step)]


def online_s(fault: RandomFault) -> float:
    """Return lost time plus costs of the policy, which doesn't know when the fault ends."""
    rebalance_s, swap_s, restart_s = fault.costs_s
    policy = MitigationPolicy(
        PolicyConfig(rebalance_cost_s=rebalance_s, swap_cost_s=swap_s, restart_cost_s=restart_s)
    )
    policy.begin(healthy_s=fault.healthy_s)
    total_s, step = 0.0, Mitigation.IGNORE
    for iteration, slow_s in enumerate(fault.slow_s):
        options = [
            PossibleMitigation(
                mitigation=m, iteration_s=fault.healthy_s + fault.loss_s(m, iteration)
            )
            for m in fault.left
        ]
        decision = policy.decide(unmitigated_s=slow_s, possible=options)
        if decision.kind is DecisionKind.APPLY:
            step = decision.choice.mitigation
            total_s += fault.cost_s(step)
        total_s += fault.loss_s(step, iteration)
    return total_s


def hindsight_s(fault: RandomFault, *, may_jump: bool = False) -> float:
    """Return lost time plus costs of the best step to climb to at once, knowing the whole fault.

    Climbing to a step pays for the steps below it, too; with `may_jump` it pays for itself alone.
    """
    best_s = sum(fault.loss_s(Mitigation.IGNORE, i) for i in range(len(fault.slow_s)))
    below_s = 0.0
    for step in (s for s in STEPS if s in fault.left):
        loss_s = sum(fault.loss_s(step, i) for i in range(len(fault.slow_s)))
        cost_s = fault.cost_s(step)
        best_s = min(best_s, cost_s + loss_s + (0.0 if may_jump else below_s))
        below_s += cost_s
    return best_s
