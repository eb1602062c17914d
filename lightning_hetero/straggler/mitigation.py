"""Decide what to do about a fault: which of Greyhound's mitigations are possible, and which pays.

S2 moves micro-batches, S2b moves layers, S3 swaps places in the plan, S4 restarts without a
machine. For each, the iteration time is predicted. Slices keep their owners when ranks swap places.
So a link carries permanently less only if both its ends leave the layers that they own; therefore
S3 also moves both ends at once.

The time to act follows from Greyhound's Algorithm 1, *ski rental*: begin with S1 (do nothing), and
take the next mitigation when the time lost so far reaches its cost. Nobody knows how long the fault
will last, but this costs at most twice as much as the best decision in hindsight. Proof: the best
decision takes step k at once, which costs all steps up to k, B_k = c_2 + … + c_k; for n slow
iterations its cost is OPT(n) = min_k B_k + L_k(n), where L_k(n) is the time that these iterations
lose under step k. Before iteration n we take the highest step that attains the minimum. So the time
that we lose is at most OPT(n), which each iteration increases by its loss under the present step;
and our costs are at most OPT(n), because B_k ≤ B_k + L_k(n).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, product

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler.events import DecisionKind, Finding, Mitigation
from lightning_hetero.straggler.prediction import RunPrediction, move_ranks

_Change = Callable[[ParallelPlan], ParallelPlan]
_Moves = dict[int, int]
"""{rank: taker}: the rank that takes over each moved rank's place."""
_MOST_SWAPS = 4
_PREDICTIONS = 64
"""Largest number of candidates that are predicted for each swap; the most promising ones."""
_LEAST_GAIN = 0.01
"""Least relative gain of a swap."""


@dataclass(frozen=True, kw_only=True)
class PossibleMitigation:
    """A mitigation that is possible against the present fault, and its predicted effect."""

    mitigation: Mitigation
    """Which of the four steps it is."""
    iteration_s: float = math.nan
    """Predicted iteration time while the fault lasts, seconds."""
    effect: str = ""
    """Its effect, for people: "moved 5 of 32 micro-batches away"."""
    plans: tuple[ParallelPlan, ...] = ()
    """The plans to run: one, or those that a data module chooses from; none for a restart."""
    first_plans: tuple[ParallelPlan, ...] = ()
    """The plans to return to when the fault ends."""
    is_lasting: bool = False
    """Whether the plan itself was the cause, not a fault, so that these plans stay."""
    factors: Mapping[int, float] = field(default_factory=dict)
    """By rank, its healthy pace in its first place divided by that in its new place. Example: if
    rank 3 needs 2 ms per unit of work in its first place and 4 ms in the new one, its factor is
    0.5."""
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    """By rank, its time in its new place divided by the time there of the rank that had the place
    first: 2 if rank 3 takes twice as long there as its predecessor."""
    exclude: tuple[int, ...] = ()
    """Ranks that a restart should leave out."""


NOTHING = PossibleMitigation(mitigation=Mitigation.IGNORE)


def find_mitigations(
    model: RunPrediction,
    plans: Sequence[ParallelPlan],
    has_room: Callable[[ParallelPlan], bool],
) -> tuple[PossibleMitigation, ...]:
    """Return S2, S2b and S3, each if it would change anything; without a fault S2 and S2b.

    S3 moves the same ranks in all plans, so each moved rank takes over another rank's work. S2b and
    S3 also move micro-batches, so their predicted times are never longer than that of S2.

    Args:
        model: Predicts from the plan that ran under the fault (of several, the one that ran most
            often).
        plans: One plan, or those among which a data module chooses.
        has_room: Returns whether each rank has enough memory for its place in a plan.
    """

    def fits(change: _Change) -> bool:
        return all(has_room(change(plan)) for plan in plans)

    plan, cut_anew = model.run.plan, model.with_layers_moved
    steps: list[tuple[Mitigation, str, _Change]] = [(Mitigation.REBALANCE, "", lambda plan: plan)]
    # A data module's plans cost what they were planned for.
    cut = plan if model.run.is_assigned else cut_anew(plan)
    if cut != plan and fits(cut_anew):
        effect = f"cut stages to {_sizes(cut)} layers instead of {_sizes(plan)}"
        steps.append((Mitigation.REPLAN, effect, cut_anew))
    if taken_by := _best_swaps(model, fits):
        swap = partial(move_ranks, taken_by=taken_by)
        steps.append((Mitigation.SWAP, f"swapped places of {_ranks(taken_by)}", swap))
    found = []
    for step, effect, change in steps:
        effects = [*filter(None, (effect, _balancing(model, change(plan))))]
        if effects:
            found.append(mitigation_of(model, plans, step, change, " and ".join(effects)))
    return tuple(found)


