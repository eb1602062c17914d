"""Find the possible mitigations of a fault, Greyhound's S2 to S4, each with its predicted time.

S3 swaps places in the plan. Data parallelism moves more bytes than pipeline parallelism, so a
congested link should join neighbouring stages of one pipeline rather than two holders of the same
layers. Slow devices should share as few stages as possible, ⌈slow devices / ranks per stage⌉,
interior ones first, because the first and last stages also hold embedding and head. These two rules
only order the candidates; the one that is predicted to be fastest is chosen, so a rule that doesn't
hold does no harm. Slices keep their owners when ranks swap places, so a link is relieved for good
only if both its ends leave the layers that they own: hence moves of both ends at once.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler.events import Finding, Mitigation, Pair
from lightning_hetero.straggler.prediction import MeasuredRun, RunPrediction, Slowness

__all__ = [
    "PossibleMitigation",
    "WatchedPlans",
    "find_mitigations",
    "gradient_links",
    "move_ranks",
    "propose_swap",
    "restart_mitigation",
    "swap_ranks",
    "true_causes",
]

_Swap = tuple[tuple[int, ...], tuple[int, ...]]
_MOST_SWAPS = 4
_PREDICTIONS = 64
"""Most candidates that are predicted for each swap, the most promising ones."""
_LEAST_GAIN = 0.01
"""Least relative gain of a swap."""
_LEAST_SHARE = 0.1
"""Least share of a slowdown that a true cause explains."""


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
    """The plans to run: one, or those among which a data module chooses; none for a restart."""
    first_plans: tuple[ParallelPlan, ...] = ()
    """The plans to return to when the fault ends."""
    factors: Mapping[int, float] = field(default_factory=dict)
    """By rank, its healthy pace in its first place over that in its new place."""
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    """By rank, its time in its new place over that of the rank that was first there."""
    exclude: tuple[int, ...] = ()
    """Ranks that a restart should leave out."""


@dataclass(frozen=True, kw_only=True)
class WatchedPlans:
    """A run's plans from before a fault, and models that predict iteration times under it."""

    plans: tuple[ParallelPlan, ...]
    """One plan, or those among which a data module chooses."""
    models: tuple[RunPrediction, ...]
    """A model of each plan that ran, the one that ran most often first."""
    has_room: Callable[[ParallelPlan], bool]
    """Tells whether each rank's memory suffices for its place in a plan."""

    def has_room_for(self, taken_by: Mapping[int, int]) -> bool:
        """Return whether all plans still fit if ranks take others' places ({rank: taker})."""
        return all(self.has_room(move_ranks(plan, taken_by)) for plan in self.plans)

    def predict_s(self, taken_by: Mapping[int, int]) -> float:
        """Return the predicted seconds of an iteration if ranks take others' places."""
        return sum(
            model.run.share
            * model.iteration_s(model.balanced(move_ranks(model.run.plan, taken_by)))
            for model in self.models
        )

    def mitigation(
        self, step: Mitigation, taken_by: Mapping[int, int], effect: str
    ) -> PossibleMitigation:
        """Return the mitigation in which ranks take others' places, the same in all plans."""
        model = self.models[0]
        place_of = {taker: rank for rank, taker in taken_by.items()}
        before = model.paces(model.run.plan)
        after = model.paces(move_ranks(model.run.plan, taken_by))
        return PossibleMitigation(
            mitigation=step,
            iteration_s=self.predict_s(taken_by),
            effect=effect,
            plans=tuple(model.balanced(move_ranks(plan, taken_by)) for plan in self.plans),
            first_plans=self.plans,
            factors={rank: before[rank] / after[rank] for rank in before.keys() & after.keys()},
            slowdowns={
                rank: model.slowdown(rank, place_of.get(rank, rank))
                for plan in self.plans
                for rank in plan.ranks
            },
        )


def true_causes(
    findings: Sequence[Finding], runs: Sequence[MeasuredRun], world_size: int
) -> tuple[Finding, ...]:
    """Return those findings that explain a tenth of the slowdown, or more.

    A finding's share is the mean of what is saved by removing only it, and of what is lost by
    keeping only it. So nothing is done about a device whose removal would change nothing.

    Args:
        findings: What was found slow.
        runs: Measurements of each plan that ran while nothing was slow; none believe all.
        world_size: Number of ranks.
    """

    def predict_s(findings: Sequence[Finding]) -> float:
        slowness = Slowness.of(findings, world_size)
        return sum(run.share * RunPrediction(run, slowness).iteration_s(run.plan) for run in runs)

    healthy_s, slow_s = predict_s(()), predict_s(findings)
    if len(findings) < 2 or slow_s <= healthy_s:
        return tuple(findings)
    found = []
    for finding in findings:
        removed_s = slow_s - predict_s([other for other in findings if other is not finding])
        kept_s = predict_s([finding]) - healthy_s
        if removed_s + kept_s >= 2 * _LEAST_SHARE * (slow_s - healthy_s):
            found.append(finding)
    return tuple(found)


