"""Time the actions of one iteration: when each worker is free, given seconds and dependencies.

A *worker* is a group of ranks that runs one stage, or several, its chunks. A program is a list of
rounds, and a round is a list of steps, which are run in this order. A step starts on its worker as
soon as the worker is free and the message that the step awaits has arrived; afterwards it may send
one message over a link. A link carries one message at a time, in the order in which they were sent,
while both its ends compute. Messages arrive in slots: a later message for a slot replaces an
earlier one.

If a round is repeated, then after a few repetitions each one changes all times by the same amount.
The other repetitions are then computed at once.

1F1B is made of rounds. In round r, stage s runs the forward of micro-batch `r - s` and, after the
first micro-batch has passed all stages, the backward of `r - (num_stages - 1)`. Rounds of equal
micro-batches are equal. So for S stages, any number of equal micro-batches costs about as much to
compute as 4·S rounds of 2·S steps. Any other schedule is given as each worker's list of actions,
and is a single round.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.places import stages_by_worker
from lightning_hetero.schedules import usual_actions

Orders = Sequence[Sequence[Action]]
"""The actions of each worker of a pipeline, in the order in which it runs them."""

_SAME = 1e-9
"""Rounds that differ by at most this share of their steps' seconds count as equal."""

NOTHING, NOWHERE = -1, -2
"""The slot of a step that awaits no message, and slot and link of one that sends none."""


class Step(NamedTuple):
    """A computation of a worker, with the message that it awaits and the one that it sends."""

    worker: int
    awaits: int
    """Slot of the awaited message; NOTHING starts as soon as the worker is free."""
    seconds: float
    link: int
    """Link of the message that it sends; NOWHERE if it sends none."""
    message_s: float
    arrives: int
    """Slot in which that message arrives; NOWHERE if it sends none."""
    name: tuple[str, int, int] = ("", 0, 0)
    """(kind, stage, micro-batch) in recorded events."""
    receive_s: float = 0.0
    """Seconds in which the worker only receives, before it computes."""


_Event = tuple[str, int, int, float, float]
"""Kind, stage, micro-batch, start and end: of a step, or of its message, "SF" or "SB"."""


@dataclass(frozen=True)
class EqualTimes:
    """Seconds of every action and message of consecutive micro-batches that are alike."""

    forward_s: tuple[float, ...]
    """Forward of a micro-batch on each stage."""
    backward_s: tuple[float, ...]
    """Backward of a micro-batch on each stage."""
    forward_message_s: tuple[float, ...]
    """Hidden state from a stage to the next; one less than stages."""
    backward_message_s: tuple[float, ...]
    """Its gradient from the next stage back to this one; one less than stages."""
    num_microbatches: int
    """How many they are, 1 or more."""
    weight_s: tuple[float, ...] = ()
    """The part of each stage's backward that a W action takes; not needed without such actions."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When everything of one pipeline ended."""

    end_s: tuple[float, ...]
    """End of each stage's last action; its start time if it has none."""
    busy_s: tuple[float, ...]
    """Seconds each stage's worker computed."""
    last_s: tuple[float, ...]
    """Seconds of each stage's last action; 0 if it has none."""
    events: tuple[_Event, ...]
    """(kind, stage, micro-batch, start, end) of actions and messages; empty unless recorded."""


