"""A lower bound on the seconds of any schedule of a pipeline.

Each pass gets a *head*, seconds before which it can't begin, and a *tail*, seconds that must follow
its end; no schedule is shorter than head + seconds + tail of any pass. On a stage with one chunk:

* micro-batches pass in order, and a pass needs what the neighbouring chunk has sent;
* F of micro-batch m needs room, so the I that frees it, and the W if that is needed too, come first;
* before I of micro-batch 0 the stage can only run the forwards that it has room for, so it idles for
  the rest of the first round trip; later passes of I follow that idle time and all work in between;
* after an I come the later ones and the W passes of them and of its own.

For stages with several chunks only order, links and total work count.
"""

import math
from itertools import accumulate

from lightning_hetero.schedules.problem import Edge, ScheduleProblem

__all__ = ["lower_bound_s"]

_Rows = list[list[float]]
_NEVER = math.inf


def lower_bound_s(problem: ScheduleProblem) -> float:
    """Return seconds before which no schedule ends; 0 without micro-batches."""
    if not problem.num_microbatches:
        return 0.0
    heads = _Heads(problem)
    tails = _tails(problem)
    bound = max(
        head + seconds + tail
        for rows in zip(heads.input_s, problem.input_s, tails, strict=True)
        for head, seconds, tail in zip(*rows, strict=True)
    )
    for stage in range(problem.num_stages):
        chunks = problem.chunks_of(stage)
        head = min(heads.forward_s[chunk][0] for chunk in chunks)
        bound = max(bound, head + sum(map(problem.work_s, chunks)))
    return bound


class _Heads:
    """When each F and I can begin at the earliest."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem
        count, num_chunks = problem.num_microbatches, problem.num_chunks
        self.forward_s: _Rows = [[0.0] * count for _ in range(num_chunks)]
        self.input_s: _Rows = [[0.0] * count for _ in range(num_chunks)]
        self._sent = [[0.0] * num_chunks for _ in range(2)]
        self._early_s = [0.0] * num_chunks
        """Most seconds of forwards that each chunk can do before its first I."""
        for microbatch in range(count):
            arrived = 0.0
            for chunk in range(num_chunks):
                arrived = self._forward(chunk, microbatch, arrived)
            arrived = 0.0
            for chunk in reversed(range(num_chunks)):
                arrived = self._input(chunk, microbatch, arrived)

    def _forward(self, chunk: int, m: int, arrived: float) -> float:
        problem, row = self.problem, self.forward_s[chunk]
        head = arrived
        if m:
            head = max(head, row[m - 1] + problem.forward_s[chunk][m - 1])
        if len(problem.chunks_of(problem.stage_of[chunk])) == 1:
            head = max(head, self._has_room(chunk, m))
        row[m] = head
        end = head + problem.forward_s[chunk][m]
        if chunk + 1 == problem.num_chunks:
            return end
        return self._send(0, chunk, problem.forward_edges[chunk], end)

    def _input(self, chunk: int, m: int, arrived: float) -> float:
        problem, row = self.problem, self.input_s[chunk]
        head = max(arrived, self.forward_s[chunk][m] + problem.forward_s[chunk][m])
        if m:
            head = max(head, row[m - 1] + problem.input_s[chunk][m - 1])
            if len(problem.chunks_of(problem.stage_of[chunk])) == 1:
                num_weights = self._weights_before(chunk, m, m)
                head = max(head, self._in_turn(chunk, m, m, num_weights))
        else:
            self._early_s[chunk] = self._early(chunk, head)
        row[m] = head
        end = head + problem.input_s[chunk][m]
        return self._send(1, chunk, problem.backward_edges[chunk - 1], end) if chunk else end

    def _send(self, direction: int, chunk: int, edge: Edge, end: float) -> float:
        sent = max(self._sent[direction][chunk], end) + edge.transfer_s
        self._sent[direction][chunk] = sent
        return sent + edge.latency_s

    def _has_room(self, chunk: int, m: int) -> float:
        """Return when there can be room for F of micro-batch m: the best number of I before it."""
        problem, head = self.problem, _NEVER
        inputs, weights = problem.input_s[chunk], problem.weight_s[chunk]
        for num_inputs in range(m + 1):
            num_weights = self._weights_before(chunk, m, num_inputs)
            if num_weights > num_inputs:
                continue
            if not num_inputs:
                return 0.0
            last = num_inputs - 1
            end = self.input_s[chunk][last] + inputs[last]
            if num_weights == num_inputs:
                end += weights[last]
            head = min(head, max(end, self._in_turn(chunk, m - 1, num_inputs, num_weights)))
        return head

    def _weights_before(self, chunk: int, m: int, num_inputs: int) -> int:
        """Return how many W must end before F of micro-batch m, if so many I have."""
        problem = self.problem
        room = problem.room_bytes[problem.stage_of[chunk]] * (1 + 1e-9)
        held, waiting = problem.held_bytes[chunk], problem.waiting_bytes[chunk]
        over = sum(held[num_inputs : m + 1]) + sum(waiting[:num_inputs]) - room
        number = 0
        while over > 0 and number < num_inputs:
            over -= waiting[number]
            number += 1
        return number if over <= 0 else num_inputs + 1

    def _in_turn(self, chunk: int, last_forward: int, num_inputs: int, num_weights: int) -> float:
        """Return when a stage has done so many passes, no I before the first round trip is over."""
        problem = self.problem
        forward_s = sum(problem.forward_s[chunk][: last_forward + 1])
        return (
            self.input_s[chunk][0]
            + max(0.0, forward_s - self._early_s[chunk])
            + sum(problem.input_s[chunk][:num_inputs])
            + sum(problem.weight_s[chunk][:num_weights])
        )

    def _early(self, chunk: int, first_input: float) -> float:
        """Return most seconds of forwards that a stage can do before its first I."""
        problem = self.problem
        room = problem.room_bytes[problem.stage_of[chunk]] * (1 + 1e-9)
        head = self.forward_s[chunk][0]
        bytes_so_far = accumulate(problem.held_bytes[chunk])
        fitting = sum(held <= room for held in bytes_so_far)
        return min(first_input - head, sum(problem.forward_s[chunk][:fitting]))


def _tails(problem: ScheduleProblem) -> _Rows:
    """Return the least seconds after the end of each I."""
    count = problem.num_microbatches
    tails: _Rows = []
    after = [0.0] * count
    for chunk in range(problem.num_chunks):
        row, own, later = [0.0] * count, 0.0, 0.0
        depth = _depth(problem, chunk)
        for m in reversed(range(count)):
            own += problem.weight_s[chunk][m]
            if m + depth < count:
                own += problem.forward_s[chunk][m + depth]
            row[m] = max(after[m], later, own)
            later = row[m] + problem.input_s[chunk][m]
            own += problem.input_s[chunk][m]
        tails.append(row)
        if chunk + 1 < problem.num_chunks:
            edge, link = problem.backward_edges[chunk], 0.0
            after = [0.0] * count
            for m in reversed(range(count)):
                needed = row[m] + problem.input_s[chunk][m] + edge.latency_s
                link = after[m] = max(link, needed) + edge.transfer_s
    return tails


def _depth(problem: ScheduleProblem, chunk: int) -> int:
    """Return the most micro-batches that a chunk can hold between F and I."""
    room = problem.room_bytes[problem.stage_of[chunk]] * (1 + 1e-9)
    smallest = accumulate(sorted(problem.held_bytes[chunk]))
    return sum(held <= room for held in smallest)