def find_mitigations(run: WatchedPlans, slowness: Slowness) -> tuple[PossibleMitigation, ...]:
    """Return S2 and S3, each if it would change anything.

    S3 moves the same ranks in all plans, so each moved rank takes over another rank's work. It also
    moves micro-batches, so its predicted time is never worse than that of S2.
    """
    model, found = run.models[0], []
    plan = model.run.plan
    balancing = _balancing(model, slowness, plan)
    if balancing:
        found.append(run.mitigation(Mitigation.REBALANCE, {}, balancing))
    proposal = propose_swap(
        plan,
        slow_ranks=slowness.ranks,
        slow_links=list(slowness.links),
        predict_s=lambda other: run.predict_s(_ranks_moved(plan, other)),
        has_room=lambda other: run.has_room_for(_ranks_moved(plan, other)),
    )
    if proposal is not None:
        swapped, swaps = proposal
        pairs = ", ".join(f"{_join(a)} ↔ {_join(b)}" for a, b in swaps)
        effects = [f"swapped places of ranks {pairs}", _balancing(model, slowness, swapped)]
        effect = " and ".join(filter(None, effects))
        found.append(run.mitigation(Mitigation.SWAP, _ranks_moved(plan, swapped), effect))
    return tuple(found)


def restart_mitigation(
    findings: Sequence[Finding],
    *,
    healthy_s: float,
    world_size: int,
    num_left: Callable[[Sequence[int]], int],
) -> PossibleMitigation | None:
    """Return S4, a restart without the slow ranks' machines: the others take over their work.

    For a slow link its second rank is left out. None if no rank would be left.

    Args:
        findings: The slow devices and links.
        healthy_s: Iteration time without a fault, seconds.
        world_size: Number of ranks.
        num_left: Returns how many ranks a restart without some ranks would have.
    """
    exclude = tuple(sorted({finding.ranks[-1] for finding in findings}))
    left = num_left(exclude)
    if not exclude or not left:
        return None
    return PossibleMitigation(
        mitigation=Mitigation.RESTART,
        iteration_s=healthy_s * world_size / left,
        effect=f"asked for a restart without {_ranks(exclude)}",
        exclude=exclude,
    )


def _balancing(model: RunPrediction, slowness: Slowness, plan: ParallelPlan) -> str:
    """Return, in words, how a plan's pipelines would be balanced; "" if nothing changes."""
    if model.run.is_assigned:
        return f"assigned less to {_ranks(slowness.ranks)}" if slowness.ranks else ""
    counts = model.counts(plan), model.counts(model.balanced(plan))
    num_moved = sum(max(0, a - b) for a, b in zip(*counts, strict=True))
    return f"moved {num_moved} of {sum(counts[0])} micro-batches away" if num_moved else ""


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def propose_swap(
    plan: ParallelPlan,
    *,
    slow_ranks: Mapping[int, float],
    slow_links: Collection[Pair],
    predict_s: Callable[[ParallelPlan], float],
    has_room: Callable[[ParallelPlan], bool] | None = None,
) -> tuple[ParallelPlan, list[_Swap]] | None:
    """Return the best plan found by swapping places, and the swaps; None if no swap helps.

    Args:
        plan: The plan that runs; layers and micro-batches of each place stay as they are.
        slow_ranks: Slow ranks and their slowdown.
        slow_links: Pairs of ranks whose link is congested.
        predict_s: Predicts the iteration time of a plan under the present faults; with
            micro-batches balanced, if S2 is part of the swap.
        has_room: Tells whether each rank's memory suffices for its place in a plan; called only for
            plans that would be chosen. None accepts all.
    """
    suspects = sorted({*slow_ranks, *(rank for pair in slow_links for rank in pair)})
    best, best_s = plan, predict_s(plan)
    swaps: list[_Swap] = []
    for _ in range(_MOST_SWAPS):
        moves: list[tuple[_Swap, ...]] = [(swap,) for swap in _moves(best, suspects)]
        moves += [move for pair in slow_links for move in _moves_of_both_ends(best, pair)]
        candidates = [(_swap_all(best, move), move) for move in moves]
        candidates.sort(key=lambda candidate: _penalty(candidate[0], slow_ranks, slow_links))
        tried = [
            (predict_s(candidate), index, candidate, move)
            for index, (candidate, move) in enumerate(candidates[:_PREDICTIONS])
        ]
        enough_s = best_s * (1.0 - _LEAST_GAIN)
        tried = sorted((e for e in tried if e[0] <= enough_s), key=lambda entry: entry[:2])
        chosen = next((e for e in tried if has_room is None or has_room(e[2])), None)
        if chosen is None:
            break
        best_s, _, best, move = chosen
        swaps += move
    return (best, swaps) if swaps else None


