"""Decide, on one rank for all, whether the run is slow and what to do.

One rank, the *leader*, gets the notes of all ranks after every iteration and returns one order.
Ranks don't decide by themselves, because numbers that differ in the last bit could lead them to
different decisions. The order is to go on, to *diagnose* (all ranks report and probe together, and
the leader finds the cause), or to act.

A fault has a beginning and an end. If the run's level or a rank's pace changes (`paces`), the ranks
diagnose. What they find is mitigated by ski rental (`mitigation`). When a later diagnosis finds
nothing, the fault has ended, and the plan from before it runs again. Under the new plan a slow link
may carry so little that its recovery changes no time. So the link is probed again from time to
time, such that probes take at most `recheck_share` of the run's time.

Between faults the plan itself is judged. If, according to observed costs, other micro-batch shares
or stages would save a tenth of an iteration, and would have paid for their change since the plan
began, they are adopted permanently, unless iterations then become longer. If the user gave the
plan, they are only reported.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.straggler.events import (
    ActionEvent,
    ChangeEvent,
    ChangeKind,
    DecisionKind,
    Event,
    Finding,
    FindingKind,
    IterationEvent,
    Mitigation,
    format_message,
)
from lightning_hetero.straggler.locate import are_alike
from lightning_hetero.straggler.mitigation import (
    NOTHING,
    Decision,
    FaultAccount,
    PolicyConfig,
    PossibleMitigation,
)
from lightning_hetero.straggler.paces import LevelWatch

_SETTLING = 3
"""Number of iterations of a new plan, after its first, whose median is its iteration time."""
_DIAGNOSE_AGAIN = (8, 24)
"""After a diagnosis that found no cause, ranks diagnose again after these numbers of iterations."""
_JUDGE_PLAN_AFTER = (32, 128, 512, 2048)
"""Numbers of iterations from a plan's first one until the plan is judged. The time that a worse
plan costs grows with the run, so a change that didn't pay early may pay later."""
_LEAST_GAIN = 0.1
"""Least share of an iteration that a better plan must save."""
_RECENT = 4
"""Number of newest iterations that a diagnosis considers if no change is known, at which it would
begin."""


class Order(IntEnum):
    """The leader's order to all ranks, before the next step."""

    GO_ON = 0
    DIAGNOSE = 1
    """Report and probe, then get a decision from the leader."""
    ACT = 2
    """Get a decision from the leader."""
    JUDGE = 3
    """Report, so that the leader can judge the plan, then get a decision from it."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Options of the watch."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Costs of mitigations, and which are allowed."""
    dry_run: bool = False
    """Whether decisions are only reported."""
    replaces_plan: bool = True
    """Whether a plan is replaced if another one would be faster; if not, that is only reported."""
    recheck_share: float = 0.002
    """Share of the time that may be spent on probing a known slow link again."""


@dataclass
class _Transition:
    """A change of plan that isn't complete."""

    decision: Decision
    before_s: float
    call_s: float = 0.0
    times_s: list[float] = field(default_factory=list)