def propagate(
    times: EqualTimes | Sequence[EqualTimes],
    start_s: Sequence[float],
    *,
    orders: Orders | None = None,
    workers: Sequence[int] = (),
    blocking: bool = False,
    record: bool = False,
) -> Timeline:
    """Return when each stage of a pipeline ends and how long it computed.

    Args:
        times: Seconds of every action and message, for each run of equal micro-batches in turn.
        start_s: When each stage may start its first forward.
        orders: The actions of each worker, of any depth, with whole or split backwards, such as
            `schedules.solve_actions` returns; None runs 1F1B (`schedules.usual_actions`).
        workers: The worker of each stage; by default each stage has its own.
        blocking: Whether a message keeps both its ends from computing.
        record: Whether to keep the events.

    Raises:
        PlanError: The orders wait for each other.
    """
    runs = (times,) if isinstance(times, EqualTimes) else tuple(times)
    num_stages, count = len(start_s), sum(run.num_microbatches for run in runs)
    workers = tuple(workers) or tuple(range(num_stages))
    if orders is None and (record or len({*workers}) < num_stages):
        orders = usual_actions(workers, count)
    num_messages = 2 * num_stages * (1 if orders is None else max(1, count))
    # The last two entries are those of NOWHERE and NOTHING.
    free_s = [start_s[workers.index(worker)] for worker in dict.fromkeys(workers)]
    state = _State(free_s, *([0.0] * (num_messages + 2) for _ in range(2)))
    events: list[_Event] = []
    if orders is None:
        last_s = [*runs[-1].backward_s] if runs else [0.0] * num_stages
        for steps, number in _rounds_1f1b(runs, num_stages, blocking=blocking):
            state.repeat(steps, number, blocking=blocking)
        end_s = state.free_s
    else:
        steps, last_s = _steps_of(orders, runs, workers, blocking=blocking)
        state.run(steps, blocking=blocking, events=events)
        end_s = [*start_s]
        for kind, stage, _, _, end in events:
            if blocking or not kind.startswith("S"):
                end_s[stage] = end
    own_s = [
        sum(run.num_microbatches * (run.forward_s[stage] + run.backward_s[stage]) for run in runs)
        for stage in range(num_stages)
    ]
    busy_s = [sum(own_s[stage] for stage in own) for own in stages_by_worker(workers)]
    return Timeline(
        end_s=tuple(end_s),
        busy_s=tuple(busy_s[worker] for worker in workers),
        last_s=tuple(last_s),
        events=tuple(events) if record else (),
    )


class _State(NamedTuple):
    """The times of all workers, slots and links between two steps."""

    free_s: list[float]
    arrived_s: list[float]
    link_free_s: list[float]

    def run(
        self, steps: Sequence[Step], *, blocking: bool, events: list[_Event] | None = None
    ) -> None:
        """Run steps; add them and their messages to `events`, if there are any.

        Searches spend much of their time here, so the larger of two times is taken without a call.
        """
        free_s, arrived_s, link_free_s = self
        for worker, awaits, seconds, link, message_s, arrives, name, receive_s in steps:
            free, arrived = free_s[worker], arrived_s[awaits]
            start = (free if free > arrived else arrived) + receive_s
            end = start + seconds
            free_s[worker] = end
            if link != NOWHERE:
                busy = link_free_s[link]
                sent = end if end > busy else busy
                landed = link_free_s[link] = arrived_s[arrives] = sent + message_s
                if blocking:
                    # The sender waits until it is sent, the receiver receives once it is idle.
                    free_s[worker], arrived_s[arrives] = landed, sent
            if events is not None:
                events.append((*name, start, end))
                if link != NOWHERE:
                    events.append(("SF" if name[0] == "F" else "SB", *name[1:], sent, landed))

    def repeat(self, steps: Sequence[Step], count: int, *, blocking: bool) -> None:
        """Run a round `count` times; skip what repeats."""
        if count == 1:
            self.run(steps, blocking=blocking)
            return
        unit = _SAME * sum([step.seconds for step in steps]) or 1.0
        seen: dict[tuple[int, int], tuple[int, list[float]]] = {}
        index, last_s, pace = 0, self.free_s[0], 0
        while index < count:
            self.run(steps, blocking=blocking)
            index += 1
            now_s = self.free_s[0]
            if not math.isfinite(now_s):
                continue
            # Times can repeat only from a round that took as long as this one and followed a round
            # as long as the last one. So only such rounds are compared.
            paces = pace, round((now_s - last_s) / unit)
            (_, pace), last_s = paces, now_s
            times = self._times()
            before, earlier = seen.get(paces, (index, times))
            later_s = times[0] - earlier[0]
            if before < index and _are_later(times, earlier, later_s, unit):
                repeats = (count - index) // (index - before)
                self._delay(repeats * later_s)
                index += repeats * (index - before)
                seen.clear()
            else:
                seen[paces] = index, times

    def _times(self) -> list[float]:
        """Return all times; two rounds whose times differ by one constant continue alike."""
        used = (self.arrived_s, self.link_free_s)
        return [*self.free_s, *itertools.chain.from_iterable(filter(None, row) for row in used)]

    def _delay(self, seconds: float) -> None:
        """Add `seconds` to all times of slots and links that are in use, and of workers."""
        for row in self:
            row[:] = [value and value + seconds for value in row]


def _are_later(
    times: Sequence[float], earlier: Sequence[float], later_s: float, unit: float
) -> bool:
    """Return whether all times are `later_s` later, up to `unit`: a loop that mostly ends soon."""
    if len(times) != len(earlier):
        return False
    for now, then in zip(times, earlier, strict=True):
        if not -unit <= now - then - later_s <= unit:
            return False
    return True


