"""Decide when to do something about a straggler, and how much: ski rental over four steps.

Greyhound's Algorithm 1: begin with the cheapest step, S1 (do nothing), and climb when the time lost
so far reaches what the next step costs. How long the fault lasts is unknown; this rule pays at most
twice the best decision made in hindsight, under these terms:

- a decision in hindsight climbs to step k at once and pays the costs of all steps up to k,
  B_k = c_2 + … + c_k; with L_k(n) the time that n slow iterations lose under step k, the best one
  pays OPT(n) = min_k B_k + L_k(n);
- before slow iteration n we climb to the highest minimiser k of B_k + L_k(n), at once or not: the
  step is taken as soon as the time it would have saved reaches its cost.

Then the lost time is at most OPT(n), because OPT grows by at least the present step's loss in
every iteration, and the costs paid are at most OPT(n), because B_k ≤ B_k + L_k(n). Jumping over
steps pays less than B_k, never more. (The slides promise twice for one choice, rent or buy. If
hindsight could jump for c_k alone, this were multislope ski rental with full costs, where no rule
can promise twice: with any number of steps none is better than 3.62 times, as Damaschke showed.
The benchmark measures it.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lightning_hetero.core.errors import ConfigurationError

__all__ = [
    "Decision",
    "DecisionKind",
    "Mitigation",
    "MitigationPolicy",
    "Option",
    "PolicyConfig",
    "PolicyState",
]


class Mitigation(StrEnum):
    """Greyhound's four steps, cheapest first."""

    IGNORE = "S1"
    """Do nothing."""
    REBALANCE = "S2"
    """Give slow pipelines fewer micro-batches."""
    SWAP = "S3"
    """Swap places in the plan."""
    RESTART = "S4"
    """Restart from a checkpoint without the bad node."""


_LADDER = tuple(Mitigation)


class PolicyState(StrEnum):
    """What the policy is doing now."""

    HEALTHY = "healthy"
    IGNORING = "ignoring"
    REBALANCED = "rebalanced"
    SWAPPED = "swapped"
    RESTARTING = "restarting"


_STATE_OF = {
    Mitigation.IGNORE: PolicyState.IGNORING,
    Mitigation.REBALANCE: PolicyState.REBALANCED,
    Mitigation.SWAP: PolicyState.SWAPPED,
    Mitigation.RESTART: PolicyState.RESTARTING,
}
_STEP_OF = {state: step for step, state in _STATE_OF.items()} | {
    PolicyState.HEALTHY: Mitigation.IGNORE
}

_TRANSITIONS: Mapping[PolicyState, frozenset[PolicyState]] = {
    PolicyState.HEALTHY: frozenset({PolicyState.IGNORING}),
    PolicyState.IGNORING: frozenset(
        {
            PolicyState.HEALTHY,
            PolicyState.REBALANCED,
            PolicyState.SWAPPED,
            PolicyState.RESTARTING,
        }
    ),
    PolicyState.REBALANCED: frozenset(
        {PolicyState.HEALTHY, PolicyState.SWAPPED, PolicyState.RESTARTING}
    ),
    PolicyState.SWAPPED: frozenset({PolicyState.HEALTHY, PolicyState.RESTARTING}),
    PolicyState.RESTARTING: frozenset({PolicyState.HEALTHY}),
}
"""Which state may follow which: a fault only climbs, its end leads back to HEALTHY."""