def swap_ranks(plan: ParallelPlan, group_a: Sequence[int], group_b: Sequence[int]) -> ParallelPlan:
    """Return the plan with the ranks of two groups in each other's places, idle ones too."""
    if len(group_a) != len(group_b):
        raise ConfigurationError(
            f"Groups {list(group_a)} and {list(group_b)} differ in size; swap equal groups."
        )
    return move_ranks(plan, dict(zip((*group_a, *group_b), (*group_b, *group_a), strict=True)))


def move_ranks(plan: ParallelPlan, taken_by: Mapping[int, int]) -> ParallelPlan:
    """Return the plan with places taken by other ranks ({rank: taker}); others keep theirs."""
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, ranks=tuple(taken_by.get(rank, rank) for rank in stage.ranks))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _ranks_moved(before: ParallelPlan, after: ParallelPlan) -> dict[int, int]:
    """Return {rank: taker} of the places that another rank has in `after` than in `before`."""
    stages = zip(before.iter_stages(), after.iter_stages(), strict=True)
    pairs = (pair for (*_, a), (*_, b) in stages for pair in zip(a.ranks, b.ranks, strict=True))
    return {rank: taker for rank, taker in pairs if rank != taker}


def gradient_links(plan: ParallelPlan, links: Collection[Pair]) -> tuple[Pair, ...]:
    """Return those links whose two ranks hold common layers in different pipelines."""
    return tuple(pair for pair in links if _carries_gradients(plan, pair))


def _carries_gradients(plan: ParallelPlan, pair: Pair) -> bool:
    place_a, place_b = plan.place(pair[0]), plan.place(pair[1])
    if place_a is None or place_b is None or place_a.pipeline_index == place_b.pipeline_index:
        return False
    layers_a, layers_b = (
        plan.pipelines[place.pipeline_index].stages[place.stage_index].layers
        for place in (place_a, place_b)
    )
    return max(layers_a.start, layers_b.start) < min(layers_a.stop, layers_b.stop)


def _moves(plan: ParallelPlan, suspects: Sequence[int]) -> Iterator[_Swap]:
    """Yield swaps of a suspect, or of its whole stage, with another rank or stage."""
    stages = [stage.ranks for _, _, stage in plan.iter_stages()]
    seen: set[frozenset[tuple[int, ...]]] = set()
    for suspect in suspects:
        place = plan.place(suspect)
        if place is None:
            continue
        own = plan.pipelines[place.pipeline_index].stages[place.stage_index].ranks
        others = [ranks for ranks in stages if ranks != own]
        swaps: list[_Swap] = [(own, ranks) for ranks in others if len(ranks) == len(own)]
        swaps += [((suspect,), (rank,)) for ranks in others for rank in ranks]
        for swap in swaps:
            if frozenset(swap) not in seen:
                seen.add(frozenset(swap))
                yield swap


def _moves_of_both_ends(plan: ParallelPlan, pair: Pair) -> Iterator[tuple[_Swap, ...]]:
    """Yield pairs of swaps that move both ends of a link, each inside its own pipeline."""
    swaps: list[list[_Swap]] = []
    for rank in pair:
        place = plan.place(rank)
        if place is None:
            return
        stages = plan.pipelines[place.pipeline_index].stages
        own = stages[place.stage_index].ranks
        others = (stage.ranks for stage in stages if stage.ranks != own)
        swaps.append([(own, ranks) for ranks in others if len(ranks) == len(own)])
    for move in product(*swaps):
        ranks = [rank for swap in move for group in swap for rank in group]
        if len(set(ranks)) == len(ranks):
            yield move


def _swap_all(plan: ParallelPlan, move: Sequence[_Swap]) -> ParallelPlan:
    for swap in move:
        plan = swap_ranks(plan, *swap)
    return plan


def _penalty(
    plan: ParallelPlan, slow_ranks: Mapping[int, float], slow_links: Collection[Pair]
) -> tuple[int, int, int]:
    """Return a plan's violations of the two rules: fewer are more promising."""
    slow_stages = {
        (place.pipeline_index, place.stage_index)
        for rank in slow_ranks
        if (place := plan.place(rank)) is not None
    }
    num_outer = sum(
        stage in (0, plan.pipelines[pipeline].num_stages - 1) for pipeline, stage in slow_stages
    )
    return len(gradient_links(plan, slow_links)), len(slow_stages), num_outer


def _join(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))
