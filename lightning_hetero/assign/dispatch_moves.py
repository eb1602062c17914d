"""Improve a dispatch by moves and swaps that shorten the pipeline that ends last.

A step considers every move of one of that pipeline's sequences to another pipeline, and every swap
of one with a sequence of another. It takes the one after which the later of the two pipelines ends
first. If there are very many swaps, those with the pipelines that end first are tried first. Steps
end when none helps or the budget is spent, so the result is never worse than the start. With U
sequences on that pipeline, B in all and D pipelines, a step costs about 40 NumPy calls on [U, B]
and [U, D] arrays.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetero.assign.pipeline_cost import UNFIT_S, CostTable, KindTimes
from lightning_hetero.core.arrays import FloatArray, IntArray

__all__ = ["improve_dispatch"]

_GAIN = 1e-9  # Relative gain below which a step counts as none.
_MAX_STEPS = 1000
_MAX_SWAPS = 50_000  # Swaps that one step considers at first; 10 times as many if none helps.


@dataclass(kw_only=True)
class _State:
    """The loads of all pipelines under the current dispatch."""

    lengths: IntArray
    times: KindTimes
    table: CostTable
    pipeline_of: IntArray
    work_s: FloatArray
    longest_s: FloatArray
    tokens: FloatArray
    rest_s: FloatArray
    """[B] longest time on a sequence's pipeline if the sequence left it."""
    own_s: FloatArray
    """[B] time of each sequence on its pipeline."""
    num_tried: int = 0
    """Moves and swaps considered so far."""

    @classmethod
    def of(
        cls, lengths: IntArray, times: KindTimes, table: CostTable, pipeline_of: IntArray
    ) -> "_State":
        num_pipelines = len(times.kind_of)
        state = cls(
            lengths=lengths,
            times=times,
            table=table,
            pipeline_of=pipeline_of.copy(),
            work_s=np.zeros(num_pipelines),
            longest_s=np.zeros(num_pipelines),
            tokens=np.zeros(num_pipelines),
            rest_s=np.zeros(len(lengths)),
            own_s=np.zeros(len(lengths)),
        )
        for pipeline in range(num_pipelines):
            state.refresh(pipeline)
        return state

    def refresh(self, pipeline: int) -> None:
        """Recompute one pipeline's loads after its sequences changed."""
        members = np.flatnonzero(self.pipeline_of == pipeline)
        own_s = self.times.of(members, pipeline)
        self.own_s[members] = own_s
        self.work_s[pipeline] = own_s.sum()
        self.tokens[pipeline] = self.lengths[members].sum()
        self.longest_s[pipeline] = own_s.max(initial=0.0)
        if len(members):
            first = int(own_s.argmax())
            others = np.delete(own_s, first)
            self.rest_s[members] = own_s[first]
            self.rest_s[members[first]] = others.max(initial=0.0)

    def all_totals_s(self) -> FloatArray:
        return self.table.ends_s(self.work_s, self.longest_s, self.tokens)


def improve_dispatch(
    lengths: IntArray,
    times: KindTimes,
    table: CostTable,
    pipeline_of: IntArray,
    *,
    stop_at_s: float = 0.0,
    budget: int = 20_000_000,
) -> tuple[IntArray, float]:
    """Return a dispatch [B] at least as good as `pipeline_of`, and its largest Eq. 2 with c.

    Args:
        lengths: [B] tokens of each sequence.
        times: Seconds of every sequence.
        table: The D pipelines.
        pipeline_of: [B] pipeline of each sequence at the start.
        stop_at_s: A lower bound; steps end when it is reached.
        budget: Moves and swaps to consider; the step that exceeds it is the last.
    """
    state = _State.of(lengths, times, table, pipeline_of)
    totals_s = state.all_totals_s()
    for _ in range(_MAX_STEPS):
        last = int(totals_s.argmax())
        goal_s = float(totals_s[last]) * (1 - _GAIN)
        if goal_s <= stop_at_s:
            break
        if state.num_tried > budget:
            break
        touched = _best_step(state, last, goal_s, _MAX_SWAPS)
        if touched is None and state.num_tried <= budget:
            touched = _best_step(state, last, goal_s, 10 * _MAX_SWAPS)
        if touched is None:
            break
        for pipeline in (last, touched):
            state.refresh(pipeline)
        totals_s = state.all_totals_s()
    return state.pipeline_of, float(totals_s.max())