def mitigation_of(
    model: RunPrediction,
    plans: Sequence[ParallelPlan],
    step: Mitigation,
    change: _Change,
    effect: str,
) -> PossibleMitigation:
    """Return the mitigation that changes all plans in the same way, with micro-batches moved."""
    plan = model.run.plan
    before, after = model.paces(plan), model.paces(change(plan))
    slowdowns: dict[int, float] = {}
    for first in plans:
        had, moved = {first.place(rank): rank for rank in first.ranks}, change(first)
        slowdowns |= {r: model.slowdown(r, had[moved.place(r)]) for r in moved.ranks}
    return PossibleMitigation(
        mitigation=step,
        iteration_s=model.balanced_s(change(plan)),
        effect=effect,
        plans=tuple(model.balanced(change(first)) for first in plans),
        first_plans=tuple(plans),
        factors={rank: before[rank] / after[rank] for rank in before.keys() & after.keys()},
        slowdowns=slowdowns,
    )


def _sizes(plan: ParallelPlan) -> str:
    """Return the layers of each stage, such as "3+5, 4+4"; equal pipelines once."""
    cuts = ("+".join(str(len(stage.layers)) for stage in p.stages) for p in plan.pipelines)
    return ", ".join(dict.fromkeys(cuts))


def restart_mitigation(
    findings: Sequence[Finding],
    *,
    healthy_s: float,
    world_size: int,
    num_left: Callable[[Sequence[int]], int],
) -> PossibleMitigation | None:
    """Return S4, a restart without the machines of slow ranks; the others take over their work.

    Of a slow link it leaves out the end with more slow links, or else the second one. None if no
    rank would be left.

    Args:
        findings: The slow devices and links.
        healthy_s: Iteration time without a fault, seconds.
        world_size: Number of ranks.
        num_left: Returns how many ranks a restart without some ranks would have.
    """
    named = Counter(rank for finding in findings for rank in finding.ranks)
    exclude = tuple(sorted({max(f.ranks, key=lambda rank: (named[rank], rank)) for f in findings}))
    left = num_left(exclude)
    if not exclude or not left:
        return None
    return PossibleMitigation(
        mitigation=Mitigation.RESTART,
        iteration_s=healthy_s * world_size / left,
        effect=f"asked for a restart without {_ranks(exclude)}",
        exclude=exclude,
    )


def _balancing(model: RunPrediction, plan: ParallelPlan) -> str:
    """Return, in words, how a plan's pipelines would be balanced; "" if nothing changes."""
    if model.run.is_assigned:
        slow = model.slow_ranks
        return f"assigned less to {_ranks(slow)}" if slow else ""
    counts = model.counts(plan), model.counts(model.balanced(plan))
    num_moved = sum(max(0, a - b) for a, b in zip(*counts, strict=True))
    return f"moved {num_moved} of {sum(counts[0])} micro-batches away" if num_moved else ""


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _best_swaps(model: RunPrediction, fits: Callable[[_Change], bool]) -> _Moves:
    """Return who takes whose place in the best plan that is found by swaps, one after another."""
    plan = model.run.plan
    best = {rank: rank for rank in plan.ranks}
    best_s = model.balanced_s(plan)
    for _ in range(_MOST_SWAPS):
        tried: list[tuple[float, int, _Moves]] = []
        for move in islice(_moves(model, move_ranks(plan, best)), _PREDICTIONS):
            takers = {rank: move.get(taker, taker) for rank, taker in best.items()}
            tried.append((model.balanced_s(move_ranks(plan, takers)), len(tried), takers))
        better = (item for item in sorted(tried) if item[0] <= best_s * (1.0 - _LEAST_GAIN))
        found = next((t for t in better if fits(partial(move_ranks, taken_by=t[2]))), None)
        if found is None:
            break
        best_s, _, best = found
    return {rank: taker for rank, taker in best.items() if rank != taker}


