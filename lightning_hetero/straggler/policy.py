"""Decide when to mitigate a straggler, and by which of the four mitigations (*steps*): ski rental.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.events import DecisionKind, Mitigation
from lightning_hetero.straggler.mitigation import PossibleMitigation

__all__ = ["Decision", "MitigationPolicy", "PolicyConfig"]

_LADDER = tuple(Mitigation)
_NOTHING = PossibleMitigation(mitigation=Mitigation.IGNORE)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do before the next iteration, and why; the leader sends it to them."""

    kind: DecisionKind
    choice: PossibleMitigation
    """The mitigation that is applied, kept or undone."""
    reason: str
    """The figures that led to it, in one line."""
    dry_run: bool = False
    """Whether to report it only."""

    @property
    def mitigation(self) -> Mitigation:
        """The step that is applied, kept or undone."""
        return self.choice.mitigation


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """First guesses of the steps' costs, used until these are measured; and the allowed steps.

    Raises:
        ConfigurationError: A cost isn't positive.
    """

    rebalance_cost_s: float = 0.5
    """First guess for S2 and its undoing, seconds: computing new counts and one new table."""
    swap_cost_s: float = 5.0
    """First guess for S3 and its undoing, seconds: a new plan's tables, buffers and first pull."""
    restart_cost_s: float | None = None
    """Cost of S4, seconds: checkpoint, new processes, loading. None takes the time of the run's
    newest restart, or change of ranks in place, and 300 before there was one."""
    allowed: tuple[Mitigation, ...] = _LADDER
    """Steps that may be taken."""
    dry_run: bool = False
    """Report decisions without taking them."""

    def __post_init__(self) -> None:
        costs = (self.rebalance_cost_s, self.swap_cost_s, self.known_restart_cost_s)
        if any(not cost > 0.0 for cost in costs):
            raise ConfigurationError(
                f"Mitigation costs are {costs} s; each must be above 0. Forbid a step by leaving "
                "it out of `allowed`."
            )

    @property
    def known_restart_cost_s(self) -> float:
        """Cost of S4, seconds; 300 while nothing is known."""
        return 300.0 if self.restart_cost_s is None else self.restart_cost_s


