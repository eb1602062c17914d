"""The leader's decisions over a simulated run: what is looked for, done, undone and said."""

import random
import re
from dataclasses import dataclass, field, replace

import pytest

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler import (
    ActionEvent,
    ChangeEvent,
    DecisionKind,
    Event,
    Finding,
    FindingKind,
    Mitigation,
    PolicyConfig,
)
from lightning_hetero.straggler.mitigation import Decision, PossibleMitigation
from lightning_hetero.straggler.paces import Observation, RankHistory
from lightning_hetero.straggler.watch import Order, RunWatch, WatchConfig

PLAN = ParallelPlan.even(world_size=4, num_layers=4)
OTHER = ParallelPlan.even(world_size=4, num_layers=4, num_stages=2)
DEVICE = Finding(kind=FindingKind.DEVICE, ranks=(3,), ratio=2.0)
LINK = Finding(kind=FindingKind.LINK, ranks=(0, 2), ratio=9.0)
S2 = PossibleMitigation(
    mitigation=Mitigation.REBALANCE,
    iteration_s=1.2,
    effect="moved",
    plans=(OTHER,),
    first_plans=(PLAN,),
)


@dataclass
class Simulated:
    """A run of four ranks that the watch sees; a plan takes effect two steps after an act."""

    config: WatchConfig
    events: list[Event] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    acts: list[Decision] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    step: int = 0
    diagnosis_s: float = 0.01
    refusal: str | None = None
    better: tuple[PossibleMitigation, ...] = ()
    """Plans that are better without any fault."""
    works: tuple[float, ...] = (1.0,)
    """How much there is to do in an iteration, in turns."""

    def __post_init__(self) -> None:
        self.watch = RunWatch(self.config, report=self.events.append, say=self.said.append)
        self.histories = [RankHistory(rank) for rank in range(4)]
        self.rng = random.Random(0)
        self.left = 0

    def run(self, num_steps, iteration_s, *, rank_3=1.0, findings=(), measures=(S2,)):
        for _ in range(num_steps):
            self.step += 1
            order = self.watch.see(
                self.step,
                [self.note(rank, iteration_s, rank_3 if rank == 3 else 1.0) for rank in range(4)],
                is_changing=self.left > 0,
            )
            self.left = max(0, self.left - 1)
            if order is Order.DIAGNOSE:
                self.looks.append(self.step)
                self.watch.found(
                    findings, lambda: measures, where="pipeline 1", diagnosis_s=self.diagnosis_s
                )
            if order is Order.JUDGE:
                self.watch.judge(self.better)
            if order is not Order.GO_ON and (act := self.watch.next_decision()) is not None:
                self.acts.append(act)
                self.watch.began(0.02, refusal=self.refusal)
                self.left = 0 if self.refusal else 2

    def note(self, rank, iteration_s, pace):
        history = self.histories[rank]
        own = Observation(step=self.step, forward_s=pace * self.rng.gauss(1, 0.02))
        work = self.works[self.step % len(self.works)]
        seconds = work * iteration_s * self.rng.gauss(1, 0.01)
        return history.observe(own, seconds)._replace(load_s=work)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def config(**options) -> WatchConfig:
    policy = PolicyConfig(rebalance_cost_s=1.0, swap_cost_s=3.0, **options)
    return WatchConfig(policy=policy, recheck_share=0.1)


def begun() -> Simulated:
    """Return a run of which twenty iterations have been as they should be."""
    run = Simulated(config())
    run.run(20, 1.0)
    return run


def kinds_of(run):
    return [act.kind.value for act in run.acts]


