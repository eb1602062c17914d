"""Solve the order of a pipeline's passes: list scheduling by critical path, then improvement.

The first priorities are seconds to the end on the critical path: at a pace of b seconds a
micro-batch, an F that is d micro-batches ahead of an I comes first as long as its round trip takes
longer than d·b, so how far stages run ahead follows from links and stages. Further dispatches take
as priorities the latest starts in the best schedule so far, at first as they are, then with noise.
A dispatch is a feasible run, so the orders that it returns can't wait for each other.
"""

import math
import random
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
    latest,
)
from lightning_hetero.schedules.problem import ScheduleProblem

__all__ = ["Solution", "order_1f1b", "solve", "solve_in_rooms"]

_MOST_TRIES = 1000
_LEAST_TRIES = 4
_TRIES_OF_ONE_PASS = 4e6
"""Dispatches, over the square of the number of passes: 0.1 s at most, 50 ms for 16 stages with 64
micro-batches."""
_GOOD = 1.0005
"""A schedule this close to the bound, as a multiple of it, isn't improved."""
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
    bound_s = _bound_s(problem)
    num_passes = 3 * problem.num_stages * problem.num_microbatches
    num_tries = min(_MOST_TRIES, max(_LEAST_TRIES, int(_TRIES_OF_ONE_PASS / num_passes**2)))
    usual = order_1f1b(problem)
    best = (end_s(problem, usual) if has_room(problem, usual) else math.inf), usual
    best_rule = Rule(([], []), patience=0.0)
    randomly, rules, num_vain = random.Random(0), _first_rules(problem), 0
    for _ in range(num_tries):
        if best[0] <= bound_s * _GOOD:
            break
        rule = next(rules, None)
        if rule is None:
            rule = _changed(problem, best, best_rule, randomly, is_first=not num_vain)
        found = Dispatch(problem, rule).run()
        num_vain += 1
        if found[0] < best[0] * (1 - 1e-9):
            best, best_rule, num_vain = found, rule, 0
    return Solution(orders=best[1], end_s=best[0])


def _bound_s(problem: ScheduleProblem) -> float:
    """Return a lower bound: the first micro-batch's way to a stage, its work, the last one's back.

    The gradients of weights may follow the way back.
    """
    rows = zip(problem.forward_s, problem.input_s, problem.weight_s, strict=True)
    there_s = back_s = bound_s = 0.0
    for stage, (forward_s, input_s, weight_s) in enumerate(rows):
        passes_s = there_s + sum(forward_s) + sum(input_s)
        bound_s = max(bound_s, passes_s + sum(weight_s), passes_s + back_s)
        if stage + 1 < problem.num_stages:
            there_s += forward_s[0] + problem.forward_edges[stage].whole_s
            back_s += input_s[-1] + problem.backward_edges[stage].whole_s
    return bound_s


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


def _first_rules(problem: ScheduleProblem) -> Iterator[Rule]:
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


def _changed(
    problem: ScheduleProblem,
    best: tuple[float, Orders],
    rule: Rule,
    randomly: random.Random,
    *,
    is_first: bool,
) -> Rule:
    """Return a rule by the latest starts in the best schedule, with noise if it isn't the first."""
    priorities = latest(problem, *best)
    if is_first:
        return Rule(priorities, rule.patience)
    noise_s = best[0] / (2 * problem.num_microbatches) * randomly.random()
    forwards, inputs = (
        [[value + randomly.gauss(0.0, noise_s) for value in row] for row in rows]
        for rows in priorities
    )
    patience = randomly.choice((0.0, 0.5, 1.0))
    return Rule((forwards, inputs), patience, hold=randomly.choice((0.0, 0.0, 0.3, 0.8)))
