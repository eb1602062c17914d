"""A lower bound on the seconds of any schedule of a pipeline.

Each pass gets a *head*, seconds before which it can't begin, and each I a *tail*, seconds that must
follow its end; no schedule is shorter than head + seconds + tail of any I, nor than a stage's first
head and all its work. What goes into them:

* micro-batches pass in order, and a pass needs what the neighbouring stage has sent;
* F of micro-batch m needs room, so the I that frees it, and the W if that is needed, come first;
* before its first I a stage can only run the forwards that it has room for, so it idles for the
  rest of the first round trip; later passes come after that and after all work in between;
* after an I come the later ones, the W of them and of its own, and the F that need its room.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from lightning_hetero.schedules.problem import Edge, ScheduleProblem

__all__ = ["lower_bound_s"]

_Rows = list[list[float]]


def lower_bound_s(problem: ScheduleProblem) -> float:
    """Return seconds before which no schedule ends; 0 without micro-batches."""
    if not problem.num_microbatches:
        return 0.0
    heads, tails = _Heads(problem), _tails(problem)
    bound = max(
        head + seconds + tail
        for rows in zip(heads.input_s, problem.input_s, tails, strict=True)
        for head, seconds, tail in zip(*rows, strict=True)
    )
    work_s = (
        sum(map(sum, rows))
        for rows in zip(problem.forward_s, problem.input_s, problem.weight_s, strict=True)
    )
    firsts = (row[0] for row in heads.forward_s)
    return max(bound, *map(sum, zip(firsts, work_s, strict=True)))


class _Heads:
    """When each F and I can begin at the earliest."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem
        count, num_stages = problem.num_microbatches, problem.num_stages
        self.forward_s: _Rows = [[0.0] * count for _ in range(num_stages)]
        self.input_s: _Rows = [[0.0] * count for _ in range(num_stages)]
        self._forward_sums = _prefixes(problem.forward_s)
        self._input_sums = _prefixes(problem.input_s)
        self._weight_sums = _prefixes(problem.weight_s)
        self._held_sums = _prefixes(problem.held_bytes)
        self._waiting_sums = _prefixes(problem.waiting_bytes)
        self._room = [room * (1 + 1e-9) for room in problem.room_bytes]
        self._sent = [[0.0] * num_stages for _ in range(2)]
        self._early_s = [0.0] * num_stages
        """Most seconds of forwards that each stage can do before its first I."""
        for microbatch in range(count):
            arrived = 0.0
            for stage in range(num_stages):
                arrived = self._forward(stage, microbatch, arrived)
            for stage in reversed(range(num_stages)):
                arrived = self._input(stage, microbatch, arrived)

    def _forward(self, stage: int, m: int, arrived: float) -> float:
        problem, row = self.problem, self.forward_s[stage]
        head = max(arrived, self._has_room(stage, m))
        if m:
            head = max(head, row[m - 1] + problem.forward_s[stage][m - 1])
        row[m] = head
        end = head + problem.forward_s[stage][m]
        if stage + 1 == problem.num_stages:
            return end
        return self._send(0, stage, problem.forward_edges[stage], end)

    def _input(self, stage: int, m: int, arrived: float) -> float:
        problem, row = self.problem, self.input_s[stage]
        head = max(arrived, self.forward_s[stage][m] + problem.forward_s[stage][m])
        if m:
            head = max(head, row[m - 1] + problem.input_s[stage][m - 1])
            head = max(head, self._in_turn(stage, m + 1, m, self._weights_before(stage, m, m)))
        else:
            fitting = bisect_left(self._held_sums[stage], self._room[stage]) - 1
            early_s = self._forward_sums[stage][fitting]
            self._early_s[stage] = min(head - self.forward_s[stage][0], early_s)
        row[m] = head
        end = head + problem.input_s[stage][m]
        return self._send(1, stage, problem.backward_edges[stage - 1], end) if stage else end

    def _send(self, direction: int, stage: int, edge: Edge, end: float) -> float:
        sent = max(self._sent[direction][stage], end) + edge.transfer_s
        self._sent[direction][stage] = sent
        return sent + edge.latency_s

    def _has_room(self, stage: int, m: int) -> float:
        """Return when there can be room for F of micro-batch m: the best number of I before it."""
        problem, head = self.problem, math.inf
        held = self._held_sums[stage]
        # With all W done, this many I free enough; with more I fewer W are needed.
        least = bisect_left(held, held[m + 1] - self._room[stage], hi=m)
        for num_inputs in range(least, m + 1):
            num_weights = self._weights_before(stage, m, num_inputs)
            if num_weights > num_inputs:
                continue
            if not num_inputs:
                return 0.0
            last = num_inputs - 1
            end = self.input_s[stage][last] + problem.input_s[stage][last]
            if num_weights == num_inputs:
                end += problem.weight_s[stage][last]
            head = min(head, max(end, self._in_turn(stage, m, num_inputs, num_weights)))
            if not num_weights:
                break
        return head

    def _weights_before(self, stage: int, m: int, num_inputs: int) -> int:
        """Return how many W must end before F of micro-batch m, if so many I have."""
        held, waiting = self._held_sums[stage], self._waiting_sums[stage]
        over = held[m + 1] - held[num_inputs] + waiting[num_inputs] - self._room[stage]
        return bisect_left(waiting, over, hi=num_inputs + 1) if over > 0 else 0

    def _in_turn(self, stage: int, num_forwards: int, num_inputs: int, num_weights: int) -> float:
        """Return when a stage has done so many passes, no I before the first round trip is over."""
        return (
            self.input_s[stage][0]
            + max(0.0, self._forward_sums[stage][num_forwards] - self._early_s[stage])
            + self._input_sums[stage][num_inputs]
            + self._weight_sums[stage][num_weights]
        )


def _tails(problem: ScheduleProblem) -> _Rows:
    """Return the least seconds after the end of each I."""
    count = problem.num_microbatches
    tails: _Rows = []
    after = [0.0] * count
    for stage in range(problem.num_stages):
        row, own, later = [0.0] * count, 0.0, 0.0
        most_held = _most_held(problem, stage)
        for m in reversed(range(count)):
            own += problem.weight_s[stage][m]
            if m + most_held < count:
                own += problem.forward_s[stage][m + most_held]
            row[m] = max(after[m], later, own)
            later = row[m] + problem.input_s[stage][m]
            own += problem.input_s[stage][m]
        tails.append(row)
        if stage + 1 < problem.num_stages:
            edge, link = problem.backward_edges[stage], 0.0
            after = [0.0] * count
            for m in reversed(range(count)):
                needed = row[m] + problem.input_s[stage][m] + edge.latency_s
                link = after[m] = max(link, needed) + edge.transfer_s
    return tails


def _most_held(problem: ScheduleProblem, stage: int) -> int:
    """Return the most micro-batches that a stage can hold between F and I."""
    room = problem.room_bytes[stage] * (1 + 1e-9)
    return sum(held <= room for held in accumulate(sorted(problem.held_bytes[stage])))


def _prefixes(rows: Sequence[Sequence[float]]) -> _Rows:
    """Return the sums of the first 0, 1, ... values of each row."""
    return [[0.0, *accumulate(row)] for row in rows]