def test_a_fault_is_looked_for_mended_by_ski_rental_and_undone_when_the_rank_recovers():
    run = begun()
    run.run(5, 2.0, rank_3=2.0, findings=[DEVICE])
    # Four slow iterations before the cause was known have lost more than the second S2 costs.
    assert [(act.kind, act.choice) for act in run.acts] == [(DecisionKind.APPLY, S2)]
    run.run(15, 2.0, rank_3=2.0, findings=[DEVICE])
    # Iterations are no faster than before, so only rank 3's own pace tells that it recovered.
    run.run(20, 2.0, rank_3=1.0)
    assert kinds_of(run) == ["apply", "undo"]
    assert run.watch.known == ()
    assert run.watch.mitigation is Mitigation.IGNORE
    assert [event.where for event in run.of(ChangeEvent)] == ["the run", "rank 3"]
    assert [replace(event, step=0) for event in run.of(Finding)] == [DEVICE]
    named, mended, undone = run.said
    assert named.startswith("step 24: pipeline 1 slowed 2.0× (since step 21): rank 3 computes 2.0×")
    assert "; S2 moved, iteration 2.0" in mended
    assert "recovered" in undone
    assert "S2 was undone" in undone
    waits, applied, _ = run.of(ActionEvent)
    assert "for 1.00 s" in waits.reason
    assert "S2 would have saved" in applied.reason
    assert applied.cost_s >= 0.02


@pytest.mark.parametrize("recovers_at_once", [False, True])
def test_what_a_measure_gains_is_told_for_the_usual_work(recovers_at_once):
    run = Simulated(config(), works=(2.0, 0.5, 1.0, 4.0, 3.0))
    run.run(20, 1.0)
    run.run(4, 2.0, rank_3=2.0, findings=[DEVICE])
    run.run(20, 1.2, rank_3=1.0 if recovers_at_once else 2.0, findings=[])
    run.run(20, 1.0)
    assert kinds_of(run) == ["apply", "undo"]
    gained, undone = (e for e in run.of(ActionEvent) if e.kind is not DecisionKind.KEEP)
    # Two seconds of work are usual.
    assert (gained.before_s, gained.after_s) == pytest.approx((4.0, 2.4), rel=0.03)
    assert undone.after_s == pytest.approx(2.4 if recovers_at_once else 2.0, rel=0.03)
    assert recovers_at_once or undone.before_s == pytest.approx(2.0, rel=0.03)


def test_measured_costs_replace_guesses():
    run = begun()
    for _ in range(2):
        run.run(20, 2.0, rank_3=2.0, findings=[DEVICE])
        run.run(20, 1.0)
    applied = [e.reason for e in run.of(ActionEvent) if e.kind is DecisionKind.APPLY]
    first_s, second_s = (float(re.search(r"for ([\d.]+) s", reason)[1]) for reason in applied)
    assert first_s == 1.0
    assert second_s < 0.5, "both the measure and its undoing took less"


def test_a_slow_link_is_probed_again_as_its_share_of_the_time_allows():
    run = Simulated(config(allowed=(Mitigation.IGNORE,)), diagnosis_s=1.0)
    run.run(20, 1.0)
    run.run(40, 2.0, findings=[LINK], measures=())
    gaps = [b - a for a, b in zip(run.looks, run.looks[1:], strict=False)]
    # A look of 1 s may take a tenth of the time, and an iteration takes 2 s.
    assert gaps
    assert all(4 <= gap <= 6 for gap in gaps)
    looks = len(run.looks)
    run.run(40, 2.0, findings=[])
    assert run.watch.known == ()
    assert len(run.looks) <= looks + 1


def test_another_fault_begins_another_episode():
    run = begun()
    run.run(20, 2.0, rank_3=2.0, findings=[DEVICE])
    run.run(20, 4.0, rank_3=2.0, findings=[DEVICE, LINK])
    assert [replace(event, step=0) for event in run.of(Finding)] == [DEVICE, DEVICE, LINK]


def test_what_the_run_refuses_is_said_and_not_tried_again():
    run = Simulated(config(), refusal="Two loaders.")
    run.run(20, 1.0)
    run.run(20, 2.0, rank_3=2.0, findings=[DEVICE])
    assert run.said[-1] == "S2 can't be done here. Two loaders."
    run.run(20, 1.0, rank_3=1.0)
    assert run.watch.known == ()
    assert len(run.acts) == 1


