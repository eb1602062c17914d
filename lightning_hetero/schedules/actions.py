"""Solved orders as lists of actions, and what 1F1B takes beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b
from lightning_hetero.schedules.problem import Edge, ScheduleProblem
from lightning_hetero.schedules.solve import F, I, Pass, end_of_orders, solve

__all__ = ["StageTimes", "order_1f1b", "solve_actions"]

_WEIGHT_SHARE = 0.5
"""Share of a backward that the gradients of weights take: a linear layer's two products are alike."""
_KINDS = (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a micro-batch on a stage."""

    forward_s: float
    backward_s: float
    edge: Edge = Edge()
    """The link to the next stage, and back."""


def solve_actions(
    stages: Sequence[StageTimes],
    num_microbatches: int,
    *,
    is_split: bool,
    depth: float = 1.0,
    least_gain: float = 0.0,
) -> tuple[tuple[Action, ...], ...] | None:
    """Return each stage's actions; None if no order found gains `least_gain` over 1F1B.

    Args:
        stages: Seconds of a micro-batch, by stage.
        num_microbatches: Micro-batches of the iteration.
        is_split: Whether backward passes may be split.
        depth: Micro-batches that a stage holds at once, as a multiple of those that 1F1B holds.
        least_gain: Share of 1F1B's seconds.
    """
    num_stages, share = len(stages), _WEIGHT_SHARE if is_split else 0.0
    problem = ScheduleProblem.equal(
        forward_s=[stage.forward_s for stage in stages],
        input_s=[stage.backward_s * (1 - share) for stage in stages],
        weight_s=[stage.backward_s * share for stage in stages],
        num_microbatches=num_microbatches,
        depth=[depth * (num_stages - index) for index in range(num_stages)],
        edges=[stage.edge for stage in stages[:-1]],
        waiting=1.0,
    )
    found = solve(problem)
    usual = end_of_orders(problem, order_1f1b(problem))
    if found.end_s > usual * (1 - least_gain):
        return None
    return tuple(
        _as_actions(order, index, is_split=is_split) for index, order in enumerate(found.orders)
    )


def order_1f1b(problem: ScheduleProblem) -> tuple[tuple[Pass, ...], ...]:
    """Return 1F1B's order, each I followed by its W."""
    orders = []
    for stage in range(problem.num_stages):
        order: list[Pass] = []
        for action in schedule_1f1b(
            stage_index=stage,
            num_stages=problem.num_stages,
            num_microbatches=problem.num_microbatches,
        ):
            kinds = (F,) if action.kind is ActionKind.FORWARD else (I, I + 1)
            order += [(kind, stage, action.microbatch_index) for kind in kinds]
        orders.append(tuple(order))
    return tuple(orders)


def _as_actions(order: Sequence[Pass], stage: int, *, is_split: bool) -> tuple[Action, ...]:
    if is_split:
        return tuple(Action(_KINDS[kind], stage, m) for kind, _, m in order)
    whole = {F: ActionKind.FORWARD, I: ActionKind.BACKWARD}
    return tuple(Action(whole[kind], stage, m) for kind, _, m in order if kind in whole)