class DecisionKind(StrEnum):
    """What the caller is to do."""

    KEEP = "keep"
    """Nothing changes."""
    APPLY = "apply"
    """Take the step now, at this iteration boundary."""
    UNDO = "undo"
    """Return to the plan without a mitigation."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A step that is possible now, and the iteration time it is expected to give."""

    mitigation: Mitigation
    """The step; S1 is always possible and need not be named."""
    iteration_s: float
    """Predicted iteration time under it while the fault lasts, seconds."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do before the next iteration, and why."""

    kind: DecisionKind
    mitigation: Mitigation
    """The step that is applied, kept or undone."""
    reason: str
    """The figures behind it, in one line."""
    dry_run: bool = False
    """Only report it."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What steps cost until they have been measured, and which are allowed.

    Raises:
        ConfigurationError: A cost isn't positive.
    """

    rebalance_cost_s: float = 0.5
    """First guess for S2 and its undoing, seconds: computing new counts and one new table."""
    swap_cost_s: float = 5.0
    """First guess for S3 and its undoing, seconds: a new plan's tables, buffers and first pull."""
    restart_cost_s: float = 300.0
    """First guess for S4, seconds: checkpoint, new processes, loading."""
    allowed: tuple[Mitigation, ...] = _LADDER
    """Steps that may be taken."""
    dry_run: bool = False
    """Report decisions without taking them."""

    def __post_init__(self) -> None:
        costs = (self.rebalance_cost_s, self.swap_cost_s, self.restart_cost_s)
        if any(not cost > 0.0 for cost in costs):
            raise ConfigurationError(
                f"Mitigation costs are {costs} s; each must be above 0. Forbid a step by leaving "
                "it out of `allowed`."
            )


