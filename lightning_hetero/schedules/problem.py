"""What a schedule is solved for, and running a pipeline in simulated time.

A stage runs each micro-batch three times: forward (F), the gradient of its input (I) and the
gradients of its weights (W). The stage before waits for I; nobody waits for W. Each stage runs its
passes (kind, stage, micro-batch) one at a time, and micro-batches in the order of their numbers: by
priorities, or in given orders.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.core.errors import PlanError

__all__ = [
    "FORWARD",
    "INPUT",
    "WEIGHT",
    "Dispatch",
    "Edge",
    "Matrix",
    "Orders",
    "Pass",
    "Priorities",
    "Rule",
    "ScheduleProblem",
    "end_s",
    "has_room",
]

Matrix = tuple[tuple[float, ...], ...]
"""Indexed by stage, then by micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The link between two neighbouring stages, in one direction.

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
    """What a micro-batch keeps on a stage from F to I."""
    waiting_bytes: Matrix
    """What it keeps from I to W."""
    room_bytes: tuple[float, ...]
    """Room for both, by stage."""

    def __post_init__(self) -> None:
        for stage, (room, held) in enumerate(zip(self.room_bytes, self.held_bytes, strict=True)):
            needed = max(held, default=0.0)
            if needed > room * (1 + 1e-9):
                raise PlanError(
                    f"Stage {stage} has room for {room:,.0f} bytes of activations, and one "
                    f"micro-batch needs {needed:,.0f}. Use smaller micro-batches, recompute more "
                    "layers, or give the stage fewer."
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
    ) -> "ScheduleProblem":
        """Return the problem of micro-batches whose activations take one unit a stage.

        Args:
            forward_s: Seconds of F, by stage.
            input_s: Seconds of I.
            weight_s: Seconds of W.
            num_microbatches: Micro-batches of the iteration.
            most_held: Micro-batches that each stage has room for; by default as many as 1F1B
                holds there.
            edges: The links between neighbouring stages, both ways; without delay by default.
            waiting: Share of an activation that W needs after I: about all of a transformer
                layer's, whose linear layers keep their inputs and the gradients of their outputs.
            sizes: Of each micro-batch, where they differ: seconds and units are these times as
                many, and there is room for any `most_held` that follow each other.
        """
        num_stages = len(forward_s)
        each = tuple(sizes) or (1.0,) * num_microbatches
        held = tuple(most_held) or tuple(map(float, range(num_stages, 0, -1)))

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
            held_bytes=rows([1.0] * num_stages),
            waiting_bytes=rows([waiting if seconds else 0.0 for seconds in weight_s]),
            room_bytes=tuple(map(room, held)),
        )

    @property
    def num_stages(self) -> int:
        """Stages, each of which runs one pass at a time."""
        return len(self.room_bytes)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the iteration."""
        return len(self.forward_s[0])


FORWARD, INPUT, WEIGHT = range(3)
Pass = tuple[int, int, int]
"""Kind, stage and micro-batch."""
Orders = tuple[tuple[Pass, ...], ...]
"""The passes of each stage, in the order in which it runs them."""
Priorities = tuple[list[list[float]], list[list[float]]]
"""Of each F and I, by stage and micro-batch; the least goes first."""


@dataclass(frozen=True)
class Rule:
    """How a free stage chooses its next pass."""

    priorities: Priorities
    patience: float
    """Share of a W's seconds that a stage rather waits for an F or I that is on its way."""


