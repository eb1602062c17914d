"""Describe the problem of scheduling a pipeline, and run a pipeline in simulated time.

A stage runs three passes of each micro-batch: forward (F), the gradient of its input (I) and the
gradients of its weights (W). The previous stage waits for I; no stage waits for W. A *worker* (a
group of ranks) runs one stage, or several, its chunks. It runs one pass (kind, stage, micro-batch)
at a time, and each stage's micro-batches in the order of their numbers. The order of passes is
either chosen by priorities (`Dispatch`), or given (`end_s`).
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.places import stages_by_worker, usual_held

Matrix = tuple[tuple[float, ...], ...]
"""Indexed by stage, then by micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The seconds of the link between two neighbouring stages, in one direction.

    A message occupies the link for `transfer_s` and arrives `latency_s` after that: a long latency
    delays messages but doesn't limit how many are under way.
    """

    latency_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """Seconds after which a message arrives, if the link is free."""
        return self.latency_s + self.transfer_s


@dataclass(frozen=True, kw_only=True)
class ScheduleProblem:
    """One pipeline, one iteration.

    ::

        problem = ScheduleProblem.equal(
            forward_s=(1.0, 1.0), input_s=(1.0, 1.0), weight_s=(1.0, 1.0), num_microbatches=4
        )
        print(solve(problem).end_s)

    Raises:
        PlanError: A stage has no room for one micro-batch.
    """

    forward_s: Matrix
    """Seconds of F."""
    input_s: Matrix
    """Seconds of I; of the whole backward where `weight_s` is zero."""
    weight_s: Matrix
    """Seconds of W; zeros where backward passes aren't split."""
    forward_edges: tuple[Edge, ...]
    """From each stage to the next: one less than stages."""
    backward_edges: tuple[Edge, ...]
    """From each stage's successor back to it: one less than stages."""
    held_bytes: Matrix
    """Bytes that a micro-batch keeps on a stage from F to I."""
    waiting_bytes: Matrix
    """Bytes that it keeps from I to W."""
    room_bytes: tuple[float, ...]
    """Bytes that each worker has for both: a micro-batch's from F to I, and from I to W."""
    workers: tuple[int, ...] = ()
    """The worker of each stage; by default each stage has its own."""

    def __post_init__(self) -> None:
        if not self.workers:
            object.__setattr__(self, "workers", tuple(range(len(self.forward_s))))
        for worker, (room, needed) in enumerate(zip(self.room_bytes, self.most_bytes, strict=True)):
            if needed > room * (1 + 1e-9):
                raise PlanError(
                    f"Stage {self.workers.index(worker)} has room for {room:,.0f} bytes of "
                    f"activations, and one micro-batch needs {needed:,.0f}. Use smaller "
                    "micro-batches, recompute more layers, or give the stage fewer."
                )

    @classmethod
    def equal(  # noqa: PLR0913 - what a pipeline consists of
        cls,
        *,
        forward_s: Sequence[float],
        input_s: Sequence[float],
        weight_s: Sequence[float],
        num_microbatches: int,
        most_held: Sequence[float] = (),
        edges: Sequence[Edge] = (),
        waiting: float = 1.0,
        sizes: Sequence[float] = (),
        workers: Sequence[int] = (),
    ) -> "ScheduleProblem":
        """Return the problem of micro-batches that each keep one unit of activations on a worker.

        Args:
            forward_s: Seconds of F, by stage.
            input_s: Seconds of I.
            weight_s: Seconds of W.
            num_microbatches: Micro-batches of the iteration.
            most_held: The number of micro-batches that each worker has room for; by default as many
                as 1F1B holds there, or with chunks as many as there are workers.
            edges: The links between neighbouring stages, both ways; without delay by default.
            waiting: Share of an activation that W needs after I: about all of a transformer
                layer's, whose linear layers keep their inputs and the gradients of their outputs.
            sizes: For each micro-batch, if they differ, a factor by which its seconds and units are
                multiplied. There is room for any `most_held` consecutive micro-batches.
            workers: The worker of each stage. A worker's stages divide its unit in proportion to
                their seconds of F.
        """
        num_stages = len(forward_s)
        each = tuple(sizes) or (1.0,) * num_microbatches
        runs = tuple(workers) or tuple(range(num_stages))
        held = tuple(most_held) or tuple(map(float, usual_held(runs)))
        whole_s = [sum(forward_s[stage] for stage in own) for own in stages_by_worker(runs)]
        shares = [
            own_s / whole_s[worker] if whole_s[worker] else 1 / runs.count(worker)
            for own_s, worker in zip(forward_s, runs, strict=True)
        ]

        def rows(values: Sequence[float]) -> Matrix:
            return tuple(tuple(value * size for size in each) for value in values)

        def room(most: float) -> float:
            if not sizes:
                return most
            count = min(int(most), len(each))
            return max(sum(each[i : i + count]) for i in range(len(each) - count + 1))

        links = tuple(edges) or (Edge(),) * (num_stages - 1)
        return cls(
            forward_s=rows(forward_s),
            input_s=rows(input_s),
            weight_s=rows(weight_s),
            forward_edges=links,
            backward_edges=links,
            held_bytes=rows(shares),
            waiting_bytes=rows(
                [waiting * s if own else 0.0 for s, own in zip(shares, weight_s, strict=True)]
            ),
            room_bytes=tuple(map(room, held)),
            workers=runs,
        )

    @property
    def num_stages(self) -> int:
        """Stages through which each micro-batch goes."""
        return len(self.forward_s)

    @property
    def num_workers(self) -> int:
        """Workers, each of which runs one pass at a time."""
        return len(self.room_bytes)

    @property
    def most_bytes(self) -> list[float]:
        """The largest number of bytes that a micro-batch keeps on each worker."""
        rows = [[self.held_bytes[s] for s in own] for own in stages_by_worker(self.workers)]
        return [max(map(sum, zip(*own, strict=True)), default=0.0) for own in rows]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the iteration."""
        return len(self.forward_s[0])


FORWARD, INPUT, WEIGHT = range(3)
Pass = tuple[int, int, int]
"""Kind, stage and micro-batch."""
Orders = tuple[tuple[Pass, ...], ...]
"""The passes of each worker, in the order in which it runs them."""
Priorities = tuple[list[list[float]], list[list[float]]]
"""The priority of each F, and of each I, by stage and micro-batch; the lowest goes first."""


@dataclass(frozen=True)
class Rule:
    """How a free stage chooses its next pass."""

    priorities: Priorities
    patience: float
    """How long a stage waits for an F or I that is on its way before it starts a W instead, as a
    share of the W's seconds."""


