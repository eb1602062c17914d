"""Find what each operation of a trace waited for, so that it can be replayed with other durations.

On a rank an operation waits for those that ended just before it. A send and its receive end
together, and so do the ranks of a collective: their *own* time begins when the last of them has
come, all before is waiting. Which ranks a collective joins is seen from the times: where all ends
coincide although the starts don't. So is a barrier that the trace doesn't hold: where all starts
coincide although what came before ended at different times.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.simulator.operations import OperationGraph, propagate_operations
from lightning_hetero.straggler.operations.trace import OperationTrace, grouped

__all__ = ["BACKWARD", "FORWARD", "TRANSFERS", "Replay"]

FORWARD = ("forward-compute",)
"""Kinds of operations that compute forwards."""
BACKWARD = ("backward-compute", "backward-input", "backward-weight")
"""Kinds of operations that compute backwards, whole or in parts."""
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
"""Kinds of operations that move activations and their gradients between stages."""
RECEIVES = TRANSFERS[1::2]
_LOCAL = ("gc", "optimizer", *FORWARD, *BACKWARD, *TRANSFERS)
_ROUNDING_S, _MOST_OVERLAP_S, _OVERLAP = 2e-5, 1e-3, 0.1
"""Clocks of streams differ a little: an operation counts as ended before another begins if it
overlaps it by at most a tenth of its own time, and never by more than a millisecond."""
_WINDOW = 4
"""How many operations before each one, on its rank, it may wait for."""
_RENDEZVOUS = 0.99
"""Sends wait for their receives if more than this share of them end after the receive begins."""
_COINCIDE = 0.2
"""Ends coincide if they spread over less than this share of what the starts do."""


@dataclass(frozen=True)
class Replay:
    """A trace as a graph, with each operation's own time and the gap before it."""

    trace: OperationTrace
    graph: OperationGraph
    own_s: FloatArray
    """Without waiting for peers; barriers that were found follow after the trace's operations."""
    gap_s: FloatArray
    step: IntArray
    """Of each operation and barrier."""
    barriers: IntArray
    """The operation behind each barrier."""
    only_waits: IntArray
    """Receives that only wait for a send: the link's time is the send's."""

    @classmethod
    def build(cls, trace: OperationTrace) -> "Replay":
        """Return the graph of a trace.

        Raises:
            ConfigurationError: Operations wait for each other in a circle.
        """
        waits_for = np.full((len(trace), _WINDOW + 3), -1, np.int64)
        waits_for[:, : _WINDOW + 1] = _earlier_on_rank(trace)
        group = _pair_transfers(trace, waits_for)
        _join_collectives(trace, group)
        step_start = np.full(int(trace.step.max()) + 1, np.inf)
        np.minimum.at(step_start, trace.step, trace.start_s)
        start, end = (times - step_start[trace.step] for times in (trace.start_s, trace.end_s))
        # A receive that only waits begins, in effect, when the send has ended.
        start = np.minimum(np.maximum(start, np.r_[end, 0.0][waits_for[:, -1]]), end)
        ready = np.r_[end, 0.0][waits_for].max(axis=1)
        # One that has nothing to do before its send begins waits for that, whenever it is recorded.
        receives = np.flatnonzero(trace.are(*RECEIVES))
        is_idle = ready[receives] <= start[group[receives]]
        start[receives] = np.where(is_idle, ready[receives], start[receives])
        barriers = _Barriers(trace, start, ready)
        added = np.arange(len(trace), len(trace) + len(barriers.before))
        waits_for = np.r_[waits_for, np.full((len(added), waits_for.shape[1]), -1)]
        for barrier, op in zip(added.tolist(), barriers.before.tolist(), strict=True):
            waits_for[barrier] = waits_for[op]
            waits_for[op] = -1
            waits_for[op, 0] = barrier
        group = np.r_[group, len(trace) + barriers.group]
        try:
            graph = OperationGraph.build(waits_for, group)
        except ValueError as error:
            raise ConfigurationError(f"The trace can't be replayed: {error}.") from error
        last_start = np.full(len(trace), -np.inf)
        np.maximum.at(last_start, group[: len(trace)], start)
        return cls(
            trace=trace,
            graph=graph,
            own_s=np.r_[np.maximum(end - last_start[group[: len(trace)]], 0.0), barriers.own_s],
            gap_s=np.r_[np.maximum(start - barriers.ready_s, 0.0), np.zeros(len(added))],
            step=np.r_[trace.step, trace.step[barriers.before]],
            barriers=barriers.before,
            only_waits=np.flatnonzero(waits_for[: len(trace), -1] >= 0),
        )

    def step_s(self, own_s: FloatArray, gap_s: FloatArray) -> FloatArray:
        """Return the seconds of each step with these durations."""
        ends = propagate_operations(self.graph, own_s, gap_s)
        seconds = np.zeros(int(self.step.max()) + 1)
        np.maximum.at(seconds, self.step, ends)
        return seconds

    def observed_s(self) -> FloatArray:
        """Return the seconds of each step as recorded."""
        count = int(self.trace.step.max()) + 1
        first, last = np.full(count, np.inf), np.zeros(count)
        np.minimum.at(first, self.trace.step, self.trace.start_s)
        np.maximum.at(last, self.trace.step, self.trace.end_s)
        seconds: FloatArray = last - first
        return seconds


