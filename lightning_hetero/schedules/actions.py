"""Which schedules there are to choose from, and solved orders as the runtime executes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.core.reading.choices import Choice
from lightning_hetero.schedules.dispatch import FORWARD, INPUT, WEIGHT, Orders, end_s
from lightning_hetero.schedules.problem import Edge, ScheduleProblem
from lightning_hetero.schedules.solve import order_1f1b, solve_in_rooms

__all__ = ["Schedule", "StageTimes", "as_actions", "solve_actions"]

_WEIGHT_SHARE = 0.5
"""Share of a backward that W takes: a linear layer's two products take the same time."""
_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.INPUT, WEIGHT: ActionKind.WEIGHT}
"""The kinds of actions, by those of passes."""
_WHOLE_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.BACKWARD}
"""The same where backwards aren't split."""


_DEPTHS = 1.5, 2.0, 3.0, 4.0
"""Micro-batches that a deep schedule may hold on each stage, as multiples of their number."""


class Schedule(Choice):
    """How the passes of a pipeline's micro-batches are ordered."""

    AUTO = "auto"
    """"deep" where that saves at least 1 % of an iteration, else "1f1b"."""
    ONE_F_ONE_B = "1f1b"
    """One forward and one backward in turn."""
    SPLIT = "split"
    """Backward passes of linear layers are split; stages hold no more than under 1F1B."""
    DEEP = "deep"
    """The same, and stages run ahead where that saves time: each holds up to four micro-batches a
    stage of the pipeline, as far as its memory allows; 1F1B holds as many as stages follow."""

    @property
    def is_solved(self) -> bool:
        """Whether orders other than 1F1B's may run."""
        return self is not Schedule.ONE_F_ONE_B

    @property
    def least_gain(self) -> float:
        """Share of an iteration that a solved order must save over 1F1B to run instead."""
        return 0.01 if self is Schedule.AUTO else 0.0

    def rooms(self, memory: Sequence[float]) -> list[tuple[float, ...]]:
        """Return how many micro-batches each stage may hold: choices, the smallest first.

        Args:
            memory: How many each stage's memory has room for; as many as under 1F1B in any case.
        """
        num_stages = len(memory)
        usual = tuple(map(float, range(num_stages, 0, -1)))
        if self is Schedule.SPLIT:
            return [usual]
        deep = [
            tuple(map(max, usual, (min(depth * num_stages, most) for most in memory)))
            for depth in _DEPTHS
        ]
        return list(dict.fromkeys([usual, *deep]))


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
