"""Find what each operation of a trace waited for, to replay the trace with other durations.

On each rank an operation waits for the last one that had ended before it. A send and its receive
end together, and so does a collective on all its ranks. An operation's *own* time begins when the
last of its ranks has started; before that, ranks wait. Which ranks take part in a collective
follows from the times: they end together although they started at different times. A barrier that
isn't in the trace is recognised, too: operations start together although the previous ones ended at
different times.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.simulator.operations import OperationGraph, propagate_operations
from lightning_hetero.straggler.traces import OperationTrace, grouped

FORWARD = ("forward-compute",)
"""Kinds of operations that compute forwards."""
BACKWARD = ("backward-compute", "backward-input", "backward-weight")
"""Kinds of operations that compute backwards, whole or in parts."""
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
"""Kinds of operations that move activations and their gradients between stages."""
_LOCAL = ("gc", *FORWARD, *BACKWARD, *TRANSFERS)
_ROUNDING_S, _MOST_OVERLAP_S, _OVERLAP = 2e-5, 1e-3, 0.1
"""Clocks of streams differ a little. An operation counts as ended before another one begins if the
overlap is at most a tenth of its own time and at most a millisecond."""
_DEPTH = 8
"""How many earlier operations are checked to find the last that had ended."""
_RENDEZVOUS = 0.99
"""Sends wait for their receives if more than this share of them end after the receive has begun."""
_COINCIDE = 0.2
"""Operations end together if their ends' spread is below this share of their starts' spread."""
_MOST_EARLY = 0.05
"""So large a share of a step may clocks differ, as far as messages show it."""
_AS_WELL = 4.0
"""Ends of more ranks coincide as well as those of fewer if they spread up to so many times more."""


@dataclass(frozen=True)
class Replay:
    """A trace as a graph, with each operation's own time and the gap before it."""

    trace: OperationTrace
    """The trace, with the barriers that it lacks."""
    graph: OperationGraph
    own_s: FloatArray
    """Times without waiting for peers."""
    gap_s: FloatArray
    only_waits: IntArray
    """Receives that only wait for a send: the link's time is the send's."""

    @classmethod
    def build(cls, trace: OperationTrace) -> "Replay":
        """Return the graph of a trace.

        Raises:
            ConfigurationError: Operations wait for each other in a cycle.
        """
        ended_s = trace.end_s - _ROUNDING_S
        ended_s -= np.minimum(_MOST_OVERLAP_S, _OVERLAP * (trace.end_s - trace.start_s))
        group, sent = _pair_transfers(trace)
        batch = _batches(trace)
        before, computed = _earlier_on_rank(trace, ended_s)
        waits_for = np.stack(
            [*_of_batch(batch, before), computed, _received(trace, ended_s), sent], axis=1
        )
        _join_collectives(trace, group)
        step_start = _extremes(trace.start_s, trace.step)[0]
        start, end = (times - step_start[trace.step] for times in (trace.start_s, trace.end_s))
        # A receive that only waits effectively begins when the send has ended.
        start = np.minimum(np.maximum(start, np.r_[end, 0.0][sent]), end)
        end = _ends_of_pairs(trace, group, batch, start, end)
        ready = np.r_[end, 0.0][waits_for].max(axis=1)
        # A receive can do nothing before its send begins. So it waits for the send, whatever its
        # recorded start.
        receives = np.flatnonzero(trace.are(*TRANSFERS[1::2]))
        is_idle = ready[receives] <= start[group[receives]]
        start[receives] = np.where(is_idle, ready[receives], start[receives])
        barriers = _Barriers(trace, start, ready)
        behind = barriers.before
        # An operation behind several barriers passes them one after another.
        waits_for = np.r_[waits_for, np.full((len(behind), waits_for.shape[1]), -1)]
        for barrier, op in enumerate(behind.tolist(), start=len(trace)):
            waits_for[barrier] = waits_for[op]
            waits_for[op] = -1
            waits_for[op, 0] = barrier
        try:
            graph = OperationGraph.build(waits_for, np.r_[group, len(trace) + barriers.group])
        except ValueError as error:
            raise ConfigurationError(f"The trace can't be replayed: {error}.") from error
        last_start = _extremes(start, group)[1]
        return cls(
            trace=trace.with_barriers(behind),
            graph=graph,
            own_s=np.r_[np.maximum(end - last_start[group], 0.0), barriers.own_s],
            gap_s=np.r_[np.maximum(start - barriers.ready_s, 0.0), np.zeros(len(behind))],
            only_waits=np.flatnonzero(sent >= 0),
        )

    def step_s(self, own_s: FloatArray, gap_s: FloatArray) -> FloatArray:
        """Return the seconds of each step with these durations."""
        ends = propagate_operations(self.graph, own_s, gap_s)
        return _extremes(ends, self.trace.step)[1]

    def observed_s(self) -> FloatArray:
        """Return the seconds of each step as recorded."""
        step, end_s = self.trace.step, self.trace.end_s
        seconds: FloatArray = _extremes(end_s, step)[1] - _extremes(self.trace.start_s, step)[0]
        return seconds


