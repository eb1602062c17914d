"""Simulate one pipeline by the runtime's own action lists.

A stage runs its actions in order, each as soon as the stage is free and the activation (or its
gradient) has arrived; a link carries one message at a time in the order sent, while both ends
compute. An order in which 1F1B's actions can be timed doesn't depend on times, so it is found once
per (stages, micro-batches) from the runtime's lists and then replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b

__all__ = ["PipelineTimes", "Timeline", "dependency_order", "propagate"]

_Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of every action and message of one pipeline, as [stage][micro-batch]."""

    forward_s: _Matrix
    """Forward of a micro-batch on a stage."""
    backward_s: _Matrix
    """Backward of a micro-batch on a stage."""
    forward_message_s: _Matrix
    """Hidden state from a stage to the next; one row less than stages."""
    backward_message_s: _Matrix
    """Its gradient from the next stage back to this one; one row less than stages."""

    @property
    def first_forward_s(self) -> tuple[float, ...]:
        """The first forward on each stage; zeros without micro-batches."""
        return tuple([row[0] if row else 0.0 for row in self.forward_s])

    @property
    def last_backward_s(self) -> tuple[float, ...]:
        """The last backward on each stage; zeros without micro-batches."""
        return tuple([row[-1] if row else 0.0 for row in self.backward_s])


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
    times: PipelineTimes,
    start_s: Sequence[float],
    *,
    blocking: bool = False,
    record: bool = False,
) -> Timeline:
    """Return when each stage ends and how long it computed.

    Args:
        times: Seconds of every action and message.
        start_s: When each stage may start its first forward.
        blocking: Whether a message keeps both its ends from computing.
        record: Whether to keep the events.
    """
    num_stages, num_microbatches = len(start_s), len(times.forward_s[0])
    free, busy = list(start_s), [0.0] * num_stages
    # All indexed by direction (forward, backward), then stage, then micro-batch.
    seconds = (times.forward_s, times.backward_s)
    messages = ((*times.forward_message_s, ()), ((), *times.backward_message_s))
    link_free = ([0.0] * num_stages, [0.0] * num_stages)
    arrival, receive_s = (
        tuple([[0.0] * num_microbatches for _ in range(num_stages)] for _ in range(2))
        for _ in range(2)
    )
    events: list[tuple[str, int, int, float, float]] = []
    for stage, backward, microbatch in dependency_order(num_stages, num_microbatches):
        ready = arrival[backward][stage][microbatch]
        start = free[stage] if free[stage] > ready else ready
        start += receive_s[backward][stage][microbatch]
        end = free[stage] = start + seconds[backward][stage][microbatch]
        busy[stage] += end - start
        if record:
            events.append(("FB"[backward], stage, microbatch, start, end))
        row = messages[backward][stage]
        if not row:
            continue
        sent = link_free[backward][stage]
        if end > sent:
            sent = end
        landed = link_free[backward][stage] = sent + row[microbatch]
        target = stage - 1 if backward else stage + 1
        if blocking:
            # The sender waits for the message to go, the receiver for it to come once it is idle.
            free[stage], arrival[backward][target][microbatch] = landed, sent
            receive_s[backward][target][microbatch] = row[microbatch]
        else:
            arrival[backward][target][microbatch] = landed
        if record:
            events.append((("SF", "SB")[backward], stage, microbatch, sent, landed))
    return Timeline(end_s=tuple(free), busy_s=tuple(busy), events=tuple(events))


def _awaited(action: Action, num_stages: int) -> set[tuple[int, bool, int]]:
    stage, microbatch = action.stage_index, action.microbatch_index
    if action.kind is ActionKind.FORWARD:
        return {(stage - 1, False, microbatch)} if stage else set()
    if stage == num_stages - 1:
        return {(stage, False, microbatch)}
    return {(stage + 1, True, microbatch)}
