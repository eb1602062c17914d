"""One rank's part in watching one fit for stragglers: report, search and act with the others.

Every rank calls the methods that communicate at the same step. Rank 0 leads: only it has a
`RunWatch`, and the others carry out its orders.
"""

import socket
import time
from collections.abc import Callable, Sequence

from lightning_hetero.callbacks.watching.watched_run import WatchedRun
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import describe_device
from lightning_hetero.straggler import DecisionKind, Event, Finding, Mitigation
from lightning_hetero.straggler.events import Pair
from lightning_hetero.straggler.locate import (
    Probes,
    Suspicion,
    diagnose,
    probe_rounds,
    ring_of,
    rounds_of,
    slow_of_their_kind,
    suspect,
)
from lightning_hetero.straggler.mitigation import Decision, PossibleMitigation
from lightning_hetero.straggler.paces import Observation, RankHistory
from lightning_hetero.straggler.prediction import true_causes
from lightning_hetero.straggler.probe import probe_device, probe_links, probe_memory
from lightning_hetero.straggler.watch import Order, RunWatch, WatchConfig


class StragglerSession:
    """Watches one fit on one rank; all ranks create it together, which probes devices and links.

    Args:
        run: The run.
        comms: Its ranks.
        config: Options of the watch.
        report: Receives events; called on rank 0.
        say: Receives lines for people; called on rank 0.
        admission: Factor above the median of its type from which a device or link is reported; None
            reports none.
    """

    def __init__(
        self,
        run: WatchedRun,
        comms: Communicators,
        config: WatchConfig,
        *,
        report: Callable[[Event], None],
        say: Callable[[str], None],
        admission: float | None = None,
    ) -> None:
        self._run = run
        self._comms = comms
        self._history = RankHistory(comms.global_rank)
        self._watch = RunWatch(config, report=report, say=say) if comms.global_rank == 0 else None
        self._is_known = False
        self._arriving: Decision | None = None
        """A decision that was carried out and isn't in effect yet."""
        self._matmul_size, most_bytes = (256, 2**20) if run.device.type == "cpu" else (2048, 2**24)
        # As large as the run's own messages, so that a slow link doesn't keep the run waiting.
        self._link_bytes = min(most_bytes, max(comms.gather_objects(run.message_bytes)))
        self._hosts = tuple(comms.gather_objects(socket.gethostname()))
        ring = rounds_of(ring_of(range(comms.world_size)))
        self._healthy = self._probe(ring, devices=True)
        if admission is not None and comms.world_size > 1:
            for finding in self._admit(admission, acts=not config.dry_run):
                if self._watch is not None:
                    report(finding)
                    say(f"Before training: {finding}")

    @property
    def mitigation(self) -> Mitigation:
        """The mitigation in force, on rank 0; IGNORE on other ranks."""
        return Mitigation.IGNORE if self._watch is None else self._watch.mitigation

    def _admit(self, least_ratio: float, *, acts: bool) -> tuple[Finding, ...]:
        """Report devices and links that are slower than others of their type; collective.

        Args:
            least_ratio: Least ratio to the median of their type.
            acts: Whether the run restarts without them if it can. The paces of the others count as
                those of their types when plans are changed.
        """
        clock, device = self._run.clock, self._run.device
        within = clock.probing()
        copies_s = dict(enumerate(self._comms.gather_objects(probe_memory(device, within=within))))
        types = self._comms.gather_objects(describe_device(device).name)
        slow = slow_of_their_kind(copies_s, self._healthy, types, least_ratio=least_ratio)
        findings = self._comms.on_rank_0(lambda: slow)
        possible: Sequence[PossibleMitigation] = ()
        if findings and acts:
            possible = self._run.find_mitigations(findings, None, healthy_s=1.0)
        choice = self._comms.on_rank_0(lambda: next(iter(possible), None))
        if choice is not None:
            why = "slower than others of its type before training"
            self._run.act(Decision(kind=DecisionKind.APPLY, choice=choice, reason=why))
        return findings

    def after_step(
        self,
        observation: Observation,
        *,
        iteration_s: float,
        predicted_s: float | None = None,
    ) -> None:
        """Report a step to rank 0, get its order, and carry it out; collective.

        Args:
            observation: This rank's observation of the step.
            iteration_s: Seconds that the step took here.
            predicted_s: Predicted seconds, for the log.
        """
        is_changing = self._run.is_changing()
        if not is_changing:
            self._arrive()
        rows = self._comms.to_leader(self._history.observe(observation, iteration_s))
        order, since_step = Order.GO_ON, 0
        if self._watch is not None:
            order = self._watch.see(
                observation.step,
                rows,
                predicted_s=predicted_s,
                is_changing=is_changing,
            )
            since_step = self._watch.since_step
        code, since_step = self._comms.from_leader([order, since_step])
        if code in (Order.DIAGNOSE, Order.JUDGE):
            self._diagnose(since_step, at_plan=code == Order.JUDGE)
        if code != Order.GO_ON:
            self._obey()

    def _diagnose(self, since_step: int, *, at_plan: bool) -> None:
        """Find out what is slow, or what the plan costs, and pass it to the leader's `RunWatch`."""
        start_s = time.perf_counter()
        self._history.settle(since_step)
        reports = self._comms.gather_objects(self._history.report(since_step))
        suspicion, watch = Suspicion(), self._watch
        rounds: tuple[tuple[Pair, ...], ...] = ()
        if watch is not None and not at_plan:
            suspicion = suspect(reports, iteration_s=watch.base_s(), known=watch.known)
            rounds = probe_rounds(suspicion, self._comms.world_size)
        found = rounds, bool(suspicion.ranks)
        rounds, devices = self._comms.on_rank_0(lambda: found)
        probes = self._probe(rounds, devices=devices)
        if watch is None:
            return
        healthy_s = watch.base_s()
        measured = self._run.measure(reports, healthy_s, self._healthy)
        slow = diagnose(suspicion, probes, self._healthy)
        findings = true_causes(slow, measured, excess_s=watch.excess_s(), known=watch.known)

        def possible() -> Sequence[PossibleMitigation]:
            return self._run.find_mitigations(findings, measured, healthy_s=healthy_s)

        if at_plan:
            watch.judge(possible())
        else:
            diagnosis_s = time.perf_counter() - start_s
            watch.found(
                findings, possible, where=self._run.where(findings), diagnosis_s=diagnosis_s
            )

    def _probe(self, rounds: Sequence[Sequence[Pair]], *, devices: bool) -> Probes:
        """Probe links, and devices if these are suspected; collective."""
        clock, device = self._run.clock, self._run.device
        device_s: dict[int, float] = {}
        if devices and self._comms.world_size > 1:
            own_s = probe_device(device, size=self._matmul_size, within=clock.probing())
            device_s = dict(enumerate(self._comms.gather_objects(own_s)))
        link_s: dict[Pair, float] = {}
        if rounds:
            wait_for = clock.wait_for
            link_s = probe_links(rounds, device, num_bytes=self._link_bytes, wait_for=wait_for)
        return Probes(
            device_s=device_s, link_s=link_s, link_bytes=self._link_bytes, hosts=self._hosts
        )

    def _obey(self) -> None:
        """Learn from the leader whether a fault is known and what to do, and do it; collective."""
        verdict: tuple[bool, Decision | None] = (False, None)
        if self._watch is not None:
            verdict = bool(self._watch.known), self._watch.next_decision()
        was_known = self._is_known
        self._is_known, decision = self._comms.on_rank_0(lambda: verdict)
        if decision is not None:
            self._do(decision)
        elif was_known and not self._is_known:
            self._history.forget()
        elif not self._is_known:
            self._history.forget(baseline_only=True)

    def _do(self, decision: Decision) -> None:
        start_s = time.perf_counter()
        refusal = self._run.act(decision)
        if refusal is None:
            self._arriving = decision
        if self._watch is not None:
            self._watch.began(time.perf_counter() - start_s, refusal=refusal)

    def _arrive(self) -> None:
        """Note that the new plan runs: compare this rank with the usual pace of its new place."""
        decision, self._arriving = self._arriving, None
        if decision is None:
            return
        rank, undoes = self._comms.global_rank, decision.kind is DecisionKind.UNDO
        if decision.choice.is_lasting:
            self._history = RankHistory(rank)
            return
        self._history.move(1.0 if undoes else decision.choice.factors.get(rank, 1.0))
        if undoes and not self._is_known:
            self._history.forget()
