"""Solve the order of a pipeline's passes: list scheduling by critical path.

Priorities are seconds to the end on the critical path: at a pace of b seconds a micro-batch, an F
that is d micro-batches ahead of an I comes first as long as its round trip takes longer than d·b,
so how far stages run ahead follows from links and stages. Several paces are tried, each with stages
that wait for the next F or I rather than begin a W, and with stages that don't. A dispatch is a
feasible run, so the orders that it returns can't wait for each other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_hetero.core.actions import ActionKind, schedule_1f1b
from lightning_hetero.schedules.dispatch import (
    FORWARD,
    INPUT,
    WEIGHT,
    Dispatch,
    Orders,
    Pass,
    Priorities,
    Rule,
    end_s,
    has_room,
)
from lightning_hetero.schedules.problem import ScheduleProblem

__all__ = ["Solution", "order_1f1b", "solve", "solve_in_rooms"]

_WORTH = 1.01
"""More room must make a schedule shorter than this part."""


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