class RunWatch:
    """The leader's memory of the run and of its present fault, if any.

    In each iteration the caller passes all ranks' notes to `see`, which returns the order. After
    DIAGNOSE it passes the findings to `found`, after JUDGE the possible plans to `judge`. After
    these two, and after ACT, it carries out the decision that `next_decision` returns, if there is
    one, and then calls `began`.

    Args:
        config: Options of the watch.
        report: Receives events.
        say: Receives lines for people.
    """

    def __init__(
        self,
        config: WatchConfig,
        *,
        report: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._report = report
        self._say = say
        self._levels = LevelWatch()
        self._costs_s = config.policy.costs_s
        self._step = 0
        self._since_diagnosis_s = 0.0
        self._diagnosis_s = math.inf
        self._change: ChangeEvent | None = None
        self._healthy_s = math.nan
        self._fault: FaultAccount | None = None
        self._decision: Decision | None = None
        self._transition: _Transition | None = None
        self._said_why = False
        self._next_diagnoses: tuple[int, ...] = ()
        self._plan_since: float | None = None
        self.since_step = 0
        """The first step after the last change: a diagnosis considers no earlier step."""
        self.known: tuple[Finding, ...] = ()
        """Devices and links known to be slow."""

    @property
    def mitigation(self) -> Mitigation:
        """The mitigation in force."""
        return (NOTHING if self._fault is None else self._fault.in_force).mitigation

    def base_s(self) -> float:
        """Return the median iteration time before the fault, seconds; NaN if unknown."""
        known = math.isfinite(self._healthy_s)
        return self._healthy_s if known else self._levels.before_s(self.since_step)

    def excess_s(self) -> float:
        """Return by how many seconds iterations have become longer; NaN if unknown."""
        return self._levels.since_s(self.since_step) - self.base_s()

    def see(
        self,
        step: int,
        notes: ArrayLike,
        *,
        predicted_s: float | None = None,
        is_changing: bool = False,
    ) -> Order:
        """Receive all ranks' notes of an iteration; return the order.

        Args:
            step: The iteration.
            notes: A `RankNote` of each rank, or their array, (num_ranks, num_fields).
            predicted_s: Predicted seconds of the iteration, for the log.
            is_changing: Whether the iteration still ran under the plan from before the last action.
        """
        rows = np.asarray(notes, dtype=np.float64)
        iteration_s = float(rows[:, 0].max())
        self._step = step
        self._plan_since = step if self._plan_since is None else self._plan_since
        self._report(IterationEvent(step=step, iteration_s=iteration_s, predicted_s=predicted_s))
        self._since_diagnosis_s += iteration_s
        if self._transition is not None:
            # The time of a change of plan isn't the new plan's iteration time.
            usual_s = self._levels.skip(step, rows)
            if not is_changing:
                self._follow(self._transition, usual_s)
            return Order.ACT if self._decision else Order.GO_ON
        event = self._levels.see(step, rows, last=self._change, is_known=bool(self.known))
        if event is not None:
            return self._changed(event)
        if step in self._next_diagnoses and not self.known:
            return Order.DIAGNOSE
        is_due = step - self._plan_since in _JUDGE_PLAN_AFTER
        # A diagnosis of a change considers the steps from the change's beginning on.
        if is_due and not self.known and step > max(self._next_diagnoses, default=0):
            self.since_step = step - _RECENT + 1
            return Order.JUDGE
        has_link = any(finding.kind is FindingKind.LINK for finding in self.known)
        if has_link and self._diagnosis_s <= self._config.recheck_share * self._since_diagnosis_s:
            self.since_step = step - _RECENT + 1
            return Order.DIAGNOSE
        return Order.ACT if self._fault and self._decide(self._fault) else Order.GO_ON

    def _changed(self, event: ChangeEvent) -> Order:
        self._report(event)
        self._change = event
        self.since_step = event.onset_step
        self._next_diagnoses = ()
        if event.kind is ChangeKind.SLOWDOWN or self.known:
            return Order.DIAGNOSE
        self._say(format_message(event))
        return Order.GO_ON

    def found(
        self,
        findings: Sequence[Finding],
        find_mitigations: Callable[[], Sequence[PossibleMitigation]],
        *,
        where: str,
        diagnosis_s: float,
    ) -> None:
        """Receive the findings of a diagnosis.

        Args:
            findings: The slow devices and links.
            find_mitigations: Returns the possible mitigations; called only for new findings.
            where: The slow part of the run, for people: "pipeline 1".
            diagnosis_s: Seconds that the diagnosis took.
        """
        self._diagnosis_s, self._since_diagnosis_s = diagnosis_s, 0.0
        change = self._change
        assert change is not None
        if are_alike(findings, self.known):
            if not findings and not self._next_diagnoses:
                self._next_diagnoses = tuple(self._step + after for after in _DIAGNOSE_AGAIN)
                self._say(f"{format_message(change)}; no rank and no link stands out")
            return
        if self._fault is not None:
            self._end(change, self._fault)
        self.known = tuple(replace(finding, step=self._step) for finding in findings)
        if findings:
            self._change = replace(change, where=where, step=self._step)
            self._begin(self._change, find_mitigations())

    def judge(self, possible: Sequence[PossibleMitigation]) -> None:
        """Adopt the best of the plans that are possible without a fault, if it pays."""
        allowed = [item for item in possible if item.mitigation in self._costs_s]
        best = min(allowed, key=lambda item: item.iteration_s, default=None)
        if best is None or self._plan_since is None:
            return
        now_s, cost_s = self.base_s(), self._costs_s[best.mitigation]
        lost_s = (now_s - best.iteration_s) * (self._step - self._plan_since)
        if best.iteration_s <= (1.0 - _LEAST_GAIN) * now_s and lost_s >= cost_s:
            reason = f"another would have saved {lost_s:.2f} s, a change costs {cost_s:.2f} s"
            if not self._config.replaces_plan:
                reason += "; it was given, so it stays"
            choice = replace(best, is_lasting=True)
            self._take(Decision(kind=DecisionKind.APPLY, choice=choice, reason=reason), now_s)

    def _begin(self, change: ChangeEvent, possible: Sequence[PossibleMitigation]) -> None:
        for finding in self.known:
            self._report(finding)
        self._say(format_message(change, self.known))
        self._healthy_s = self.base_s()
        slow_s = self._levels.since_s(change.onset_step)
        self._fault = FaultAccount(self._healthy_s, slow_s, possible, self._costs_s)
        self._said_why = False
        # Time lost before the cause was known counts, too.
        for _ in range(change.onset_step, self._step):
            if self._decide(self._fault):
                break

    def _end(self, change: ChangeEvent, fault: FaultAccount) -> None:
        self._change = replace(
            change,
            kind=ChangeKind.RECOVERY,
            step=self._step,
            onset_step=self.since_step,
            before=fault.slow_s,
            after=self._healthy_s,
        )
        self._fault, decision = None, fault.end()
        was_done = decision.kind is DecisionKind.UNDO and not self._config.dry_run
        self._decision = decision if was_done else None
        if self._decision is None:
            self._note(decision, dry_run=self._config.dry_run)
            self._say(format_message(self._change))

    def _decide(self, fault: FaultAccount) -> bool:
        """Count one slow iteration of a fault; return whether there is something to do."""
        decision = fault.decide()
        if decision.kind is DecisionKind.APPLY:
            return self._take(decision, fault.slow_s)
        if not self._said_why:
            self._said_why = True
            self._note(decision, dry_run=self._config.dry_run)
        return False

    def _take(self, decision: Decision, now_s: float) -> bool:
        """Let the ranks carry out a decision; if none is needed, only report, and return False."""
        choice = decision.choice
        if self._config.dry_run or (choice.is_lasting and not self._config.replaces_plan):
            self._finish(decision, dry_run=True, before_s=now_s, after_s=choice.iteration_s)
            if choice.is_lasting:
                self._plan_since = -math.inf  # Once is enough.
            return False
        self._decision = decision
        return True

    def next_decision(self) -> Decision | None:
        """Return the decision that all ranks are to carry out now, only once; or None."""
        decision, self._decision = self._decision, None
        if decision is not None:
            before_s = self._levels.since_s(self.since_step)
            self._transition = _Transition(decision, before_s=before_s)
        return decision

    def began(self, call_s: float, *, refusal: str | None = None) -> None:
        """Note that a decision was carried out; from now on wait until its plan runs.

        Args:
            call_s: Seconds that it took.
            refusal: Why it couldn't be carried out; None if it was. If so, no plan is tried again.
        """
        change = self._transition
        assert change is not None
        change.call_s = call_s
        if refusal is not None:
            self._transition, self._plan_since = None, -math.inf
            if self._fault is not None:
                self._fault.refuse_plans()
            event = self._note(change.decision)
            self._say(f"{event.mitigation.value} can't be done here. {refusal}")
        elif not change.decision.choice.plans:
            # A restart: this run won't see its effect.
            self._transition = None
            self._finish(change.decision, before_s=change.before_s)

    def _follow(self, change: _Transition, iteration_s: float) -> None:
        """Collect the new plan's iteration times; once there are enough, report gain and cost."""
        change.times_s.append(iteration_s)
        if len(change.times_s) <= _SETTLING:
            return
        self._transition = None
        first_s, *others_s = change.times_s
        before_s, after_s = change.before_s, statistics.median(others_s)
        cost_s = change.call_s + max(0.0, first_s - after_s)
        decision, choice = change.decision, change.decision.choice
        if cost_s > 0.0:
            # The known cost becomes the mean of both.
            self._costs_s[choice.mitigation] += 0.5 * (cost_s - self._costs_s[choice.mitigation])
        self._levels.settle(forgets=not self.known)
        if not self.known:
            self._healthy_s = math.nan
        self._finish(decision, before_s=before_s, after_s=after_s, cost_s=cost_s)
        if choice.is_lasting:
            is_kept = decision.kind is DecisionKind.APPLY and after_s <= before_s
            self._plan_since = self._step if is_kept else -math.inf
            if decision.kind is DecisionKind.APPLY and not is_kept:
                reason = "iterations have become longer"
                self._decision = replace(decision, kind=DecisionKind.UNDO, reason=reason)

    def _finish(self, decision: Decision, **more: Any) -> None:
        """Report a mitigation that was applied or undone, or would have been in a dry run."""
        event = self._note(decision, **more)
        if decision.choice.is_lasting or self._change is None:
            self._say(f"step {self._step}: {event} ({event.reason})")
        else:
            self._say(format_message(replace(self._change, step=self._step), self.known, event))

    def _note(self, decision: Decision, **more: Any) -> ActionEvent:
        """Report a decision, with its gain and cost as far as they are known."""
        choice, is_done = decision.choice, decision.kind is DecisionKind.APPLY
        event = ActionEvent(
            step=self._step,
            kind=decision.kind,
            mitigation=choice.mitigation,
            reason=decision.reason,
            effect=choice.effect if is_done else "",
            **more,
        )
        self._report(event)
        return event