class Dispatch:
    """One run of the pipeline, in which free stages choose by a rule.

    Of the F and I whose inputs have arrived and whose bytes fit, a stage takes the one with the
    least priority value. Where there is none, it runs a W.
    """

    def __init__(self, problem: ScheduleProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        num_stages = problem.num_stages
        self._next = [[0] * num_stages for _ in range(3)]
        self._arrivals = _Arrivals(problem)
        self._used = [0.0] * num_stages
        self._orders: list[list[Pass]] = [[] for _ in range(num_stages)]

    def run(self) -> tuple[float, Orders]:
        """Return when the last pass ends, and all stages' orders."""
        num_stages = self.problem.num_stages
        free_s = [0.0] * num_stages
        wake = [(0.0, stage) for stage in range(num_stages)]
        while wake:
            now, stage = heapq.heappop(wake)
            if now < free_s[stage]:
                continue
            kind, until = self._choose(stage, now)
            if kind is None:
                if until < math.inf:
                    heapq.heappush(wake, (until, stage))
                continue
            free_s[stage] = self._begin(kind, stage, now)
            heapq.heappush(wake, (free_s[stage], stage))
            landed = self._arrivals.last
            if landed is not None:
                heapq.heappush(wake, landed)
        return max(free_s), tuple(map(tuple, self._orders))

    def _choose(self, stage: int, now: float) -> tuple[int | None, float]:
        """Return the kind of the stage's next pass; None, and until when it waits for one."""
        ready: list[tuple[float, int]] = []
        until = math.inf
        is_full = False
        for kind, arrives, priority in self._candidates(stage):
            if kind == FORWARD and not self._fits(stage):
                is_full = arrives <= now
            elif arrives <= now:
                ready.append((priority, kind))
            else:
                until = min(until, arrives)
        if ready:
            return min(ready)[1], until
        if self._next[WEIGHT][stage] < self._next[INPUT][stage]:
            patience_s = self.rule.patience * self._seconds(WEIGHT, stage)
            if is_full or until - now >= patience_s:
                return WEIGHT, until
        return None, until

    def _candidates(self, stage: int) -> Iterator[tuple[int, float, float]]:
        """Yield kind, arrival and priority of the stage's next I and F, if they are known."""
        forward, input_ = self._next[FORWARD][stage], self._next[INPUT][stage]
        for kind, microbatch, stop in (
            (INPUT, input_, forward),
            (FORWARD, forward, self.problem.num_microbatches),
        ):
            if microbatch < stop:
                arrives = self._arrivals.arrives_s[kind][stage][microbatch]
                if arrives < math.inf:
                    yield kind, arrives, self.rule.priorities[kind][stage][microbatch]

    def _fits(self, stage: int) -> bool:
        microbatch = self._next[FORWARD][stage]
        used = self._used[stage] + self.problem.held_bytes[stage][microbatch]
        return used <= self.problem.room_bytes[stage] * (1 + 1e-9)

    def _seconds(self, kind: int, stage: int) -> float:
        problem = self.problem
        rows = (problem.forward_s, problem.input_s, problem.weight_s)[kind]
        return rows[stage][self._next[kind][stage]]

    def _begin(self, kind: int, stage: int, now: float) -> float:
        """Run a stage's next pass of a kind; return its end."""
        end = now + self._seconds(kind, stage)
        microbatch = self._next[kind][stage]
        self._next[kind][stage] += 1
        self._orders[stage].append((kind, stage, microbatch))
        held = self.problem.held_bytes[stage][microbatch]
        waiting = self.problem.waiting_bytes[stage][microbatch]
        self._used[stage] += (held, waiting - held, -waiting)[kind]
        self._arrivals.send(kind, stage, microbatch, end)
        return end


def end_s(problem: ScheduleProblem, orders: Sequence[Sequence[Pass]]) -> float:
    """Return when the last pass ends if stages run their passes in order, as soon as they can.

    Raises:
        PlanError: The orders wait for each other.
    """
    seconds = problem.forward_s, problem.input_s, problem.weight_s
    arrivals = _Arrivals(problem)
    free_s, position = [0.0] * problem.num_stages, [0] * problem.num_stages
    waiting = [*range(problem.num_stages)]
    while waiting:
        stage = waiting.pop()
        for kind, _, m in orders[stage][position[stage] :]:
            ready = 0.0 if kind == WEIGHT else arrivals.arrives_s[kind][stage][m]
            if ready == math.inf:
                break
            free_s[stage] = max(free_s[stage], ready) + seconds[kind][stage][m]
            position[stage] += 1
            arrivals.send(kind, stage, m, free_s[stage])
            if arrivals.last is not None and arrivals.last[1] not in waiting:
                waiting.append(arrivals.last[1])
    if position != [*map(len, orders)]:
        raise PlanError("The schedule's passes wait for each other.")
    return max(free_s)


def has_room(problem: ScheduleProblem, orders: Orders) -> bool:
    """Return whether no stage ever keeps more bytes than it has room for."""
    for stage, order in enumerate(orders):
        used = 0.0
        for kind, _, m in order:
            held, waiting = problem.held_bytes[stage][m], problem.waiting_bytes[stage][m]
            used += (held, waiting - held, -waiting)[kind]
            if used > problem.room_bytes[stage] * (1 + 1e-9):
                return False
    return True


class _Arrivals:
    """When the input of each F and I is there; infinity while nobody has sent it."""

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
        edge, target = _next_stop(self._problem, kind, stage)
        if edge is not None:
            link_s = self._link_s[kind]
            link_s[stage] = max(link_s[stage], end) + edge.transfer_s
            landed = link_s[stage] + edge.latency_s
            self.arrives_s[kind][target][microbatch] = landed
            self.last = landed, target


def _next_stop(problem: ScheduleProblem, kind: int, stage: int) -> tuple[Edge | None, int]:
    """Return the link and the stage to which a pass sends; no link if it sends nothing."""
    if kind == FORWARD and stage + 1 < problem.num_stages:
        return problem.forward_edges[stage], stage + 1
    if kind == INPUT and stage:
        return problem.backward_edges[stage - 1], stage - 1
    return None, stage
