"""Solve the order of a pipeline's passes, as the runtime executes it: list scheduling.

Priorities are seconds to the end on the critical path: at a pace of b seconds a micro-batch, an F
that is d micro-batches ahead of an I comes first as long as its round trip takes longer than d·b,
so how far stages run ahead follows from links and stages. Several paces are tried, each with stages
that wait for the next F or I rather than begin a W, and with stages that don't. A dispatch is a
feasible run, so the orders that it returns can't wait for each other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b
from lightning_hetero.core.reading import Choice
from lightning_hetero.schedules.problem import (
    FORWARD,
    INPUT,
    WEIGHT,
    Dispatch,
    Edge,
    Orders,
    Pass,
    Priorities,
    Rule,
    ScheduleProblem,
    end_s,
    has_room,
)

__all__ = [
    "Schedule",
    "Solution",
    "StageTimes",
    "as_actions",
    "order_1f1b",
    "solve",
    "solve_actions",
    "solve_in_rooms",
]

_DEPTHS = 1.5, 2.0, 3.0, 4.0
"""Micro-batches that a deep schedule may hold on each stage, as multiples of their number."""
_WORTH = 1.01
"""More room must make a schedule shorter than this part."""
_WEIGHT_SHARE = 0.5
"""Share of a backward that W takes: a linear layer's two products take the same time."""
_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.INPUT, WEIGHT: ActionKind.WEIGHT}
"""The kinds of actions, by those of passes."""
_WHOLE_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.BACKWARD}
"""The same where backwards aren't split."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The order of each stage's passes, and when the last of them ends."""

    orders: Orders
    end_s: float
    """End of the last pass."""


def solve(problem: ScheduleProblem) -> Solution:
    """Return a short schedule within each stage's room; the same one for the same problem.

    It is never longer than 1F1B, where that has room.
    """
    usual = order_1f1b(problem)
    found = [(end_s(problem, usual), usual)] if has_room(problem, usual) else []
    found += [Dispatch(problem, rule).run() for rule in _rules(problem)]
    seconds, orders = min(found, key=lambda pair: pair[0])
    return Solution(orders=orders, end_s=seconds)


def solve_in_rooms(problems: Iterable[ScheduleProblem]) -> Solution:
    """Return the schedule in the least room beyond which the next one gains hardly anything.

    Args:
        problems: One pipeline's, whose stages have more and more room; at least one.
    """
    best: Solution | None = None
    for problem in problems:
        found = solve(problem)
        if best is not None and found.end_s * _WORTH > best.end_s:
            break
        best = found
    assert best is not None
    return best


def order_1f1b(problem: ScheduleProblem) -> Orders:
    """Return 1F1B's orders, each I followed by its W.

    Without a split, the stage before waits for all of a backward: then W must take no seconds.
    """
    orders = []
    for stage in range(problem.num_stages):
        order: list[Pass] = []
        for action in schedule_1f1b(
            stage_index=stage,
            num_stages=problem.num_stages,
            num_microbatches=problem.num_microbatches,
        ):
            is_forward = action.kind is ActionKind.FORWARD
            kinds = (FORWARD,) if is_forward else (INPUT, WEIGHT)
            order += [(kind, stage, action.microbatch_index) for kind in kinds]
        orders.append(tuple(order))
    return tuple(orders)


def _rules(problem: ScheduleProblem) -> Iterator[Rule]:
    """Yield rules by critical path, for several paces of a micro-batch."""
    rows = zip(problem.forward_s, problem.input_s, problem.weight_s, strict=True)
    work_s = [[sum(row) / problem.num_microbatches for row in stage] for stage in rows]
    whole_s = max(map(sum, work_s))
    urgent_s = max(forward_s + input_s for forward_s, input_s, _ in work_s)
    # The last two: I always first, F always first.
    for pace_s in dict.fromkeys((whole_s, urgent_s, urgent_s / 2, 1e3 * whole_s, 0.0)):
        priorities = _critical(problem, pace_s)
        yield Rule(priorities, patience=0.0)
        yield Rule(priorities, patience=1.0)


def _critical(problem: ScheduleProblem, pace_s: float) -> Priorities:
    """Return minus the seconds from the begin of each F and I to the end."""
    count, num_stages = problem.num_microbatches, problem.num_stages
    rest_s = [[(count - 1 - m) * pace_s for m in range(count)]]
    to_end: list[list[float]] = []
    passes = [(problem.input_s, stage) for stage in range(num_stages)]
    passes += [(problem.forward_s, stage) for stage in reversed(range(num_stages))]
    hops = [*problem.backward_edges, None, *reversed(problem.forward_edges), None]
    for (seconds, stage), edge in zip(passes, hops, strict=True):
        row = [rest + own for rest, own in zip(rest_s[-1], seconds[stage], strict=True)]
        to_end.append([-value for value in row])
        hop_s = 0.0 if edge is None else edge.latency_s + edge.transfer_s
        rest_s.append([value + hop_s for value in row])
    return to_end[: num_stages - 1 : -1], to_end[:num_stages]


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