class Dispatch:
    """One run of the pipeline, in which free workers choose by a rule.

    Of the F and I whose inputs have arrived and whose bytes fit, a worker takes the one with the
    least priority value. Where there is none, it runs a W.
    """

    def __init__(self, problem: ScheduleProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        self._seconds = problem.forward_s, problem.input_s, problem.weight_s
        self._next = [[0] * problem.num_stages for _ in range(3)]
        self._arrivals = _Arrivals(problem)
        self._used = [0.0] * problem.num_workers
        self._held = [0.0] * problem.num_workers
        """The part of the kept bytes that aren't waiting for a W."""
        self._most = problem.most_bytes
        self._orders: list[list[Pass]] = [[] for _ in range(problem.num_workers)]
        self._chunks = stages_by_worker(problem.workers)

    def run(self) -> tuple[float, Orders]:
        """Return when the last pass ends, and all workers' orders."""
        num_workers = self.problem.num_workers
        free_s = [0.0] * num_workers
        wake = [(0.0, worker) for worker in range(num_workers)]
        while wake:
            now, worker = heapq.heappop(wake)
            if now < free_s[worker]:
                continue
            chosen, until = self._choose(worker, now)
            if chosen is None:
                if until < math.inf:
                    heapq.heappush(wake, (until, worker))
                continue
            free_s[worker] = self._begin(*chosen, now)
            heapq.heappush(wake, (free_s[worker], worker))
            landed = self._arrivals.last
            if landed is not None:
                heapq.heappush(wake, (landed[0], self.problem.workers[landed[1]]))
        return max(free_s), tuple(map(tuple, self._orders))

    def _choose(self, worker: int, now: float) -> tuple[tuple[int, int] | None, float]:
        """Return kind and stage of the worker's next pass, or None; and until when to wait."""
        ready: list[tuple[float, int, int]] = []
        until = math.inf
        is_full = False
        for kind, stage, arrives, priority in self._candidates(worker):
            if kind == FORWARD and not self._fits(worker, stage):
                is_full |= arrives <= now
            elif arrives <= now:
                ready.append((priority, kind, stage))
            else:
                until = min(until, arrives)
        if ready:
            return min(ready)[1:], until
        _, inputs, weights = self._next
        waiting = [(weights[s], s) for s in self._chunks[worker] if weights[s] < inputs[s]]
        if waiting:
            microbatch, stage = min(waiting)
            patience_s = self.rule.patience * self._seconds[WEIGHT][stage][microbatch]
            if is_full or until - now >= patience_s:
                return (WEIGHT, stage), until
        return None, until

    def _candidates(self, worker: int) -> Iterator[tuple[int, int, float, float]]:
        """Yield kind, stage, arrival and priority of the next I and F of the worker's stages."""
        forwards, inputs, _ = self._next
        for stage in self._chunks[worker]:
            forward, input_ = forwards[stage], inputs[stage]
            for kind, microbatch, stop in (
                (INPUT, input_, forward),
                (FORWARD, forward, self.problem.num_microbatches),
            ):
                if microbatch < stop:
                    arrives = self._arrivals.arrives_s[kind][stage][microbatch]
                    if arrives < math.inf:
                        yield kind, stage, arrives, self.rule.priorities[kind][stage][microbatch]

    def _fits(self, worker: int, stage: int) -> bool:
        """Whether there is room for a stage's next F."""
        held, room = self.problem.held_bytes, self.problem.room_bytes[worker] * (1 + 1e-9)
        own = held[stage][self._next[FORWARD][stage]]
        if self._used[worker] + own > room:
            return False
        return len(self._chunks[worker]) == 1 or self._is_safe(worker, stage, room - own)

    def _is_safe(self, worker: int, stage: int, left: float) -> bool:
        """Whether the state after a stage's next F is safe: every micro-batch can still finish.

        If it isn't, a worker's memory could fill with micro-batches whose next chunks then have no
        room, and nothing could run. The test is the banker's algorithm (Dijkstra 1965):
        micro-batches finish one after another, the oldest first, each in the memory that those
        before it have freed. Bytes that wait for W count as free, as W can always run.
        """
        held, chunks = self.problem.held_bytes, self._chunks[worker]
        inputs = self._next[INPUT]
        forwards = {s: self._next[FORWARD][s] + (s == stage) for s in chunks}
        left -= self._held[worker]
        for m in range(min([inputs[s] for s in chunks]), max(forwards.values())):
            if left >= self._most[worker]:
                break
            if sum([held[s][m] for s in chunks if forwards[s] <= m]) > left:
                return False
            left += sum([held[s][m] for s in chunks if inputs[s] <= m < forwards[s]])
        return True

    def _begin(self, kind: int, stage: int, now: float) -> float:
        """Run a stage's next pass of a kind; return its end."""
        microbatch, worker = self._next[kind][stage], self.problem.workers[stage]
        end = now + self._seconds[kind][stage][microbatch]
        self._next[kind][stage] += 1
        self._orders[worker].append((kind, stage, microbatch))
        held = self.problem.held_bytes[stage][microbatch]
        waiting = self.problem.waiting_bytes[stage][microbatch]
        self._used[worker] += (held, waiting - held, -waiting)[kind]
        self._held[worker] += (held, -held, 0.0)[kind]
        self._arrivals.send(kind, stage, microbatch, end)
        return end


def end_s(problem: ScheduleProblem, orders: Sequence[Sequence[Pass]]) -> float:
    """Return when the last pass ends if workers run their passes in order, as soon as they can.

    Raises:
        PlanError: The orders wait for each other.
    """
    seconds = problem.forward_s, problem.input_s, problem.weight_s
    arrivals = _Arrivals(problem)
    free_s, position = [0.0] * problem.num_workers, [0] * problem.num_workers
    waiting = [*range(problem.num_workers)]
    while waiting:
        worker = waiting.pop()
        for kind, stage, m in orders[worker][position[worker] :]:
            ready = 0.0 if kind == WEIGHT else arrivals.arrives_s[kind][stage][m]
            if ready == math.inf:
                break
            free_s[worker] = max(free_s[worker], ready) + seconds[kind][stage][m]
            position[worker] += 1
            arrivals.send(kind, stage, m, free_s[worker])
            if arrivals.last is not None:
                target = problem.workers[arrivals.last[1]]
                if target != worker and target not in waiting:
                    waiting.append(target)
    if position != [*map(len, orders)]:
        raise PlanError("The schedule's passes wait for each other.")
    return max(free_s)


def has_room(problem: ScheduleProblem, orders: Orders) -> bool:
    """Return whether no worker ever keeps more bytes than it has room for."""
    for worker, order in enumerate(orders):
        used = 0.0
        for kind, stage, m in order:
            held, waiting = problem.held_bytes[stage][m], problem.waiting_bytes[stage][m]
            used += (held, waiting - held, -waiting)[kind]
            if used > problem.room_bytes[worker] * (1 + 1e-9):
                return False
    return True


class _Arrivals:
    """When the input of each F and I arrives; infinity if it hasn't been sent yet."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self._problem = problem
        num_stages, count = problem.num_stages, problem.num_microbatches
        self.arrives_s = [[[math.inf] * count for _ in range(num_stages)] for _ in range(2)]
        self.arrives_s[FORWARD][0] = [0.0] * count
        self._link_s = [[0.0] * num_stages for _ in range(2)]
        """When each stage's link, in either direction, is free again."""
        self.last: tuple[float, int] | None = None
        """When the last message arrives, and where; None if the last pass sent none."""

    def send(self, kind: int, stage: int, microbatch: int, end: float) -> None:
        """Send what a pass has made to the pass that waits for it."""
        self.last = None
        if kind == FORWARD and stage + 1 == self._problem.num_stages:
            self.arrives_s[INPUT][stage][microbatch] = end
            return
        target = stage + 1 if kind == FORWARD else stage - 1
        if kind != WEIGHT and target >= 0:
            edges = self._problem.forward_edges, self._problem.backward_edges
            edge, link_s = edges[kind][min(stage, target)], self._link_s[kind]
            link_s[stage] = max(link_s[stage], end) + edge.transfer_s
            landed = link_s[stage] + edge.latency_s
            self.arrives_s[kind][target][microbatch] = landed
            self.last = landed, target
