"""Simulate one pipeline of equal micro-batches, without running all of them.

1F1B goes in rounds: in round r stage s runs the forward of micro-batch `r - s` and then, once the
first micro-batch is through, the backward of `r - (num_stages - 1)`. A round depends only on the
one before it. With equal micro-batches it soon equals an earlier one, all times later by the same
amount: such rounds repeat until the cool-down and are skipped. The rounds that are run, for S
stages about 4·S of 2·S actions, don't grow in number with the micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.simulator.propagate import PipelineTimes, Timeline, propagate

__all__ = ["EqualTimes", "circle_s", "propagate_all", "propagate_equal", "steady_round_s"]

_SAME = 1e-9
"""Rounds that differ by at most this share of a micro-batch's seconds count as equal."""


@dataclass(frozen=True)
class EqualTimes:
    """Seconds of every action and message of a pipeline whose micro-batches are all alike."""

    forward_s: tuple[float, ...]
    """Forward of a micro-batch on each stage."""
    backward_s: tuple[float, ...]
    """Backward of a micro-batch on each stage."""
    forward_message_s: tuple[float, ...]
    """Hidden state from a stage to the next; one less than stages."""
    backward_message_s: tuple[float, ...]
    """Its gradient from the next stage back to this one; one less than stages."""
    num_microbatches: int
    """Micro-batches that the pipeline runs, 1 or more."""

    @property
    def first_forward_s(self) -> tuple[float, ...]:
        """The first forward on each stage."""
        return self.forward_s

    @property
    def last_backward_s(self) -> tuple[float, ...]:
        """The last backward on each stage."""
        return self.backward_s


def propagate_equal(
    times: EqualTimes, start_s: Sequence[float], *, blocking: bool = False
) -> Timeline:
    """Return the same as `propagate`, up to rounding and without events.

    Args:
        times: Seconds of every action and message.
        start_s: When each stage may start its first forward.
        blocking: Whether a message keeps both its ends from computing.
    """
    num_stages, count = len(start_s), times.num_microbatches
    rounds = _Rounds(times, start_s, blocking=blocking)
    unit = _SAME * (sum(times.forward_s) + sum(times.backward_s)) or 1.0
    seen: dict[tuple[int, int], tuple[int, list[float]]] = {}
    index, last_s, pace = 0, 0.0, 0
    while index < count + num_stages - 1:
        rounds.run(index)
        index += 1
        if num_stages <= index < count and math.isfinite(rounds.free_s[0]):
            # A round can equal an earlier one only if both are equally long, and those before, too.
            paces = pace, round((rounds.free_s[0] - last_s) / unit)
            (_, pace), last_s = paces, rounds.free_s[0]
            state = rounds.state()
            before, earlier = seen.get(paces, (index, state))
            later_s = state[0] - earlier[0]
            if before < index and _are_later(state, earlier, later_s, unit):
                repeats = (count - index) // (index - before)
                rounds.delay(repeats * later_s)
                index += repeats * (index - before)
                seen.clear()
            else:
                seen[paces] = index, state
    busy_s = [count * sum(pair) for pair in zip(times.forward_s, times.backward_s, strict=True)]
    return Timeline(end_s=tuple(rounds.free_s), busy_s=tuple(busy_s), events=())


def _are_later(
    state: Sequence[float], earlier: Sequence[float], later_s: float, unit: float
) -> bool:
    """Return whether all times are `later_s` later, up to `unit`: a loop that mostly ends soon."""
    for now, then in zip(state, earlier, strict=True):
        if not -unit <= now - then - later_s <= unit:
            return False
    return True


def propagate_all(
    compute: Sequence[PipelineTimes | EqualTimes],
    starts: Sequence[Sequence[float]],
    *,
    blocking: bool,
    record: bool = False,
) -> list[Timeline]:
    """Return the timeline of every pipeline; equal ones are run only once.

    Args:
        compute: Seconds of every action and message of each.
        starts: When each of its stages may start its first forward.
        blocking: Whether a message keeps both its ends from computing.
        record: Whether to keep events; pipelines given by `EqualTimes` have none.
    """
    timelines: list[Timeline] = []
    known: dict[tuple[object, ...], Timeline] = {}
    for times, start in zip(compute, starts, strict=True):
        key = times, tuple(start)
        if key not in known:
            known[key] = (
                propagate_equal(times, start, blocking=blocking)
                if isinstance(times, EqualTimes)
                else propagate(times, start, blocking=blocking, record=record)
            )
        timelines.append(known[key])
    return timelines