def test_a_culprit_that_no_look_finds_at_first_is_looked_for_again():
    run = Simulated(config())
    run.run(24, 1.0)
    run.run(6, 2.0, rank_3=2.0)
    assert (len(run.looks), run.acts, run.watch.known) == (1, [], ())
    assert "no rank and no link stands out" in run.said[0]
    onset = run.watch.since_step
    run.run(10, 2.0, rank_3=2.0, findings=[DEVICE])
    assert len(run.looks) == 2
    assert run.watch.since_step == onset, "a look at the plan has moved it"
    assert [finding.ranks for finding in run.watch.known] == [(3,)]
    assert len(run.acts) == 1


@pytest.mark.parametrize("rank_3", [1.0, 1.5])
def test_a_run_as_fast_as_before_is_never_looked_at_whatever_a_rank_does(rank_3):
    run = begun()
    run.run(300, 1.0, rank_3=rank_3, findings=[DEVICE])
    assert (run.looks, run.said) == ([], [])


S2B = replace(S2, mitigation=Mitigation.REPLAN, iteration_s=0.6)


@pytest.mark.parametrize(("then_s", "kinds"), [(0.6, ["apply"]), (1.4, ["apply", "undo"])])
def test_a_better_plan_stays_if_it_is_better(then_s, kinds):
    run = Simulated(config(), better=(S2, S2B))
    run.run(33, 1.0)
    run.better = ()
    assert [act.choice.mitigation for act in run.acts] == [Mitigation.REPLAN]
    run.run(600, then_s)
    assert kinds_of(run) == kinds
    assert "S2b moved, iteration 1.0" in run.said[0]
    run.run(40, 3 * then_s, rank_3=2.0, findings=[DEVICE])
    run.run(40, then_s)
    assert kinds_of(run) == [*kinds, "apply", "undo"]


def test_a_plan_that_was_given_stays_and_a_better_one_is_named_once():
    run = Simulated(replace(config(), replaces_plan=False), better=(S2B,))
    run.run(600, 1.0)
    assert run.acts == []
    (named,) = run.said
    assert "S2b moved, iteration 1.0" in named
    assert "it was given, so it stays" in named
    run.run(40, 2.0, rank_3=2.0, findings=[DEVICE])
    run.run(40, 1.0)
    assert kinds_of(run) == ["apply", "undo"]


@pytest.mark.parametrize("iteration_s", [0.95, 0.8])
def test_a_plan_that_gains_little_or_costs_more_than_it_has_gained_is_left(iteration_s):
    better = replace(S2B, iteration_s=iteration_s)
    run = Simulated(replace(config(), policy=PolicyConfig(swap_cost_s=10.0)), better=(better,))
    run.run(100, 1.0)
    assert run.acts == []
    run.run(40, 1.0)
    assert len(run.acts) == (iteration_s == 0.8)  # After 128 iterations it would have paid.


def test_a_dry_run_says_what_it_would_do_and_does_nothing():
    run = Simulated(replace(config(), dry_run=True), better=(S2B,))
    run.run(40, 1.0)
    run.run(20, 2.0, rank_3=2.0, findings=[DEVICE])
    run.run(20, 1.0)
    assert run.acts == []
    done = [e for e in run.of(ActionEvent) if e.kind is not DecisionKind.KEEP]
    assert [(e.kind.value, e.mitigation.value, e.dry_run) for e in done] == [
        ("apply", "S2b", True),
        ("apply", "S2", True),
        ("undo", "S2", True),
    ]
    assert (done[1].before_s, done[1].after_s) == (pytest.approx(2.0, rel=0.03), 1.2)
    assert "dry run, nothing changed: S2 moved, iteration 2.0" in run.said[2]
