"""Solved orders as the lists of actions that the runtime executes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.schedules.dispatch import FORWARD, INPUT, WEIGHT, Orders, end_s
from lightning_hetero.schedules.problem import Edge, ScheduleProblem
from lightning_hetero.schedules.solve import order_1f1b, solve_in_rooms

__all__ = ["StageTimes", "as_actions", "solve_actions"]

_WEIGHT_SHARE = 0.5
"""Share of a backward that W takes: a linear layer's two products take the same time."""
_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.INPUT, WEIGHT: ActionKind.WEIGHT}
"""The kinds of actions, by those of passes."""
_WHOLE_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.BACKWARD}
"""The same where backwards aren't split."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a micro-batch on a stage."""

    forward_s: float
    backward_s: float
    edge: Edge = field(default_factory=Edge)
    """The link to the next stage, both ways."""


def solve_actions(
    stages: Sequence[StageTimes],
    num_microbatches: int,
    *,
    rooms: Sequence[Sequence[float]] = ((),),
    least_gain: float = 0.0,
    is_split: bool = True,
    sizes: Sequence[float] = (),
) -> tuple[tuple[Action, ...], ...] | None:
    """Return each stage's actions; None if they don't gain enough over 1F1B.

    Args:
        stages: Seconds of a micro-batch, by stage.
        num_microbatches: Micro-batches of the iteration.
        rooms: Micro-batches that each stage may hold; the first of these that is nearly as good as
            any is used. By default as many as 1F1B holds.
        least_gain: What an order must gain, as a share of 1F1B's seconds.
        is_split: Whether backwards are split.
        sizes: Of each micro-batch, where they differ: it takes so many times those seconds.
    """

    def problem_of(weight_share: float, most_held: Sequence[float] = ()) -> ScheduleProblem:
        return ScheduleProblem.equal(
            forward_s=[stage.forward_s for stage in stages],
            input_s=[stage.backward_s * (1 - weight_share) for stage in stages],
            weight_s=[stage.backward_s * weight_share for stage in stages],
            num_microbatches=num_microbatches,
            most_held=most_held,
            edges=[stage.edge for stage in stages[:-1]],
            sizes=sizes,
        )

    whole, share = problem_of(0.0), _WEIGHT_SHARE if is_split else 0.0
    found = solve_in_rooms(problem_of(share, most_held) for most_held in rooms)
    if found.end_s > end_s(whole, order_1f1b(whole)) * (1 - least_gain):
        return None
    return as_actions(found.orders, is_split=is_split)


def as_actions(orders: Orders, *, is_split: bool = True) -> tuple[tuple[Action, ...], ...]:
    """Return orders as lists of actions; if backwards aren't split, each I is all of one."""
    kinds = _KINDS if is_split else _WHOLE_KINDS
    return tuple(
        tuple(Action(kinds[kind], stage, m) for kind, stage, m in order if kind in kinds)
        for order in orders
    )