def _in_background(trace: OperationTrace) -> IntArray:
    """Return 1 for sends, and 2 for receives, if such go on while their rank computes; else 0."""
    stream = np.zeros(len(trace), np.int64)
    computes = np.flatnonzero(trace.are(*FORWARD, *BACKWARD))
    ended_s = trace.end_s - _overlap_s(trace)
    for number, names in enumerate((TRANSFERS[::2], RECEIVES), start=1):
        ops = np.flatnonzero(trace.are(*names))
        following = np.searchsorted(computes, ops)
        overlapped = np.zeros(len(ops), bool)
        for near in (following - 1, following):
            known = (near >= 0) & (near < len(computes))
            other, op = computes[near[known]], ops[known]
            same = (trace.rank[other] == trace.rank[op]) & (trace.step[other] == trace.step[op])
            both = np.maximum(trace.start_s[other], trace.start_s[op])
            overlapped[known] |= same & (both < np.minimum(ended_s[other], ended_s[op]))
        if len(ops) and overlapped.mean() > 1.0 - _RENDEZVOUS:
            stream[ops] = number
    return stream


def _earlier_on_rank(trace: OperationTrace) -> IntArray:
    """Return the few operations before each on its rank that had ended when it began.

    Transfers in background wait for each other; their sends, for the compute before them, too.
    """
    stream, index = _in_background(trace), np.arange(len(trace))
    order = np.lexsort((index, stream, trace.rank, trace.step))
    found = np.full((len(trace), _WINDOW + 1), -1, np.int64)
    keys = np.stack([trace.step, trace.rank, stream])[:, order]
    begins = np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)]
    first = np.maximum.accumulate(np.where(begins, index, 0))
    ended_s, start_s = (trace.end_s - _overlap_s(trace))[order], trace.start_s[order]
    for back in range(1, 4 * _WINDOW + 1):
        other = index - back
        ended = (other >= first) & (ended_s[other] <= start_s)
        if back <= _WINDOW:
            found[:, back - 1] = np.where(ended, order[other], -1)
        else:  # Those that overlap everything just before them look further back.
            ended &= (found < 0).all(axis=1)
            found[ended, 0] = order[other[ended]]
    earlier = np.empty_like(found)
    earlier[order] = found
    sends = np.flatnonzero(stream == 1)
    if len(sends):
        computes = np.flatnonzero(trace.are(*FORWARD, *BACKWARD))
        place = np.searchsorted(computes, sends)
        for back in (3, 2, 1):  # The nearest that had ended comes last.
            made = computes[np.maximum(place - back, 0)]
            own = (trace.rank[made] == trace.rank[sends]) & (trace.step[made] == trace.step[sends])
            own &= (trace.end_s - _overlap_s(trace))[made] <= trace.start_s[sends]
            earlier[sends[own], -1] = made[own]
    return earlier


def _overlap_s(trace: OperationTrace) -> FloatArray:
    seconds: FloatArray = np.minimum(_MOST_OVERLAP_S, _OVERLAP * (trace.end_s - trace.start_s))
    return seconds + _ROUNDING_S


def _pair_transfers(trace: OperationTrace, waits_for: IntArray) -> IntArray:
    """Return the group of each operation, and let receives wait for sends that had ended."""
    group = np.arange(len(trace))
    pairs = [_paired(trace, name, hop) for name, hop in (("forward", 1), ("backward", -1))]
    send, receive = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    if len(send) and (trace.end_s[send] > trace.start_s[receive]).mean() > _RENDEZVOUS:
        group[receive] = send
    else:  # Sends end without their receives, so only receives wait.
        waits_for[receive, -1] = send
    _wait_for_data(trace, waits_for)
    return group


def _paired(trace: OperationTrace, name: str, hop: int) -> tuple[IntArray, IntArray]:
    """Return the sends and receives that belong together: the n-th from and to a stage."""
    sends, receives = (np.flatnonzero(trace.are(f"{name}-{end}")) for end in ("send", "recv"))
    if not len(sends) or not len(receives):
        return sends[:0], receives[:0]
    to = (trace.stage[sends] + hop) % (int(trace.stage.max()) + 1)
    keys = [
        _numbered(np.stack([trace.step[ops], trace.pipeline[ops], stage]))
        for ops, stage in ((sends, to), (receives, trace.stage[receives]))
    ]
    number = grouped(*np.concatenate(keys, axis=1))
    _, i, j = np.intersect1d(
        number[: len(sends)], number[len(sends) :], assume_unique=True, return_indices=True
    )
    return sends[i], receives[j]