def _last_ended(
    trace: OperationTrace, ended_s: FloatArray, ops: IntArray, among: IntArray
) -> IntArray:
    """Return the last of `among` that had ended on the rank when each of `ops` began; -1: none."""
    found, place = np.full(len(ops), -1), np.searchsorted(among, ops)
    for back in range(1, min(_DEPTH, len(among)) + 1):
        other = among[np.maximum(place - back, 0)]
        fits = (place >= back) & (found < 0) & (ended_s[other] <= trace.start_s[ops])
        fits &= (trace.rank[other] == trace.rank[ops]) & (trace.step[other] == trace.step[ops])
        found[fits] = other[fits]
    return found


def _earlier_on_rank(trace: OperationTrace, ended_s: FloatArray) -> tuple[IntArray, IntArray]:
    """Return the operation that each waits for on its rank, and for a send the compute before it.

    Sends and receives that run while their rank computes wait only for each other.
    """
    computes = np.flatnonzero(trace.are(*FORWARD, *BACKWARD))
    stream, before = np.zeros(len(trace), np.int64), np.full((2, len(trace)), -1)
    for number, names in enumerate((TRANSFERS[::2], TRANSFERS[1::2]), start=1):
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
    for number in range(3):
        ops = np.flatnonzero(stream == number)
        before[0, ops] = _last_ended(trace, ended_s, ops, ops)
        if number == 1:
            before[1, ops] = _last_ended(trace, ended_s, ops, computes)
    return before[0], before[1]


def _pair_transfers(trace: OperationTrace) -> tuple[IntArray, IntArray]:
    """Return the group of each operation, and the send that a receive only waits for, or -1."""
    group, sent = np.arange(len(trace)), np.full(len(trace), -1)
    pairs = [_paired(trace, name, hop) for name, hop in (("forward", 1), ("backward", -1))]
    send, receive = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    _check_clocks(trace, send, receive)
    if len(send) and (trace.end_s[send] > trace.start_s[receive]).mean() > _RENDEZVOUS:
        group[receive] = send
    else:  # Sends end without their receives, so only receives wait.
        sent[receive] = send
    return group, sent


def _check_clocks(trace: OperationTrace, send: IntArray, receive: IntArray) -> None:
    """Refuse a trace in which messages arrive before they are sent.

    Raises:
        ConfigurationError: It is one.
    """
    early_s = trace.start_s[send] - trace.end_s[receive]
    first, last = _extremes(trace.start_s, trace.step)[0], _extremes(trace.end_s, trace.step)[1]
    if len(send) and (worst_s := float(early_s.max())) > _MOST_EARLY * (last - first).mean():
        one, other = (trace.rank[ops[int(early_s.argmax())]] for ops in (send, receive))
        raise ConfigurationError(
            f"Messages of rank {one} to rank {other} arrive up to {worst_s:.3g} s before they are "
            "sent, so the ranks' clocks differ. Give start_ts of all ranks by one clock."
        )