def _moves(model: RunPrediction, plan: ParallelPlan) -> Iterator[_Moves]:
    """Yield swaps of a suspect, or of its whole stage, with others; the most promising first.

    First both ends of a link at once, each inside its pipeline. Then one suspect at a time: into a
    pipeline that another suspect slows anyway, inside its own, and into others.
    """
    for pair in model.slow_links:
        one_end, other_end = ([*_swaps(plan, rank, only_inside=True)] for rank in pair)
        for one, other in product(one_end, other_end):
            if not one.keys() & other.keys():
                yield one | other
    suspects = sorted({*model.slow_ranks, *chain(*model.slow_links)})
    near = {place.pipeline_index for rank in suspects if (place := plan.place(rank))}
    for rank in suspects:
        yield from _swaps(plan, rank, near)


def _swaps(
    plan: ParallelPlan, rank: int, near: Collection[int] = (), *, only_inside: bool = False
) -> Iterator[_Moves]:
    """Yield swaps of a rank's stage with stages of equal degree, and of the rank with ranks.

    Pipelines that are `near` come first; `only_inside` swaps inside the rank's own pipeline.
    """
    place = plan.place(rank)
    if place is None:
        return
    own = plan.pipelines[place.pipeline_index].stages[place.stage_index].ranks
    for index, _, stage in sorted(plan.iter_stages(), key=lambda item: item[0] not in near):
        if stage.ranks == own or (only_inside and index != place.pipeline_index):
            continue
        groups = [(own, stage.ranks)] if len(own) == len(stage.ranks) else []
        groups += [((rank,), (other,)) for other in stage.ranks if len(stage.ranks + own) > 2]
        for a, b in groups:
            yield dict(zip((*a, *b), (*b, *a), strict=True))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do before the next iteration, and why; the leader sends it."""

    kind: DecisionKind
    choice: PossibleMitigation
    """The mitigation that is applied, kept or undone."""
    reason: str
    """The figures that led to it, in one line."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Which mitigations are allowed, and what each is thought to cost until it has been measured.

    ::

        StragglerMonitor(policy=PolicyConfig(allowed=(Mitigation.IGNORE, Mitigation.REBALANCE)))

    Raises:
        ConfigurationError: A cost isn't positive.
    """

    rebalance_cost_s: float = 0.5
    """Initial estimate for S2 and its undoing, seconds: computing new counts and one new table."""
    swap_cost_s: float = 5.0
    """Initial estimate for S2b, S3 and their undoing, seconds: tables, buffers and a first pull."""
    restart_cost_s: float = 300.0
    """Cost of S4, seconds: checkpoint, new processes, loading; about 1 in place."""
    allowed: tuple[Mitigation, ...] = tuple(Mitigation)
    """The allowed steps: with S1 alone, faults are found and reported, and nothing is done."""

    def __post_init__(self) -> None:
        costs_s = self.rebalance_cost_s, self.swap_cost_s, self.restart_cost_s
        if any(not cost > 0.0 for cost in costs_s):
            raise ConfigurationError(
                f"Mitigation costs are {costs_s} s; each must be above 0. Forbid a step by leaving "
                "it out of `allowed`."
            )

    @property
    def costs_s(self) -> dict[Mitigation, float]:
        """What each allowed step is thought to cost, seconds."""
        costs_s = {
            Mitigation.REBALANCE: self.rebalance_cost_s,
            Mitigation.REPLAN: self.swap_cost_s,
            Mitigation.SWAP: self.swap_cost_s,
            Mitigation.RESTART: self.restart_cost_s,
        }
        return {step: cost_s for step, cost_s in costs_s.items() if step in self.allowed}


class FaultAccount:
    """What one fault has cost so far, and would have cost under each step: ski rental.

    It changes nothing itself: the caller carries out a decision of kind APPLY or UNDO. Only the
    leader has one (see `watch`). It only climbs to higher steps; the end of the fault undoes them.

    Args:
        healthy_s: Iteration time without the fault, seconds.
        slow_s: Iteration time with the fault and without any mitigation, seconds.
        possible: The mitigations that are possible; S1 always is and need not be named.
        costs_s: What each allowed step is known to cost, seconds.
    """

    def __init__(
        self,
        healthy_s: float,
        slow_s: float,
        possible: Sequence[PossibleMitigation],
        costs_s: Mapping[Mitigation, float],
    ) -> None:
        self.slow_s = slow_s
        self.in_force = self._below = NOTHING
        self._num_slow = 0
        self._costs_s = costs_s
        ladder = {item.mitigation: item for item in possible if item.mitigation in costs_s}
        self._above = [ladder[step] for step in Mitigation if step in ladder]
        loss_s = max(0.0, slow_s - healthy_s)
        self._losses_s = {Mitigation.IGNORE: loss_s}
        """What an iteration loses under each step."""
        for item in self._above:
            # A more expensive step that does worse wouldn't be taken: the cheaper one's loss
            # counts.
            loss_s = min(loss_s, max(0.0, item.iteration_s - healthy_s))
            self._losses_s[item.mitigation] = loss_s

    def decide(self) -> Decision:
        """Count one more slow iteration, and decide under which step it runs."""
        self._num_slow += 1
        least_s, cost_s, best = self._lost_s(self.in_force), 0.0, -1
        for index, item in enumerate(self._above):
            cost_s += self._costs_s[item.mitigation]
            if cost_s + self._lost_s(item) <= least_s:
                least_s, best = cost_s + self._lost_s(item), index
        lost = f"{self._lost_s(NOTHING):.2f} s lost over {self._num_slow} slow iterations"
        if best >= 0:
            reason = f"{lost}, of which {self._saved(self._above[best])}: it pays"
            self._below, self.in_force = self.in_force, self._above[best]
            del self._above[: best + 1]
            return Decision(kind=DecisionKind.APPLY, choice=self.in_force, reason=reason)
        saved = " and ".join(map(self._saved, self._above))
        reason = f"{lost}, {f'of which {saved}' if saved else 'and no further step is possible'}"
        return Decision(kind=DecisionKind.KEEP, choice=self.in_force, reason=reason)

    def refuse_plans(self) -> None:
        """Note that the step just taken can't be done here, nor any other that changes plans."""
        self.in_force = self._below
        self._above = [item for item in self._above if not item.plans]

    def end(self) -> Decision:
        """Decide to undo the step in force, if there is one, as the fault has ended."""
        # There is nothing to undo of S1, and a restart is not undone.
        kind = DecisionKind.UNDO if self.in_force.plans else DecisionKind.KEEP
        reason = f"the cause ended after {self._num_slow} slow iterations"
        return Decision(kind=kind, choice=self.in_force, reason=reason)

    def _lost_s(self, item: PossibleMitigation) -> float:
        return self._num_slow * self._losses_s[item.mitigation]

    def _saved(self, item: PossibleMitigation) -> str:
        saved_s = self._lost_s(self.in_force) - self._lost_s(item)
        step = item.mitigation
        return f"{step.value} would have saved {saved_s:.2f} s for {self._costs_s[step]:.2f} s"
