"""Solve the order of a pipeline's passes: list scheduling by critical path, then improvement.

A *dispatch* runs the pipeline in simulated time. Whenever a stage is free it takes, of the passes
whose inputs have arrived and whose bytes fit, the one with the least priority value; where there is
none it makes use of the wait by a W. The first priorities are latest starts on the critical path:
with b seconds of work a micro-batch on the slowest stage, an F that is d micro-batches ahead of an I
comes first as long as its round trip takes longer than d·b, so depth follows from links and stages.
Each further dispatch takes as priorities the latest starts of the best schedule so far.

A dispatch is a feasible run, so the orders it returns can't block each other.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.core.errors import PlanError
from lightning_hetero.schedules.bound import lower_bound_s
from lightning_hetero.schedules.problem import ScheduleProblem

__all__ = ["F", "I", "Pass", "Solution", "W", "end_of_orders", "solve"]

_NEVER = math.inf
F, I, W = range(3)
Pass = tuple[int, int, int]
"""(F, I or W; chunk; micro-batch)."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The order of each stage's passes, and when the last of them ends."""

    orders: tuple[tuple[Pass, ...], ...]
    """By stage."""
    end_s: float
    """End of the last pass."""
    bound_s: float
    """No order ends sooner."""


def solve(problem: ScheduleProblem, *, num_passes: int = 40_000) -> Solution:
    """Return a short schedule under each stage's room; the same one for the same problem.

    Args:
        problem: Seconds, bytes and links.
        num_passes: Passes that are dispatched in all, which sets the time it takes: 1 to 2
            microseconds each.
    """
    bound = lower_bound_s(problem)
    size = 3 * problem.num_chunks * problem.num_microbatches
    tries = max(4, num_passes // max(size, 1))
    best: tuple[float, tuple[tuple[Pass, ...], ...]] | None = None
    for priorities, patience in _beginnings(problem):
        found = _Dispatch(problem, priorities, patience).run()
        if best is None or found[0] < best[0]:
            best = found
            best_patience = patience
        tries -= 1
        if tries <= 0 or best[0] <= bound * 1.0005:
            break
    assert best is not None
    randomly = random.Random(0)
    spread = best[0] / (2 * max(problem.num_microbatches, 1))
    since = 0
    latest = _latest_starts(problem, best)
    while tries > 0 and best[0] > bound * 1.0005:
        noise = 0.0 if not since else spread * randomly.random()
        priorities = latest if not noise else tuple(
            [[v + noise * randomly.gauss(0, 1) for v in row] for row in rows] for rows in latest
        )
        patience = randomly.choice((0.0, 0.5, 1.0)) if since else best_patience
        hold = randomly.choice((0.0, 0.0, 0.3, 0.8))
        found = _Dispatch(problem, priorities, patience, hold).run()
        tries -= 1
        since += 1
        if found[0] < best[0] * (1 - 1e-9):
            best, best_patience, since = found, patience, 0
            latest = _latest_starts(problem, best)
    return Solution(orders=best[1], end_s=best[0], bound_s=bound)


Priorities = tuple[list[list[float]], list[list[float]]]


def _beginnings(problem: ScheduleProblem) -> Iterator[tuple[Priorities, float]]:
    stage_work = [0.0] * problem.num_stages
    stage_fi = [0.0] * problem.num_stages
    count = max(problem.num_microbatches, 1)
    for c, stage in enumerate(problem.stage_of):
        fi = (sum(problem.forward_s[c]) + sum(problem.input_s[c])) / count
        stage_fi[stage] += fi
        stage_work[stage] += fi + sum(problem.weight_s[c]) / count
    paces = dict.fromkeys((max(stage_work), max(stage_fi), 0.5 * max(stage_fi), 1e3 * max(stage_work), 0.0))
    for pace in paces:
        for patience in (0.0, 1.0):
            yield _critical(problem, pace), patience


def _critical(problem: ScheduleProblem, pace_s: float) -> Priorities:
    """Return minus the seconds from the begin of each F and I to the end, at a pace a micro-batch."""
    count = problem.num_microbatches
    inputs: list[list[float]] = []
    after = [0.0] * count
    for c in range(problem.num_chunks):
        row = [after[m] + problem.input_s[c][m] for m in range(count)]
        inputs.append(row)
        if c + 1 < problem.num_chunks:
            edge = problem.backward_edges[c]
            after = [value + edge.latency_s + edge.transfer_s for value in row]
    forwards: list[list[float]] = [[] for _ in range(problem.num_chunks)]
    after = inputs[-1]
    for c in reversed(range(problem.num_chunks)):
        forwards[c] = [after[m] + problem.forward_s[c][m] for m in range(count)]
        if c:
            edge = problem.forward_edges[c - 1]
            after = [value + edge.latency_s + edge.transfer_s for value in forwards[c]]
    def paced(rows: list[list[float]]) -> list[list[float]]:
        return [[-value - (count - 1 - m) * pace_s for m, value in enumerate(row)] for row in rows]
    return paced(forwards), paced(inputs)


class _Dispatch:
    """One run of the pipeline in simulated time."""

    def __init__(
        self, problem: ScheduleProblem, priorities: Priorities, patience: float, hold: float = 0.0
    ) -> None:
        self.problem, self.priorities, self.patience = problem, priorities, patience
        self.hold = hold
        num_chunks, count = problem.num_chunks, problem.num_microbatches
        self.chunks: list[list[int]] = [[] for _ in range(problem.num_stages)]
        for chunk, stage in enumerate(problem.stage_of):
            self.chunks[stage].append(chunk)
        self.later = [
            tuple(
                (other, max(problem.held_bytes[other], default=0.0))
                for other in self.chunks[problem.stage_of[chunk]]
                if other > chunk
            )
            for chunk in range(num_chunks)
        ]
        """Later chunks of the same stage, for which room must be left, with their bytes."""
        self.next = [[0] * num_chunks for _ in range(3)]
        self.arrives = [[[_NEVER] * count for _ in range(num_chunks)] for _ in range(2)]
        self.arrives[F][0] = [0.0] * count
        self.used = [0.0] * problem.num_stages
        self.waiting = [0.0] * problem.num_stages
        """Of the bytes used, those that wait for W."""
        self.links = [[0.0] * num_chunks for _ in range(2)]
        self.orders: list[list[Pass]] = [[] for _ in range(problem.num_stages)]

    def run(self) -> tuple[float, tuple[tuple[Pass, ...], ...]]:
        problem = self.problem
        free = [0.0] * problem.num_stages
        left = [3 * len(c) * problem.num_microbatches for c in self.chunks]
        wake = [(0.0, stage) for stage in range(problem.num_stages)]
        heapq.heapify(wake)
        end_s = 0.0
        while wake:
            now, stage = heapq.heappop(wake)
            if now < free[stage] or not left[stage]:
                continue
            taken, until = self._choose(stage, now)
            if taken is None:
                if until < _NEVER:
                    heapq.heappush(wake, (until, stage))
                continue
            seconds, woken = self._begin(taken, stage, now)
            left[stage] -= 1
            free[stage] = now + seconds
            end_s = max(end_s, free[stage])
            heapq.heappush(wake, (free[stage], stage))
            if woken is not None:
                heapq.heappush(wake, woken)
        assert not any(left), "The schedule has a cycle."
        return end_s, tuple(tuple(order) for order in self.orders)

    def _choose(self, stage: int, now: float) -> tuple[Pass | None, float]:
        problem, arrives = self.problem, self.arrives
        next_f, next_i, next_w = self.next
        room = problem.room_bytes[stage] * (1 + 1e-9) - self.used[stage]
        taken: Pass | None = None
        least, until, until_priority = _NEVER, _NEVER, _NEVER
        weight, is_full = -1, False
        count = problem.num_microbatches
        for chunk in self.chunks[stage]:
            m = next_i[chunk]
            if m < next_f[chunk]:
                ready = arrives[I][chunk][m]
                if ready <= now:
                    if self.priorities[1][chunk][m] < least:
                        least, taken = self.priorities[1][chunk][m], (I, chunk, m)
                elif ready < until:
                    until, until_priority = ready, self.priorities[1][chunk][m]
            m = next_f[chunk]
            if m < count:
                ready = arrives[F][chunk][m]
                if ready < _NEVER:
                    needed = problem.held_bytes[chunk][m]
                    fits = needed <= room
                    if fits and self.later[chunk]:
                        # What waits for W can be freed at any time.
                        for other, num_bytes in self.later[chunk]:
                            if next_f[other] == next_i[other]:
                                needed += num_bytes
                        fits = needed <= room + self.waiting[stage]
                    if ready <= now:
                        if not fits:
                            is_full = True
                        elif self.priorities[0][chunk][m] < least:
                            least, taken = self.priorities[0][chunk][m], (F, chunk, m)
                    elif fits and ready < until:
                        until, until_priority = ready, self.priorities[0][chunk][m]
            if weight < 0 and next_w[chunk] < next_i[chunk]:
                weight = chunk
        if taken is not None and self.hold and until_priority < least:
            kind, chunk, m = taken
            seconds = (problem.forward_s, problem.input_s)[kind][chunk][m]
            if until - now < self.hold * seconds:
                taken = None
                is_full = False
        if taken is not None or weight < 0:
            return taken, until
        m = next_w[weight]
        if is_full or until - now >= self.patience * problem.weight_s[weight][m]:
            return (W, weight, m), until
        return None, until

    def _begin(
        self, taken: Pass, stage: int, now: float
    ) -> tuple[float, tuple[float, int] | None]:
        problem = self.problem
        kind, chunk, m = taken
        self.orders[stage].append(taken)
        self.next[kind][chunk] = m + 1
        if kind == W:
            self.used[stage] -= problem.waiting_bytes[chunk][m]
            self.waiting[stage] -= problem.waiting_bytes[chunk][m]
            return problem.weight_s[chunk][m], None
        if kind == F:
            self.used[stage] += problem.held_bytes[chunk][m]
            seconds, target = problem.forward_s[chunk][m], chunk + 1
            edges = problem.forward_edges
            if target == problem.num_chunks:
                self.arrives[I][chunk][m] = now + seconds
                return seconds, None
            edge = edges[chunk]
        else:
            self.used[stage] += problem.waiting_bytes[chunk][m] - problem.held_bytes[chunk][m]
            self.waiting[stage] += problem.waiting_bytes[chunk][m]
            seconds, target = problem.input_s[chunk][m], chunk - 1
            if target < 0:
                return seconds, None
            edge = problem.backward_edges[target]
        link = self.links[kind]
        sent = max(link[chunk], now + seconds) + edge.transfer_s
        link[chunk] = sent
        landed = self.arrives[kind][target][m] = sent + edge.latency_s
        return seconds, (landed, problem.stage_of[target])


def _latest_starts(
    problem: ScheduleProblem, found: tuple[float, Sequence[Sequence[Pass]]]
) -> Priorities:
    """Return when each F and I may begin at the latest, in the order found, not to delay its end."""
    end_s, orders = found
    num_chunks, count = problem.num_chunks, problem.num_microbatches
    seconds = problem.forward_s, problem.input_s, problem.weight_s
    starts = [[[end_s] * count for _ in range(num_chunks)] for _ in range(3)]
    # Backwards through all orders: a pass is placed once those that wait for it are.
    position = [len(order) - 1 for order in orders]
    free = [end_s] * problem.num_stages
    placed = [[[False] * count for _ in range(num_chunks)] for _ in range(2)]
    link = [[_NEVER] * num_chunks for _ in range(2)]
    remaining = sum(map(len, orders))
    while remaining:
        for stage, order in enumerate(orders):
            while position[stage] >= 0:
                kind, chunk, m = order[position[stage]]
                latest = free[stage]
                if kind != W:
                    target = chunk + 1 if kind == F else chunk - 1
                    if kind == F and target == num_chunks:
                        pass
                    elif kind == I and target < 0:
                        pass
                    else:
                        if not placed[kind][target][m]:
                            break
                        edge = problem.forward_edges[chunk] if kind == F else problem.backward_edges[target]
                        arrive = starts[kind][target][m] - edge.latency_s
                        done = min(link[kind][chunk], arrive) - edge.transfer_s
                        link[kind][chunk] = done
                        latest = min(latest, done)
                begin = latest - seconds[kind][chunk][m]
                free[stage] = starts[kind][chunk][m] = begin
                if kind != W:
                    placed[kind][chunk][m] = True
                position[stage] -= 1
                remaining -= 1
    return starts[F], starts[I]


def end_of_orders(problem: ScheduleProblem, orders: Sequence[Sequence[Pass]]) -> float:
    """Return when the last pass ends if each stage runs its passes in order, as soon as it can.

    Raises:
        PlanError: The orders wait for each other.
    """
    num_chunks, count = problem.num_chunks, problem.num_microbatches
    seconds = problem.forward_s, problem.input_s, problem.weight_s
    arrives = [[[_NEVER] * count for _ in range(num_chunks)] for _ in range(2)]
    arrives[F][0] = [0.0] * count
    links = [[0.0] * num_chunks for _ in range(2)]
    free, position = [0.0] * problem.num_stages, [0] * problem.num_stages
    waiting = [*range(problem.num_stages)]
    while waiting:
        stage, woken = waiting.pop(), set()
        order = orders[stage]
        while position[stage] < len(order):
            kind, chunk, m = order[position[stage]]
            ready = free[stage] if kind == W else arrives[kind][chunk][m]
            if ready == _NEVER:
                break
            end = free[stage] = max(free[stage], ready) + seconds[kind][chunk][m]
            position[stage] += 1
            if kind == W:
                continue
            if kind == F and chunk + 1 == num_chunks:
                arrives[I][chunk][m] = end
                continue
            target = chunk + 1 if kind == F else chunk - 1
            if target < 0:
                continue
            edge = problem.forward_edges[chunk] if kind == F else problem.backward_edges[target]
            links[kind][chunk] = max(links[kind][chunk], end) + edge.transfer_s
            arrives[kind][target][m] = links[kind][chunk] + edge.latency_s
            woken.add(problem.stage_of[target])
        waiting += woken.difference(waiting)
    if any(done < len(order) for done, order in zip(position, orders, strict=True)):
        raise PlanError("The schedule's passes wait for each other.")
    return max(free)
