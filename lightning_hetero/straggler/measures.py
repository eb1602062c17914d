"""Find what can be done about a fault: Greyhound's S2 to S4, each with its predicted time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler.locate import Finding
from lightning_hetero.straggler.mitigation import DecisionKind, Mitigation
from lightning_hetero.straggler.run_model import RunModel, Slowness
from lightning_hetero.straggler.swap import SwapConfig, propose_swap

__all__ = ["Act", "Measure", "assigning_measure", "find_measures", "restart_measure"]

_SEARCH = SwapConfig(max_swaps=4, predictions_per_swap=64)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A step that is possible against the present fault."""

    mitigation: Mitigation
    iteration_s: float
    """Predicted iteration time while the fault lasts."""
    effect: str
    """What it does: "moved 5 of 32 micro-batches away"."""
    plan: ParallelPlan | None = None
    """The plan to run; None for a restart."""
    first_plan: ParallelPlan | None = None
    """The plan to return to."""
    factors: Mapping[int, float] = field(default_factory=dict)
    """By rank its healthy time in the first plan's place over that in this plan's."""
    slowdowns: tuple[float, ...] = ()
    """How many times slower each rank is, for a data module that assigns the samples itself."""
    exclude: tuple[int, ...] = ()
    """Ranks that a restart should leave out."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """What all ranks do between two steps."""

    kind: DecisionKind
    measure: Measure
    """What to apply, or what to undo."""


def find_measures(model: RunModel, plan: ParallelPlan, slowness: Slowness) -> tuple[Measure, ...]:
    """Return S2 and S3 as plans where they change anything; the plan is the one without a fault.

    S3 moves micro-batches too, so it is never worse than S2 by prediction.
    """
    measures = []
    balanced = model.balanced(plan)
    moved = _moved(model, plan, balanced)
    if moved:
        measures.append(_measure(Mitigation.REBALANCE, model, plan, balanced, f"{moved} away"))
    proposal = propose_swap(
        plan,
        slow_ranks=slowness.ranks,
        slow_links=list(slowness.links),
        predict_s=lambda candidate: model.iteration_s(model.balanced(candidate)),
        config=_SEARCH,
    )
    if proposal is not None:
        swapped = model.balanced(proposal.plan)
        moved = _moved(model, plan, swapped)
        effect = f"{proposal}{' and ' + moved if moved else ''}"
        measures.append(_measure(Mitigation.SWAP, model, plan, swapped, effect))
    return tuple(measures)


def assigning_measure(
    plan: ParallelPlan, slowness: Slowness, *, healthy_s: float, world_size: int
) -> Measure | None:
    """Return S2 where a data module assigns samples by what each rank takes; None if none is slow.

    Its pipelines end together, so with slow ones every pipeline takes D / Σ 1/slowdown times as
    long.
    """
    if not slowness.ranks:
        return None
    slowdowns = [
        max(slowness.ranks.get(rank, 1.0) for rank in pipeline.ranks) for pipeline in plan.pipelines
    ]
    named = ", ".join(map(str, sorted(slowness.ranks)))
    return Measure(
        mitigation=Mitigation.REBALANCE,
        iteration_s=healthy_s * len(slowdowns) / sum(1 / slowdown for slowdown in slowdowns),
        effect=f"assigns less to rank{'s' if len(slowness.ranks) > 1 else ''} {named}",
        slowdowns=tuple(slowness.ranks.get(rank, 1.0) for rank in range(world_size)),
    )


def restart_measure(
    findings: Sequence[Finding],
    *,
    healthy_s: float,
    world_size: int,
    num_left: Callable[[Sequence[int]], int],
) -> Measure | None:
    """Return S4: the run without the slow ranks' machines, where the others do as much, in longer.

    A slow link is left out with its second rank. None if nobody would be left.

    Args:
        findings: What is slow.
        healthy_s: Iteration time without a fault, seconds.
        world_size: Number of ranks.
        num_left: Returns how many ranks a restart without some ranks would have.
    """
    exclude = tuple(sorted({finding.ranks[-1] for finding in findings}))
    left = num_left(exclude)
    if not exclude or not left:
        return None
    named = ", ".join(map(str, exclude))
    return Measure(
        mitigation=Mitigation.RESTART,
        iteration_s=healthy_s * world_size / left,
        effect=f"asked for a restart without rank{'s' if len(exclude) > 1 else ''} {named}",
        exclude=exclude,
    )


def _measure(
    step: Mitigation, model: RunModel, first: ParallelPlan, plan: ParallelPlan, effect: str
) -> Measure:
    before_s, after_s = model.places_s(first), model.places_s(plan)
    return Measure(
        mitigation=step,
        iteration_s=model.iteration_s(plan),
        effect=effect,
        plan=plan,
        first_plan=first,
        factors={rank: before_s[rank] / after_s[rank] for rank in before_s.keys() & after_s.keys()},
    )


def _moved(model: RunModel, before: ParallelPlan, after: ParallelPlan) -> str:
    """Say how many micro-batches another pipeline computes, "" if none."""
    counts = model.counts(before), model.counts(after)
    num_moved = sum(max(0, a - b) for a, b in zip(*counts, strict=True))
    return f"moved {num_moved} of {sum(counts[0])} micro-batches" if num_moved else ""