def steady_round_s(times: EqualTimes, *, blocking: bool = False) -> float:
    """Return by how many seconds each further one of many micro-batches delays the pipeline's end.

    In 1F1B stages u to t wait for each other in a circle: forwards from u to t, backwards from t to
    u, and then the forward on u of the micro-batch that comes t - u + 1 later. The slowest circle
    sets the pace, or a link that is busy for longer.
    """
    work_s = np.add(times.forward_s, times.backward_s)
    hops_s = np.add(times.forward_message_s, times.backward_message_s)
    links_s = (0.0, *times.forward_message_s, *times.backward_message_s)
    return max(float(circle_s(work_s, hops_s, blocking=blocking)), *links_s)


def circle_s(work_s: FloatArray, hops_s: FloatArray, *, blocking: bool = False) -> FloatArray:
    """Return the seconds of a micro-batch in the slowest circle of stages.

    Args:
        work_s: Forward and backward of each stage, [..., stages].
        hops_s: Messages between each two stages, there and back.
        blocking: Whether a message keeps both its ends from computing.
    """
    done = np.zeros((*work_s.shape[:-1], work_s.shape[-1] + 1))
    np.cumsum(work_s, axis=-1, out=done[..., 1:])
    passed = np.cumsum([0.0, 0.0, *hops_s, 0.0])
    first, last = _circles(work_s.shape[-1])
    # A blocking message also keeps the circle's outer stages from computing.
    outer = int(blocking)
    messages_s = passed[last + 1 + outer] - passed[first + 1 - outer]
    circles_s = done[..., last + 1] - done[..., first] + messages_s
    slowest: FloatArray = (circles_s / (last - first + 1)).max(axis=-1)
    return slowest


@lru_cache
def _circles(num_stages: int) -> tuple[IntArray, IntArray]:
    """Return the first and the last stage of every circle."""
    return np.triu_indices(num_stages)


class _Rounds:
    """The times of all stages and links after a round."""

    def __init__(self, times: EqualTimes, start_s: Sequence[float], *, blocking: bool) -> None:
        self.num_stages, self.num_microbatches = len(start_s), times.num_microbatches
        there = (*times.forward_message_s, 0.0)
        back = (0.0, *times.backward_message_s)
        self.hops_s = tuple(zip(there, back, strict=True))
        nothing = (0.0,) * self.num_stages
        # A blocking message lengthens the action that it goes to and keeps its sender busy.
        self.holds_s = self.hops_s if blocking else ((0.0, 0.0),) * self.num_stages
        incoming = ((0.0, *there[:-1]), (*back[1:], 0.0)) if blocking else (nothing, nothing)
        self.seconds = tuple(
            (forward + before, backward + after)
            for forward, backward, before, after in zip(
                times.forward_s, times.backward_s, *incoming, strict=True
            )
        )
        self.free_s = list(start_s)
        self.arrived_s = [0.0] * (self.num_stages + 1)
        """When each stage has its next hidden state; the last entry is unused."""
        self.forward_link_s, self.backward_link_s = ([0.0] * self.num_stages for _ in range(2))

    def run(self, index: int) -> None:
        """Run round `index`, from the last stage to the first.

        Searches spend much of their time here, so the larger of two times is taken without a call.
        """
        has_backward = index >= self.num_stages - 1
        newest = index - self.num_microbatches
        free_s, arrived_s = self.free_s, self.arrived_s
        forward_link_s, backward_link_s = self.forward_link_s, self.backward_link_s
        gradient_s = 0.0
        for stage in range(min(index, self.num_stages - 1), -1, -1):
            free = free_s[stage]
            forward, backward = self.seconds[stage]
            hop, back = self.hops_s[stage]
            hold, hold_back = self.holds_s[stage]
            if stage > newest:
                arrived, link = arrived_s[stage], forward_link_s[stage]
                end = (free if free > arrived else arrived) + forward
                sent = (end if end > link else link) + hop
                forward_link_s[stage] = sent
                arrived_s[stage + 1] = sent - hold
                free = end + hold
            if has_backward:
                link = backward_link_s[stage]
                end = (free if free > gradient_s else gradient_s) + backward
                sent = (end if end > link else link) + back
                backward_link_s[stage] = sent
                gradient_s = sent - hold_back
                free = end + hold_back
            free_s[stage] = free

    def state(self) -> list[float]:
        """Return all times; two rounds whose times differ by one constant continue alike."""
        links_s = (*self.forward_link_s, *self.backward_link_s)
        return [*self.free_s, *self.arrived_s[1:-1], *links_s]

    def delay(self, seconds: float) -> None:
        """Add `seconds` to all times."""
        for row in (self.free_s, self.arrived_s, self.forward_link_s, self.backward_link_s):
            row[:] = [value + seconds for value in row]
