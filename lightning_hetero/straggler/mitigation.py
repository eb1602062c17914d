"""Find the possible mitigations of a fault, Greyhound's S2 to S4, each with its predicted time."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler.locate import Finding
from lightning_hetero.straggler.run_model import RunModel, Slowness
from lightning_hetero.straggler.swap import move_ranks, propose_swap, ranks_moved

__all__ = [
    "Mitigation",
    "PossibleMitigation",
    "WatchedPlans",
    "find_mitigations",
    "restart_mitigation",
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
    models: tuple[RunModel, ...]
    """A model of each plan that ran, the one that ran most often first."""
    has_room: Callable[[ParallelPlan], bool]
    """Tells whether each rank's memory suffices for its place in a plan."""

    def has_room_for(self, taken_by: Mapping[int, int]) -> bool:
        """Return whether all plans still fit if ranks take others' places ({rank: taker})."""
        return all(self.has_room(move_ranks(plan, taken_by)) for plan in self.plans)

    def predict_s(self, taken_by: Mapping[int, int]) -> float:
        """Return the predicted seconds of an iteration if ranks take others' places."""
        return sum(
            model.facts.share
            * model.iteration_s(model.balanced(move_ranks(model.facts.plan, taken_by)))
            for model in self.models
        )

    def mitigation(
        self, step: Mitigation, taken_by: Mapping[int, int], effect: str
    ) -> PossibleMitigation:
        """Return the mitigation in which ranks take others' places, the same in all plans."""
        model = self.models[0]
        place_of = {taker: rank for rank, taker in taken_by.items()}
        before = model.paces(model.facts.plan)
        after = model.paces(move_ranks(model.facts.plan, taken_by))
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


def find_mitigations(run: WatchedPlans, slowness: Slowness) -> tuple[PossibleMitigation, ...]:
    """Return S2 and S3, each if it would change anything.

    S3 moves the same ranks in all plans, so each moved rank takes over another rank's work. It also
    moves micro-batches, so its predicted time is never worse than that of S2.
    """
    model, found = run.models[0], []
    balancing = _balancing(model, slowness, model.facts.plan)
    if balancing:
        found.append(run.mitigation(Mitigation.REBALANCE, {}, balancing))
    proposal = propose_swap(
        model.facts.plan,
        slow_ranks=slowness.ranks,
        slow_links=list(slowness.links),
        predict_s=lambda plan: run.predict_s(ranks_moved(model.facts.plan, plan)),
        has_room=lambda plan: run.has_room_for(ranks_moved(model.facts.plan, plan)),
    )
    if proposal is not None:
        balancing = _balancing(model, slowness, proposal.plan)
        effect = f"{proposal} and {balancing}" if balancing else str(proposal)
        taken_by = ranks_moved(model.facts.plan, proposal.plan)
        found.append(run.mitigation(Mitigation.SWAP, taken_by, effect))
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


def _balancing(model: RunModel, slowness: Slowness, plan: ParallelPlan) -> str:
    """Return, in words, how a plan's pipelines would be balanced; "" if nothing changes."""
    if model.facts.is_assigned:
        return f"assigned less to {_ranks(slowness.ranks)}" if slowness.ranks else ""
    counts = model.counts(plan), model.counts(model.balanced(plan))
    num_moved = sum(max(0, a - b) for a, b in zip(*counts, strict=True))
    return f"moved {num_moved} of {sum(counts[0])} micro-batches away" if num_moved else ""


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