def _paired(trace: OperationTrace, name: str, hop: int) -> tuple[IntArray, IntArray]:
    """Return the sends and receives that belong together: the n-th from and to a stage."""
    sends, receives = (np.flatnonzero(trace.are(f"{name}-{end}")) for end in ("send", "recv"))
    to = (trace.stage[sends] + hop) % (int(trace.stage.max()) + 1)
    keys = []
    for ops, stage in ((sends, to), (receives, trace.stage[receives])):
        place = trace.step[ops], trace.pipeline[ops], stage
        keys.append(np.stack([*place, _occurrence(*place)]))
    number = grouped(*np.concatenate(keys, axis=1))
    _, i, j = np.intersect1d(
        number[: len(sends)], number[len(sends) :], assume_unique=True, return_indices=True
    )
    return sends[i], receives[j]


def _batches(trace: OperationTrace) -> IntArray:
    """Return a number for each operation; sends and receives that were issued together share it."""
    same, transfers = np.zeros(len(trace), bool), trace.are(*TRANSFERS)
    same[1:] = transfers[1:] & transfers[:-1]
    for column in (trace.step, trace.rank, trace.start_s, trace.end_s):
        same[1:] &= column[1:] == column[:-1]
    return np.cumsum(~same)


def _of_batch(batch: IntArray, before: IntArray) -> list[IntArray]:
    """Return each operation's predecessor and, in further columns, what was issued with it."""
    columns = [before]
    for back in range(1, min(_DEPTH, int(np.bincount(batch).max()))):
        other = np.maximum(before - back, 0)
        with_it = (before >= back) & (batch[other] == batch[before])
        columns.append(np.where(with_it, other, -1))
    return columns


def _ends_of_pairs(
    trace: OperationTrace, group: IntArray, batch: IntArray, start: FloatArray, end: FloatArray
) -> FloatArray:
    """Return when each send and its receive had ended, although their batches ended later.

    All of a batch seem to end with its last. What began last among those that may have been the
    last takes all the time; others take what is usual between their stages, if that is less.
    """
    pairs = np.flatnonzero((group != np.arange(len(trace))) & trace.are(*TRANSFERS))
    if not len(pairs) or int(np.bincount(batch).max()) < 2:
        return end
    ops = np.r_[pairs, group[pairs]]
    begins, ends = np.zeros(len(trace)), end.copy()
    begins[ops] = np.tile(np.maximum(start[pairs], start[group[pairs]]), 2)
    ends[ops] = np.tile(np.minimum(end[pairs], end[group[pairs]]), 2)
    may_be_last = ends[ops] >= end[ops] - _ROUNDING_S
    latest = _extremes(np.where(may_be_last, begins[ops], -np.inf), batch[ops])[1]
    is_last = may_be_last & (begins[ops] >= latest[batch[ops]] - _ROUNDING_S)
    known = np.tile(is_last[: len(pairs)] | is_last[len(pairs) :], 2)
    place = grouped(trace.kind[ops], trace.stage[ops])
    usual_s = np.full(int(place.max()) + 1, np.inf)
    for index in np.unique(place[known]):
        usual_s[index] = np.median((ends - begins)[ops[known & (place == index)]])
    capped = np.minimum(ends[ops], begins[ops] + usual_s[place])
    ends[ops] = np.where(known, ends[ops], capped)
    # Both ends of a pair are in `ops`, of different kinds.
    ends[ops] = np.tile(np.minimum(ends[pairs], ends[group[pairs]]), 2)
    return ends


def _received(trace: OperationTrace, ended_s: FloatArray) -> IntArray:
    """Return what each forward or backward received, also if it came in the background; or -1."""
    found = np.full(len(trace), -1)
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
        if len(users) == len(receives):
            arrived = trace.rank[users] == trace.rank[receives]
            arrived &= trace.step[users] == trace.step[receives]
            arrived &= ended_s[receives] <= trace.start_s[users]
            found[users[arrived]] = receives[arrived]
    return found


