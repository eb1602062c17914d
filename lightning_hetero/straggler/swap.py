"""Decide which ranks swap places when a link or a device is slow: Greyhound's S3.

Data parallelism moves more bytes than pipeline parallelism, so a congested link should join
neighbouring stages of one pipeline rather than two holders of the same layers. Slow devices should
share as few stages as possible, ⌈slow devices / ranks per stage⌉, interior ones first, because the
first and last stages also hold embedding and head. These two rules only order the candidates; the
one that `predict_s` finds fastest is chosen, so a rule that doesn't hold does no harm.

Slices keep their owners when ranks swap places, so a link is relieved for good only if both its
ends leave the layers that they own: hence moves of both ends at once.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler.locate import Pair

__all__ = [
    "SwapProposal",
    "gradient_links",
    "move_ranks",
    "propose_swap",
    "ranks_moved",
    "swap_ranks",
]

_Swap = tuple[tuple[int, ...], tuple[int, ...]]
_MOST_SWAPS = 4
_PREDICTIONS = 64
"""Most candidates that are predicted for each swap, the most promising ones."""
_LEAST_GAIN = 0.01
"""Least relative gain of a swap."""


@dataclass(frozen=True, kw_only=True)
class SwapProposal:
    """A plan with places swapped, and what it should gain."""

    plan: ParallelPlan
    swaps: tuple[_Swap, ...]
    """Groups of ranks that changed places, in order."""
    before_s: float
    """Predicted iteration time of the plan as it is, with the fault."""
    after_s: float
    """Predicted iteration time of the proposed plan, with the fault."""

    def __str__(self) -> str:
        pairs = ", ".join(f"{_join(a)} ↔ {_join(b)}" for a, b in self.swaps)
        return f"swapped places of ranks {pairs}"


def propose_swap(
    plan: ParallelPlan,
    *,
    slow_ranks: Mapping[int, float],
    slow_links: Collection[Pair],
    predict_s: Callable[[ParallelPlan], float],
    has_room: Callable[[ParallelPlan], bool] | None = None,
) -> SwapProposal | None:
    """Return the best plan found by swapping places, or None if no swap helps.

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
    before_s = best_s = predict_s(plan)
    best = plan
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
    if not swaps:
        return None
    return SwapProposal(plan=best, swaps=tuple(swaps), before_s=before_s, after_s=best_s)


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


def ranks_moved(before: ParallelPlan, after: ParallelPlan) -> dict[int, int]:
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
