"""Run one pipeline's own action lists against the clock.

A stage runs its actions in order, each as soon as the stage is free and the hidden state (or its
gradient) has arrived; a link carries one message at a time in the order sent, while both ends
compute. The order in which 1F1B's actions become known doesn't depend on times, so it is found
once per (stages, micro-batches) from the runtime's lists and then replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b

__all__ = ["PipelineTimes", "Timeline", "dependency_order", "propagate"]

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of every action and message of one pipeline, as [stage][micro-batch]."""

    forward_s: Matrix
    """Forward of a micro-batch on a stage."""
    backward_s: Matrix
    """Backward of a micro-batch on a stage."""
    forward_message_s: Matrix
    """Hidden state from a stage to the next; one row less than stages."""
    backward_message_s: Matrix
    """Its gradient from the next stage back to this one; one row less than stages."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When everything of one pipeline ended."""

    end_s: tuple[float, ...]
    """End of each stage's last action; its start time if it has none."""
    busy_s: tuple[float, ...]
    """Seconds each stage computed."""
    events: tuple[tuple[str, int, int, float, float], ...]
    """(kind, stage, micro-batch, start, end) of actions and messages; empty unless recorded."""


@lru_cache(maxsize=512)
def dependency_order(num_stages: int, num_microbatches: int) -> tuple[tuple[int, bool, int], ...]:
    """Return all 1F1B actions as (stage, is backward, micro-batch), each after what it waits for.

    It is the order of a run in which every action takes one unit of time, so it interleaves the
    stages as a real run does.
    """
    lists = [
        schedule_1f1b(stage_index=s, num_stages=num_stages, num_microbatches=num_microbatches)
        for s in range(num_stages)
    ]
    done: set[tuple[int, bool, int]] = set()
    position = [0] * num_stages
    order: list[tuple[int, bool, int]] = []
    total = sum(map(len, lists))
    while len(order) < total:
        ready = [
            (s, action.kind is ActionKind.BACKWARD, action.microbatch_index)
            for s in range(num_stages)
            if position[s] < len(lists[s])
            and _awaited(action := lists[s][position[s]], num_stages) <= done
        ]
        assert ready, "1F1B has a cycle"
        for key in ready:
            position[key[0]] += 1
        done.update(ready)
        order += ready
    return tuple(order)


def propagate(
    times: PipelineTimes, start_s: Sequence[float], num_microbatches: int, *, record: bool = False
) -> Timeline:
    """Return when each stage ends and how long it computed.

    Args:
        times: Seconds of every action and message.
        start_s: When each stage may start its first forward.
        num_microbatches: Number of micro-batches, 0 or more.
        record: Whether to keep the events.
    """
    num_stages, last = len(start_s), len(start_s) - 1
    free = list(start_s)
    busy = [0.0] * num_stages
    # Link s joins stages s and s + 1; each direction is busy on its own.
    forward_free, backward_free = [0.0] * num_stages, [0.0] * num_stages
    forward_arrival = [[0.0] * num_microbatches for _ in range(num_stages)]
    backward_arrival = [[0.0] * num_microbatches for _ in range(num_stages)]
    forward_s, backward_s = times.forward_s, times.backward_s
    forward_message_s, backward_message_s = times.forward_message_s, times.backward_message_s
    events: list[tuple[str, int, int, float, float]] = []
    for stage, is_backward, microbatch in dependency_order(num_stages, num_microbatches):
        if is_backward:
            seconds, arrival = backward_s[stage][microbatch], backward_arrival[stage][microbatch]
        else:
            seconds, arrival = forward_s[stage][microbatch], forward_arrival[stage][microbatch]
        start = free[stage]
        if arrival > start:
            start = arrival
        end = free[stage] = start + seconds
        busy[stage] += seconds
        if record:
            events.append(("B" if is_backward else "F", stage, microbatch, start, end))
        if is_backward:
            if stage:
                link = stage - 1
                sent = backward_free[link] if backward_free[link] > end else end
                landed = sent + backward_message_s[link][microbatch]
                backward_free[link] = backward_arrival[link][microbatch] = landed
                if record:
                    events.append(("SB", stage, microbatch, sent, landed))
        elif stage < last:
            sent = forward_free[stage] if forward_free[stage] > end else end
            landed = sent + forward_message_s[stage][microbatch]
            forward_free[stage] = forward_arrival[stage + 1][microbatch] = landed
            if record:
                events.append(("SF", stage, microbatch, sent, landed))
    return Timeline(end_s=tuple(free), busy_s=tuple(busy), events=tuple(events))


def _awaited(action: Action, num_stages: int) -> set[tuple[int, bool, int]]:
    stage, microbatch = action.stage_index, action.microbatch_index
    if action.kind is ActionKind.FORWARD:
        return {(stage - 1, False, microbatch)} if stage else set()
    if stage == num_stages - 1:
        return {(stage, False, microbatch)}
    return {(stage + 1, True, microbatch)}