class MitigationPolicy:
    """The state machine: `begin` once per fault, `decide` before each slow iteration, `end` once.

    It changes nothing itself: the caller carries out a decision of kind APPLY or UNDO and reports
    what it cost with `record_cost`. Every rank may run its own copy on the same numbers.
    """

    def __init__(self, config: PolicyConfig | None = None) -> None:
        self.config = config or PolicyConfig()
        self._state = PolicyState.HEALTHY
        self._costs_s: dict[Mitigation, float] = {
            Mitigation.REBALANCE: self.config.rebalance_cost_s,
            Mitigation.SWAP: self.config.swap_cost_s,
            Mitigation.RESTART: self.config.restart_cost_s,
        }
        self._healthy_s = 0.0
        self._num_slow = 0
        self._lost_s: dict[Mitigation, float] = {}

    @property
    def state(self) -> PolicyState:
        """The present state."""
        return self._state

    @property
    def mitigation(self) -> Mitigation:
        """The step in force (in a dry run: the step advised)."""
        return _STEP_OF[self._state]

    @property
    def lost_s(self) -> float:
        """Time that this fault would have lost so far had nothing been done, seconds."""
        return self._lost_s.get(Mitigation.IGNORE, 0.0)

    def cost_s(self, mitigation: Mitigation) -> float:
        """Return what a step costs, as measured so far, seconds."""
        return self._costs_s.get(mitigation, 0.0)

    def record_cost(self, mitigation: Mitigation, cost_s: float) -> None:
        """Take in what a step really cost: half of it and half of what was known."""
        if mitigation is Mitigation.IGNORE or not cost_s > 0.0:
            raise ConfigurationError(
                f"{mitigation.value} can't cost {cost_s} s; record a positive time for S2 to S4."
            )
        self._costs_s[mitigation] = 0.5 * (self._costs_s[mitigation] + cost_s)

    def begin(self, *, healthy_s: float) -> None:
        """Note that a fault began; `healthy_s` is the iteration time without it.

        A second fault before the first has ended only climbs further.
        """
        if self._state is PolicyState.HEALTHY:
            self._healthy_s = healthy_s
            self._num_slow = 0
            self._lost_s = dict.fromkeys(_LADDER, 0.0)
            self._move(PolicyState.IGNORING)

    def decide(self, *, unmitigated_s: float, options: Sequence[Option] = ()) -> Decision:
        """Decide what the next iteration, known to be slow, runs under.

        Args:
            unmitigated_s: Iteration time with the fault and without any step, seconds.
            options: Steps possible now with their predicted iteration times.
        """
        if self._state is PolicyState.HEALTHY:
            raise ConfigurationError("decide() was called without a fault. Call begin() first.")
        self._num_slow += 1
        self._charge(unmitigated_s, options)
        present = self.mitigation
        totals = self._totals(options)
        best = min(totals, key=lambda step: (totals[step], -_LADDER.index(step)))
        if _LADDER.index(best) <= _LADDER.index(present):
            return self._decision(DecisionKind.KEEP, present, self._why_wait(totals))
        reason = self._why_climb(present, best, totals)
        self._move(_STATE_OF[best])
        return self._decision(DecisionKind.APPLY, best, reason)

    def end(self) -> Decision:
        """Note that the cause ended; undo what was done."""
        undone = self.mitigation
        if self._state is PolicyState.HEALTHY or undone is Mitigation.IGNORE:
            kind, reason = DecisionKind.KEEP, "the cause ended and nothing was changed"
        elif undone is Mitigation.RESTART:
            kind, reason = DecisionKind.KEEP, "the cause ended; a restart is not undone"
        else:
            kind = DecisionKind.UNDO
            reason = (
                f"the cause ended after {self._num_slow} slow iterations; "
                f"{undone.value} is no longer needed"
            )
        if self._state is not PolicyState.HEALTHY:
            self._move(PolicyState.HEALTHY)
        return self._decision(kind, undone, reason)

    def _charge(self, unmitigated_s: float, options: Sequence[Option]) -> None:
        """Add the coming iteration's loss to every step's account."""
        predicted_s = {option.mitigation: option.iteration_s for option in options}
        loss_s = max(0.0, unmitigated_s - self._healthy_s)
        for step in _LADDER:
            # A dearer step that does worse would not be taken: the cheaper one's loss stands.
            if step in predicted_s:
                loss_s = min(loss_s, max(0.0, predicted_s[step] - self._healthy_s))
            self._lost_s[step] += loss_s

    def _totals(self, options: Sequence[Option]) -> dict[Mitigation, float]:
        """Return B_k + L_k of the steps that are possible, from the present one up."""
        possible = {option.mitigation for option in options} & set(self.config.allowed)
        total_s, totals = 0.0, {}
        for step in _LADDER:
            if step in possible or step in (Mitigation.IGNORE, self.mitigation):
                total_s += self.cost_s(step)
                totals[step] = total_s + self._lost_s[step]
        return totals

    def _why_wait(self, totals: Mapping[Mitigation, float]) -> str:
        above = [s for s in totals if _LADDER.index(s) > _LADDER.index(self.mitigation)]
        if not above:
            return f"{self.lost_s:.2f} s lost so far; no further step is possible"
        step = min(above, key=lambda s: totals[s])
        saved_s = self._lost_s[self.mitigation] - self._lost_s[step]
        return (
            f"{self.lost_s:.2f} s lost so far, of which {step.value} would have saved "
            f"{saved_s:.2f} s: less than its cost of {self.cost_s(step):.2f} s"
        )

    def _why_climb(
        self, present: Mitigation, step: Mitigation, totals: Mapping[Mitigation, float]
    ) -> str:
        saved_s = self._lost_s[present] - self._lost_s[step]
        cost_s = totals[step] - self._lost_s[step] - (totals[present] - self._lost_s[present])
        return (
            f"{self.lost_s:.2f} s lost over {self._num_slow} slow iterations, of which "
            f"{step.value} would have saved {saved_s:.2f} s: its cost of {cost_s:.2f} s or more"
        )

    def _decision(self, kind: DecisionKind, step: Mitigation, reason: str) -> Decision:
        return Decision(kind=kind, mitigation=step, reason=reason, dry_run=self.config.dry_run)

    def _move(self, state: PolicyState) -> None:
        assert state in _TRANSITIONS[self._state], (self._state, state)
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the accounts and the measured costs, JSON-ready."""
        return {
            "state": self._state.value,
            "costs_s": {step.value: cost for step, cost in self._costs_s.items()},
            "healthy_s": self._healthy_s,
            "num_slow": self._num_slow,
            "lost_s": {step.value: lost for step, lost in self._lost_s.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the policy that gave this state stood."""
        try:
            self._state = PolicyState(state["state"])
            self._costs_s = {Mitigation(k): float(v) for k, v in state["costs_s"].items()}
            self._healthy_s = float(state["healthy_s"])
            self._num_slow = int(state["num_slow"])
            self._lost_s = {Mitigation(k): float(v) for k, v in state["lost_s"].items()}
        except (KeyError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"The policy's state can't be read ({error!r}). Start with a fresh policy."
            ) from error
