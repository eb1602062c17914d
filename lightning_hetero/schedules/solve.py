"""Solve the order of a pipeline's passes, as the runtime executes it: list scheduling.

A pass's priority is the number of seconds from its start to the end of the schedule, on the
critical path. Suppose that micro-batches follow each other every b seconds, the *pace*. Then an F
that is d micro-batches ahead of an I comes first if its round trip to the last stage takes longer
than d·b. So the seconds of links and stages determine how far stages run ahead. Several paces are
tried, each with two rules: stages wait for the next F or I, or start a W meanwhile. An order is
made by simulating a run, so it can't deadlock.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.places import stages_by_worker, usual_held
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

_DEPTHS = 1.5, 2.0, 3.0, 4.0
"""Micro-batches that a deep schedule may hold on each stage, as multiples of the number of
workers."""
_MOST_MOVED = 36
"""In problems with up to this many passes, single passes are moved as well; in larger ones the
orders are near the best without."""
_WORTH = 1.01
"""More room is used only if it makes the schedule shorter by at least this factor."""
_WEIGHT_SHARE = 0.5
"""Share of a backward that W takes: both products of a linear layer take the same time."""
_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.INPUT, WEIGHT: ActionKind.WEIGHT}
"""The kinds of actions, by those of passes."""
_WHOLE_KINDS = {FORWARD: ActionKind.FORWARD, INPUT: ActionKind.BACKWARD}
"""The same where backwards aren't split."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The order of each worker's passes, and when the last of them ends."""

    orders: Orders
    end_s: float
    """End of the last pass."""


def solve(problem: ScheduleProblem) -> Solution:
    """Return a short schedule within each stage's room; equal problems give equal schedules.

    It is never longer than 1F1B, if 1F1B fits into the room.
    """
    usual, least_s = order_1f1b(problem), _least_s(problem) * (1 + 1e-9)
    found = [(end_s(problem, usual), usual)] if has_room(problem, usual) else []
    for rule in _rules(problem):
        found.append(Dispatch(problem, rule).run())
        if found[-1][0] <= least_s:
            break
    seconds, orders = min(found, key=lambda pair: pair[0])
    if sum(map(len, orders)) <= _MOST_MOVED and seconds > least_s:
        seconds, orders = _improved(problem, seconds, orders)
    return Solution(orders=orders, end_s=seconds)


def _improved(problem: ScheduleProblem, end: float, orders: Orders) -> tuple[float, Orders]:
    """Move single passes within their workers' orders as long as that shortens the schedule."""
    best, before_s = (end, orders), math.inf
    while best[0] < before_s:
        before_s = best[0]
        for worker, place in [(w, i) for w, order in enumerate(orders) for i in range(len(order))]:
            for order in _moved(best[1][worker], place):
                tried = (*best[1][:worker], order, *best[1][worker + 1 :])
                with suppress(PlanError):  # Passes wait for each other.
                    seconds = end_s(problem, tried)
                    if seconds < best[0] * (1 - 1e-9) and has_room(problem, tried):
                        best = seconds, tried
    return best


def _moved(order: Sequence[Pass], place: int) -> Iterator[tuple[Pass, ...]]:
    """Yield orders in which one pass is at another place, as far as its stage allows."""
    kind, stage, microbatch = order[place]
    rest = [*order[:place], *order[place + 1 :]]
    for step in (-1, 1):
        to = place + step
        while 0 <= to < len(order):
            other = order[to]
            if other[1] == stage and (other[0] == kind or other[2] == microbatch):
                break
            yield (*rest[:to], order[place], *rest[to:])
            to += step


def solve_in_rooms(problems: Iterable[ScheduleProblem]) -> Solution:
    """Return the schedule in the smallest room from which more room gains hardly anything.

    Args:
        problems: Problems of one pipeline, whose stages have more and more room; at least one.
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
    """Return 1F1B's orders, each I followed by its W; with chunks, see `usual_actions`.

    If backwards aren't split, the previous stage waits for all of a backward: then W must take 0 s.
    """
    kinds = {ActionKind.FORWARD: (FORWARD,), ActionKind.BACKWARD: (INPUT, WEIGHT)}
    return tuple(
        tuple(
            (kind, action.stage_index, action.microbatch_index)
            for action in actions
            for kind in kinds[action.kind]
        )
        for actions in usual_actions(problem.workers, problem.num_microbatches)
    )


@lru_cache(maxsize=256)
def usual_actions(
    workers: tuple[int, ...], num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return each worker's actions if nothing is solved: 1F1B.

    With chunks it is the order of a simulated run with stages of equal seconds, in which no worker
    holds more micro-batches than there are workers. Two rules are tried: one with a pace of half
    the busiest worker's seconds, and one in which F always goes first. The shorter order is used;
    all rules of `solve` together would find none that is shorter.
    """
    num_stages = len(workers)
    if len(set(workers)) == num_stages:
        return tuple(
            schedule_1f1b(stage_index=s, num_stages=num_stages, num_microbatches=num_microbatches)
            for s in range(num_stages)
        )
    problem = ScheduleProblem.equal(
        forward_s=[1.0] * num_stages,
        input_s=[2.0] * num_stages,
        weight_s=[0.0] * num_stages,
        num_microbatches=num_microbatches,
        workers=workers,
    )
    busiest_s = 3.0 * max(map(len, stages_by_worker(workers)))
    rules = [Rule(_critical(problem, pace_s), patience=0.0) for pace_s in (busiest_s / 2, 0.0)]
    _, orders = min((Dispatch(problem, rule).run() for rule in rules), key=lambda pair: pair[0])
    return as_actions(orders, is_split=False)