def _occurrence(*keys: IntArray) -> IntArray:
    """Return, for each element, how many earlier elements have the same keys."""
    same = grouped(*keys)
    order, index = np.argsort(same, kind="stable"), np.arange(len(same))
    begins = np.r_[True, np.diff(same[order]) != 0][: len(same)]
    number = np.empty_like(same)
    number[order] = index - np.maximum.accumulate(np.where(begins, index, 0))
    return number


def _join_collectives(trace: OperationTrace, group: IntArray) -> None:
    """Give the ranks of each collective one group: all, a stage's, or a pipeline's."""
    for kind, name in enumerate(trace.kinds):
        ops = np.flatnonzero(trace.kind == kind)
        if name in (*_LOCAL, "optimizer"):
            continue
        step = trace.step[ops]
        number = _occurrence(step, trace.rank[ops])
        possible = []
        for place in (np.zeros_like(ops), trace.stage[ops], trace.pipeline[ops]):
            joined = grouped(step, number, place)
            starts, ends = (_spread(times[ops], joined) for times in (trace.start_s, trace.end_s))
            if ends < _COINCIDE * starts:
                possible.append((ends / (int(joined.max()) + 1), joined))
        least = _ROUNDING_S + _AS_WELL * min((ends for ends, _ in possible), default=0.0)
        for joined in [joined for ends, joined in possible if ends <= least][:1]:
            representative = np.full(int(joined.max()) + 1, -1)
            representative[joined] = ops
            group[ops] = representative[joined]


class _Barriers:
    """Barriers that ran but aren't in the trace.

    No operation behind one begins before all ranks have reached it.

    "All ranks" are those of a step, a stage or a pipeline. An operation may be behind several
    barriers.
    """

    def __init__(self, trace: OperationTrace, start: FloatArray, ready_s: FloatArray) -> None:
        self.before = np.empty(0, np.int64)
        """The operation behind each rank's part of a barrier."""
        self.group = np.empty(0, np.int64)
        self.own_s = np.empty(0)
        self.ready_s = ready_s
        """When each operation could begin, after the barriers."""
        self._trace, self._start = trace, start
        self._least_s = 1e-3 * _spread(start, trace.step)
        for kind, name in enumerate(trace.kinds):
            ops = np.flatnonzero(trace.kind == kind)
            if name not in _LOCAL and not _occurrence(trace.step[ops], trace.rank[ops]).any():
                for place in (np.zeros_like(ops), trace.stage[ops], trace.pipeline[ops]):
                    for value in np.unique(place):
                        self._look(ops[place == value])

    def _look(self, ops: IntArray) -> None:
        """Add a barrier if these operations begin together, although they could have earlier."""
        step = self._trace.step[ops]
        before, at = _spread(self.ready_s[ops], step), _spread(self._start[ops], step)
        if at >= _COINCIDE * before or before <= self._least_s:
            return
        first, last = _extremes(self._start[ops], step)[0], _extremes(self.ready_s[ops], step)[1]
        own = np.maximum(first - last, 0.0)
        self.ready_s[ops] = (last + own)[step]
        offset = int(self.group.max()) + 1 if len(self.group) else 0
        self.before = np.r_[self.before, ops]
        self.group = np.r_[self.group, offset + step]
        self.own_s = np.r_[self.own_s, own[step]]


def _spread(times: FloatArray, group: IntArray) -> float:
    """Return the sum over groups of the latest time minus the earliest."""
    first, last = _extremes(times, group)
    return float((last - first)[np.isfinite(first)].sum())


def _extremes(times: FloatArray, group: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the earliest and the latest time of each group; infinite for empty groups."""
    count = int(group.max()) + 1
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, group, times)
    np.maximum.at(last, group, times)
    return first, last