def _wait_for_data(trace: OperationTrace, waits_for: IntArray) -> None:
    """Let a forward or backward wait for what it receives, also where that came in background."""
    last_stage = np.zeros(int(trace.pipeline.max()) + 1, np.int64)
    np.maximum.at(last_stage, trace.pipeline, trace.stage)
    begins = (trace.stage == 0) & (trace.chunk == 0)
    ends = (trace.stage == last_stage[trace.pipeline]) & (trace.chunk == int(trace.chunk.max()))
    for name, compute, starts_here in (
        ("forward", FORWARD, begins),
        ("backward", BACKWARD[:2], ends),
    ):
        users = np.flatnonzero(trace.are(*compute) & ~starts_here)
        receives = np.flatnonzero(trace.are(f"{name}-recv"))
        if len(users) != len(receives):
            continue
        same = (trace.rank[users] == trace.rank[receives]) & (
            trace.step[users] == trace.step[receives]
        )
        ended_s = (trace.end_s - _overlap_s(trace))[receives]
        arrived = same & (ended_s <= trace.start_s[users])
        waits_for[users[arrived], -2] = receives[arrived]


def _numbered(rows: IntArray) -> IntArray:
    """Return the rows with one more: how often the same column came before."""
    order = np.lexsort(rows[::-1])
    ordered = rows[:, order]
    begins = np.r_[True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)]
    index = np.arange(rows.shape[1])
    number = np.empty(rows.shape[1], np.int64)
    number[order] = index - np.maximum.accumulate(np.where(begins, index, 0))
    return np.vstack([rows, number])


def _join_collectives(trace: OperationTrace, group: IntArray) -> None:
    """Give the ranks of each collective one group: all, a stage's, or a pipeline's."""
    for kind, name in enumerate(trace.kinds):
        ops = np.flatnonzero(trace.kind == kind)
        if name in _LOCAL:
            continue
        step = trace.step[ops]
        number = _numbered(np.stack([step, trace.rank[ops]]))[-1]
        nothing = np.zeros_like(step)
        for place in (nothing, trace.stage[ops], trace.pipeline[ops]):
            joined = grouped(step, number, place)
            starts, ends = (_spread(times[ops], joined) for times in (trace.start_s, trace.end_s))
            if ends < _COINCIDE * starts:
                representative = np.full(int(joined.max()) + 1, -1)
                representative[joined] = ops
                group[ops] = representative[joined]
                break


class _Barriers:
    """What the trace doesn't hold: operations that none begins before all have come to them.

    All are the ranks of a step, a stage or a pipeline; one operation may be behind several.
    """

    def __init__(self, trace: OperationTrace, start: FloatArray, ready: FloatArray) -> None:
        self.before = np.empty(0, np.int64)
        """The operation behind each rank's part of a barrier."""
        self.group = np.empty(0, np.int64)
        self.own_s = np.empty(0)
        self.ready_s = ready.copy()
        """When each operation could begin, after the barriers."""
        self._trace, self._start = trace, start
        self._least_s = 1e-3 * _spread(start, trace.step)
        for kind, name in enumerate(trace.kinds):
            ops = np.flatnonzero(trace.kind == kind)
            number = _numbered(np.stack([trace.step[ops], trace.rank[ops]]))[-1]
            if name not in (*FORWARD, *BACKWARD, *TRANSFERS, "gc") and not number.any():
                for place in (np.zeros_like(ops), trace.stage[ops], trace.pipeline[ops]):
                    for value in np.unique(place):
                        self._look(ops[place == value])

    def _look(self, ops: IntArray) -> None:
        """Add a barrier if these operations begin together, although they could have earlier."""
        step = self._trace.step[ops]
        before, at = _spread(self.ready_s[ops], step), _spread(self._start[ops], step)
        if at >= _COINCIDE * before or before <= self._least_s:
            return
        count = int(self._trace.step.max()) + 1
        first, last = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(first, step, self._start[ops])
        np.maximum.at(last, step, self.ready_s[ops])
        own = np.maximum(first - last, 0.0)
        self.ready_s[ops] = (last + own)[step]
        offset = int(self.group.max()) + 1 if len(self.group) else 0
        self.before = np.r_[self.before, ops]
        self.group = np.r_[self.group, offset + step]
        self.own_s = np.r_[self.own_s, own[step]]


def _spread(times: FloatArray, group: IntArray) -> float:
    """Return the sum over groups of the latest time less the earliest."""
    count = int(group.max()) + 1
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, group, times)
    np.maximum.at(last, group, times)
    return float((last - first)[np.isfinite(first)].sum())