class MitigationPolicy:
    """Ski rental: `begin` once per fault, `decide` before each slow iteration, `end` once.

    It changes nothing itself: the caller carries out a decision of kind APPLY or UNDO and reports
    its cost with `record_cost`. Only the leader has a policy (see `watch`). During a fault it only
    climbs to higher steps; the end of the fault undoes them.
    """

    def __init__(self, config: PolicyConfig | None = None) -> None:
        self.config = config or PolicyConfig()
        self._costs_s: dict[Mitigation, float] = {
            Mitigation.REBALANCE: self.config.rebalance_cost_s,
            Mitigation.SWAP: self.config.swap_cost_s,
            Mitigation.RESTART: self.config.known_restart_cost_s,
        }
        self._in_force: PossibleMitigation | None = None
        self._healthy_s = 0.0
        self._num_slow = 0
        self._lost_s: dict[Mitigation, float] = {}

    @property
    def mitigation(self) -> Mitigation:
        """The step in force (in a dry run: the step advised)."""
        return (self._in_force or _NOTHING).mitigation

    def cost_s(self, mitigation: Mitigation) -> float:
        """Return the cost of a step, seconds, as known so far."""
        return self._costs_s.get(mitigation, 0.0)

    def record_cost(self, mitigation: Mitigation, cost_s: float) -> None:
        """Take in a step's measured cost: the known cost becomes the mean of both."""
        if mitigation is Mitigation.IGNORE or not cost_s > 0.0:
            raise ConfigurationError(
                f"{mitigation.value} can't cost {cost_s} s; record a positive time for S2 to S4."
            )
        self._costs_s[mitigation] = 0.5 * (self._costs_s[mitigation] + cost_s)

    def begin(self, *, healthy_s: float) -> None:
        """Note that a fault began; `healthy_s` is the iteration time without it.

        A second fault before the first has ended only climbs further.
        """
        if self._in_force is None:
            self._in_force = _NOTHING
            self._healthy_s = healthy_s
            self._num_slow = 0
            self._lost_s = dict.fromkeys(_LADDER, 0.0)

    def decide(
        self, *, unmitigated_s: float, possible: Sequence[PossibleMitigation] = ()
    ) -> Decision:
        """Decide under which step the next iteration, known to be slow, runs.

        Args:
            unmitigated_s: Iteration time with the fault and without any mitigation, seconds.
            possible: The mitigations that are possible now; S1 always is and need not be named.

        Raises:
            ConfigurationError: No fault began.
        """
        if self._in_force is None:
            raise ConfigurationError("decide() was called without a fault. Call begin() first.")
        self._num_slow += 1
        choices = {item.mitigation: item for item in possible}
        self._charge(unmitigated_s, choices)
        present = self.mitigation
        totals = self._totals(choices)
        best = min(totals, key=lambda step: (totals[step], -_LADDER.index(step)))
        if _LADDER.index(best) <= _LADDER.index(present):
            return self._decision(DecisionKind.KEEP, self._in_force, self._why_wait(totals))
        reason = self._why_climb(present, best, totals)
        self._in_force = choices[best]
        return self._decision(DecisionKind.APPLY, choices[best], reason)

    def end(self) -> Decision:
        """Note that the fault has ended; decide to undo the step in force, if there is one."""
        undone, self._in_force = self._in_force or _NOTHING, None
        kind = DecisionKind.KEEP
        if undone.mitigation is Mitigation.IGNORE:
            reason = "the cause ended and nothing was changed"
        elif undone.mitigation is Mitigation.RESTART:
            reason = "the cause ended; a restart is not undone"
        else:
            kind = DecisionKind.UNDO
            reason = (
                f"the cause ended after {self._num_slow} slow iterations; "
                f"{undone.mitigation.value} is no longer needed"
            )
        return self._decision(kind, undone, reason)

    def _charge(
        self, unmitigated_s: float, choices: Mapping[Mitigation, PossibleMitigation]
    ) -> None:
        """Add the coming iteration's loss to every step's account."""
        loss_s = max(0.0, unmitigated_s - self._healthy_s)
        for step in _LADDER:
            # A dearer step that does worse wouldn't be taken: the cheaper one's loss counts.
            if step in choices:
                loss_s = min(loss_s, max(0.0, choices[step].iteration_s - self._healthy_s))
            self._lost_s[step] += loss_s

    def _totals(self, choices: Collection[Mitigation]) -> dict[Mitigation, float]:
        """Return B_k + L_k of the steps that are possible, from the present one up."""
        possible = set(choices) & set(self.config.allowed)
        total_s, totals = 0.0, {}
        for step in _LADDER:
            if step in possible or step in (Mitigation.IGNORE, self.mitigation):
                total_s += self.cost_s(step)
                totals[step] = total_s + self._lost_s[step]
        return totals

    def _why_wait(self, totals: Mapping[Mitigation, float]) -> str:
        above = [s for s in totals if _LADDER.index(s) > _LADDER.index(self.mitigation)]
        lost_s = self._lost_s[Mitigation.IGNORE]
        if not above:
            return f"{lost_s:.2f} s lost so far; no further step is possible"
        step = min(above, key=lambda s: totals[s])
        saved_s = self._lost_s[self.mitigation] - self._lost_s[step]
        return (
            f"{lost_s:.2f} s lost so far, of which {step.value} would have saved "
            f"{saved_s:.2f} s: less than its cost of {self.cost_s(step):.2f} s"
        )

    def _why_climb(
        self, present: Mitigation, step: Mitigation, totals: Mapping[Mitigation, float]
    ) -> str:
        lost_s = self._lost_s[Mitigation.IGNORE]
        saved_s = self._lost_s[present] - self._lost_s[step]
        cost_s = totals[step] - self._lost_s[step] - (totals[present] - self._lost_s[present])
        return (
            f"{lost_s:.2f} s lost over {self._num_slow} slow iterations, of which "
            f"{step.value} would have saved {saved_s:.2f} s: its cost of {cost_s:.2f} s or more"
        )

    def _decision(self, kind: DecisionKind, choice: PossibleMitigation, reason: str) -> Decision:
        return Decision(kind=kind, choice=choice, reason=reason, dry_run=self.config.dry_run)