def _best_step(state: _State, last: int, goal_s: float, most_swaps: int) -> int | None:
    """Apply the best move or swap out of pipeline `last`; return the other pipeline, or None."""
    inside = np.flatnonzero(state.pipeline_of == last)
    swap_s, partners = _swap_ends_s(state, last, inside, most_swaps)
    move_s = _move_ends_s(state, last, inside)
    state.num_tried += swap_s.size + move_s.size
    best_swap = int(swap_s.argmin()) if swap_s.size else -1
    best_move = int(move_s.argmin())
    swap_best_s = float(swap_s.flat[best_swap]) if swap_s.size else UNFIT_S
    move_best_s = float(move_s.flat[best_move])
    if min(swap_best_s, move_best_s) >= goal_s:
        return None
    if swap_best_s < move_best_s:
        row, column = divmod(best_swap, swap_s.shape[1])
        partner = partners[column]
        other = int(state.pipeline_of[partner])
        state.pipeline_of[partner] = last
    else:
        row, other = divmod(best_move, move_s.shape[1])
    state.pipeline_of[inside[row]] = other
    return other


def _swap_ends_s(
    state: _State, last: int, inside: IntArray, most_swaps: int
) -> tuple[FloatArray, IntArray]:
    """Return the later end [U, B'] after swapping U sequences inside with the B' outside."""
    outside = _partners(state, last, most_swaps // max(1, len(inside)))
    there = state.pipeline_of[outside]
    own_s = state.own_s[inside, None]
    incoming_s = state.times.of(outside, last)
    delta = (state.lengths[outside] - state.lengths[inside, None]).astype(np.float64)
    here_s = state.table.ends_s(
        state.work_s[last] - own_s + incoming_s,
        np.maximum(state.rest_s[inside, None], incoming_s),
        state.tokens[last] + delta,
        last,
    )
    outgoing_s = state.times.of(inside[:, None], there)
    there_s = state.table.ends_s(
        state.work_s[there] - state.own_s[outside] + outgoing_s,
        np.maximum(state.rest_s[outside], outgoing_s),
        state.tokens[there] - delta,
        there,
    )
    return np.maximum(here_s, there_s), outside


def _partners(state: _State, last: int, most: int) -> IntArray:
    """Return sequences [B'] outside pipeline `last`: about `most`, of pipelines that end first."""
    outside = np.flatnonzero(state.pipeline_of != last).astype(np.int64)
    if len(outside) <= most:
        return outside
    order = np.argsort(state.all_totals_s(), kind="stable")
    sizes = np.bincount(state.pipeline_of, minlength=len(order))[order]
    num_kept = int(np.searchsorted(np.cumsum(sizes), most)) + 1
    is_kept = np.zeros(len(order), dtype=np.bool_)
    is_kept[order[:num_kept]] = True
    kept: IntArray = outside[is_kept[state.pipeline_of[outside]]]
    return kept


def _move_ends_s(state: _State, last: int, inside: IntArray) -> FloatArray:
    """Return the later end [U, D] after moving each of U sequences to each other pipeline."""
    lengths = state.lengths[inside].astype(np.float64)
    here_s = state.table.ends_s(
        state.work_s[last] - state.own_s[inside],
        state.rest_s[inside],
        state.tokens[last] - lengths,
        last,
    )
    moved_s = state.times.of(inside[:, None], slice(None))
    there_s = state.table.ends_s(
        state.work_s + moved_s,
        np.maximum(state.longest_s, moved_s),
        state.tokens + lengths[:, None],
    )
    there_s[:, last] = UNFIT_S
    return np.maximum(here_s[:, None], there_s)