def _rounds_1f1b(
    runs: Sequence[EqualTimes], num_stages: int, *, blocking: bool
) -> Iterator[tuple[Sequence[Step], int]]:
    """Yield the rounds of a pipeline and how often each is repeated.

    Steps of a round go from the last stage to the first: a forward reads the hidden state of the
    round before, and a backward the gradient of this one.
    """
    steps = [_steps(times, num_stages, blocking=blocking) for times in runs]
    ends = list(itertools.accumulate([times.num_microbatches for times in runs]))
    total, last, index = ends[-1] if ends else 0, num_stages - 1, 0
    while index < total + last:
        oldest, repeats = index - last, 1
        run = bisect.bisect(ends, oldest)
        if oldest >= 0 and index < total and run == bisect.bisect(ends, index):
            # All micro-batches of this round are of one run, and so are those of the rounds after.
            repeats = ends[run] - index
            yield steps[run], repeats
        else:
            found = []
            for stage in range(min(index, last), -1, -1):
                pair = 2 * (last - stage)
                if index - stage < total:
                    found.append(steps[bisect.bisect(ends, index - stage)][pair])
                if oldest >= 0:
                    found.append(steps[run][pair + 1])
            yield found, 1
        index += repeats


def _steps_of(
    orders: Orders, runs: Sequence[EqualTimes], workers: Sequence[int], *, blocking: bool
) -> tuple[list[Step], list[float]]:
    """Return the steps of all workers' actions, each after those that it waits for.

    Every micro-batch has slots of its own, as stages may run ahead by any number of them. The
    second result is the seconds of each stage's last action.
    """
    num_stages = len(workers)
    known = [_steps(times, num_stages, blocking=blocking) for times in runs]
    column = [index for index, run in enumerate(runs) for _ in range(run.num_microbatches)]

    def step_of(action: Action) -> Step:
        kind, stage, microbatch = action.kind, action.stage_index, action.microbatch_index
        run = column[microbatch]
        step = known[run][2 * (num_stages - 1 - stage) + (kind is not ActionKind.FORWARD)]
        if kind is ActionKind.WEIGHT:
            step = Step(stage, NOTHING, runs[run].weight_s[stage], NOWHERE, 0.0, NOWHERE)
        elif kind is ActionKind.INPUT:
            step = step._replace(seconds=step.seconds - runs[run].weight_s[stage])
        awaits, arrives = (
            slot if slot < 0 else slot + 2 * num_stages * microbatch
            for slot in (step.awaits, step.arrives)
        )
        name = kind.value, stage, microbatch
        return step._replace(worker=workers[stage], awaits=awaits, arrives=arrives, name=name)

    steps: list[Step] = []
    sent, done = {NOTHING}, [0] * len(orders)
    last_s, waiting = [0.0] * num_stages, [*range(len(orders))]
    while waiting:
        worker = waiting.pop()
        for action in orders[worker][done[worker] :]:
            step = step_of(action)
            if step.awaits not in sent:
                break
            steps.append(step)
            done[worker] += 1
            last_s[action.stage_index] = step.seconds
            if step.arrives != NOWHERE:
                sent.add(step.arrives)
                step_to = 1 if action.kind is ActionKind.FORWARD else -1
                waiting.append(workers[action.stage_index + step_to])
    if done != [len(order) for order in orders]:
        raise PlanError("The schedule's actions wait for each other.")
    return steps, last_s


def _steps(times: EqualTimes, num_stages: int, *, blocking: bool) -> list[Step]:
    """Return forward and backward of each stage, from the last stage to the first."""
    there, back = (*times.forward_message_s, 0.0), (0.0, *times.backward_message_s)
    # A blocking message lengthens the action that it goes to.
    hold, later = ((0.0, *there[:-1]), (*back[1:], 0.0)) if blocking else ((0.0,) * num_stages,) * 2
    found = []
    for stage in range(num_stages - 1, -1, -1):
        # Slots and links: stage s gets its hidden state in s, and its gradient in num_stages + s.
        here, gradient, after, before = stage, num_stages + stage, stage + 1, num_stages + stage - 1
        if stage == 0:
            here, before = NOTHING, NOWHERE
        if stage == num_stages - 1:
            gradient, after = NOTHING, NOWHERE
        forward, backward = times.forward_s[stage], times.backward_s[stage]
        found += [
            Step(stage, here, forward, after, there[stage], after, receive_s=hold[stage]),
            Step(stage, gradient, backward, before, back[stage], before, receive_s=later[stage]),
        ]
    return found