def _least_s(problem: ScheduleProblem) -> float:
    """Return a bound on the end: the largest sum of a worker's earliest start and its work."""
    begin_s, work_s = 0.0, [0.0] * problem.num_workers
    begins_s: dict[int, float] = {}
    hops_s = [*(edge.whole_s for edge in problem.forward_edges), 0.0]
    seconds = zip(problem.forward_s, problem.input_s, problem.weight_s, strict=True)
    for worker, rows, hop_s in zip(problem.workers, seconds, hops_s, strict=True):
        begins_s.setdefault(worker, begin_s)
        work_s[worker] += sum(map(sum, rows))
        begin_s += sum(rows[0][:1]) + hop_s
    return max(begins_s[worker] + own_s for worker, own_s in enumerate(work_s))


def _rules(problem: ScheduleProblem) -> Iterator[Rule]:
    """Yield rules by critical path, for several paces of a micro-batch."""
    work_s = [[0.0] * 3 for _ in range(problem.num_workers)]
    """Mean seconds of a micro-batch on each worker, by kind."""
    for kind, rows in enumerate((problem.forward_s, problem.input_s, problem.weight_s)):
        for worker, row in zip(problem.workers, rows, strict=True):
            work_s[worker][kind] += sum(row) / max(1, problem.num_microbatches)
    whole_s = max(map(sum, work_s))
    urgent_s = max(forward_s + input_s for forward_s, input_s, _ in work_s)
    has_chunks = problem.num_workers < problem.num_stages
    # With chunks, two extreme paces are worth trying, too: with the largest every I goes before
    # every F, with 0 the other way round.
    others_s = (whole_s, 1e3 * whole_s, 0.0) if has_chunks else ()
    for pace_s in dict.fromkeys((urgent_s, urgent_s / 2, *others_s)):
        priorities = _critical(problem, pace_s)
        yield Rule(priorities, patience=0.0)
        if any(map(any, problem.weight_s)):
            yield Rule(priorities, patience=1.0)
        if has_chunks:
            # Orders of split backwards with chunks (interleaved zero bubble) are only as short if I
            # comes somewhat earlier.
            forwards, inputs = priorities
            earlier = [[value - whole_s / 2 for value in row] for row in inputs]
            yield Rule((forwards, earlier), patience=0.0)


def _critical(problem: ScheduleProblem, pace_s: float) -> Priorities:
    """Return minus the seconds from the start of each F and I to the end of the schedule."""
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
    """Like "split", and stages run further ahead where that saves time. A stage holds up to four
    times as many micro-batches as the pipeline has stages, as far as its memory allows. Under 1F1B
    it holds one for itself and one for each stage after it."""

    @property
    def is_solved(self) -> bool:
        """Whether orders other than 1F1B's may run."""
        return self is not Schedule.ONE_F_ONE_B

    @property
    def least_gain(self) -> float:
        """Share of an iteration that a solved order must save over 1F1B to run instead."""
        return 0.01 if self is Schedule.AUTO else 0.0

    def rooms(self, memory: Sequence[float], workers: Sequence[int]) -> list[tuple[float, ...]]:
        """Return how many micro-batches each worker may hold: choices, the smallest first.

        Args:
            memory: How many each worker's memory has room for; as many as usual in any case.
            workers: The worker of each stage.
        """
        usual = tuple(map(float, usual_held(workers)))
        if self is Schedule.SPLIT:
            return [usual]
        deep = [
            tuple(map(max, usual, (min(depth * len(memory), most) for most in memory)))
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


def solve_actions(  # noqa: PLR0913 - what a schedule depends on
    stages: Sequence[StageTimes],
    num_microbatches: int,
    *,
    rooms: Sequence[Sequence[float]] = ((),),
    least_gain: float = 0.0,
    is_split: bool = True,
    sizes: Sequence[float] = (),
    workers: Sequence[int] = (),
) -> tuple[tuple[Action, ...], ...] | None:
    """Return each worker's actions; None if they don't gain enough over 1F1B.

    Args:
        stages: Seconds of a micro-batch, by stage.
        num_microbatches: Micro-batches of the iteration.
        rooms: The number of micro-batches that each worker may hold, as a list of choices; the
            first that is nearly as good as any is used. By default as many as under 1F1B.
        least_gain: The least that an order must save, as a share of 1F1B's seconds.
        is_split: Whether backwards are split.
        sizes: If micro-batches differ, a factor for each, by which its seconds are multiplied.
        workers: The worker of each stage; by default each stage has its own.
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
            workers=workers,
        )

    whole, share = problem_of(0.0), _WEIGHT_SHARE if is_split else 0.0
    found = solve_in_rooms(problem_of(share, most_held) for most_held in rooms)
    if found.end_s > end_s(whole, order_1f1b(whole)) * (1 - least_gain):
        return None
    return as_actions(found.orders, is_split=is_split)


def as_actions(orders: Orders, *, is_split: bool = True) -> tuple[tuple[Action, ...], ...]:
    """Return orders as lists of actions; if backwards aren't split, an I is a whole backward."""
    kinds = _KINDS if is_split else _WHOLE_KINDS
    return tuple(
        tuple(Action(kinds[kind], stage, m) for kind, stage, m in order if kind in kinds)
        for order in orders
    )
