"""Assign an iteration's samples under the best of the candidate plans (Hydraulis §4, steps 1-4).

For every candidate plan that has room for the sequences, these are dispatched to its pipelines and
packed; the plan with the smallest estimated latency runs. A candidate is dropped as soon as its
lower bound, or its dispatch before packing, takes longer than the best so far.

Packing (§6.1, Eq. 1, Appendix C) minimises `(max_j Σ_{i in j} T(l_i) + c)·(PP - 1 + V)` over the
number V of micro-batches and their contents, with at most MaxLen tokens in each. V runs from
`⌈Σl / MaxLen⌉` to `Σl / UtilLen`, at least to `2·⌈Σl / min(MaxLen, KeptLen)⌉ - 1`, with which any
order of filling stays below these lengths, and at most to the number of sequences. Of up to 7
sequences all partitions are tried. Of more, sequences are spread for each V longest first, each
into the emptiest micro-batch with room; besides, one micro-batch is filled after the other (first
fit), which always finds room.

A planning process runs `serve` of this module: it answers each request with a text, and keeps
nothing between requests.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.dispatch import Dispatch, dispatch, latency_bound_s
from lightning_hetero.assign.pipeline_cost import (
    CostTable,
    PipelineCost,
    as_lengths,
    microbatch_times_s,
    sequence_times_s,
)
from lightning_hetero.core.actions import Assignment
from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import AssignmentError, BatchError
from lightning_hetero.core.process import answer_questions
from lightning_hetero.core.reading import build

_MOST_PARTITIONED = 7  # Sequences of which all partitions are tried: 877 of 7.


@dataclass(frozen=True, kw_only=True)
class Packing:
    """One pipeline's micro-batches and the time they take."""

    microbatches: tuple[tuple[int, ...], ...]
    """For each micro-batch the indices of its sequences, the longest one first; none is empty."""
    latency_s: float
    """Eq. 1 with c; 0 for a pipeline without sequences."""


def pack(lengths: ArrayLike, cost: PipelineCost) -> Packing:
    """Return the best packing found for a pipeline's sequences.

    Args:
        lengths: Tokens of its sequences.
        cost: The pipeline.

    Raises:
        AssignmentError: A sequence is longer than the pipeline's MaxLen.
    """
    sizes = as_lengths(lengths)
    if not len(sizes):
        return Packing(microbatches=(), latency_s=0.0)
    if int(sizes.max()) > cost.max_len:
        raise AssignmentError(
            f"Sequence {int(sizes.argmax())} has {int(sizes.max())} tokens but the pipeline takes "
            f"{cost.max_len}. Dispatch it to a roomier pipeline, or cut it."
        )
    order = np.argsort(-sizes, kind="stable")
    sizes = sizes[order]
    times_s = sequence_times_s(sizes, cost)

    def loads_s(bin_of: IntArray) -> FloatArray:
        """Return the seconds of each micro-batch, without c."""
        alone_s, tokens = (np.bincount(bin_of, weights=values) for values in (times_s, sizes))
        return alone_s * cost.stretch(tokens)

    best_of, best_s = np.zeros(0, dtype=np.int64), np.inf
    for bin_of in _packings(sizes, times_s, cost):
        found_s = loads_s(bin_of)
        latency_s = cost.latency_s(float(found_s.max()), len(found_s))
        if latency_s < best_s:
            best_of, best_s = bin_of, latency_s
    return Packing(
        microbatches=tuple(
            tuple(sorted(order[best_of == index].tolist()))
            for index in np.argsort(-loads_s(best_of), kind="stable")
        ),
        latency_s=best_s,
    )


def _packings(lengths: IntArray, times_s: FloatArray, cost: PipelineCost) -> Iterator[IntArray]:
    """Yield packings, each as the micro-batch of every sequence, none of these empty."""
    if len(lengths) <= _MOST_PARTITIONED:
        counts = microbatch_range(lengths, cost)
        for groups in _partitions(len(lengths)):
            if groups.max() + 1 in counts and np.bincount(groups, lengths).max() <= cost.max_len:
                yield groups
        return
    yield _first_fit(lengths, cost)
    for count in microbatch_range(lengths, cost):
        bin_of = _spread(lengths, times_s, count, cost.max_len)
        if bin_of is not None:
            yield bin_of


@functools.cache
def _partitions(num_items: int) -> tuple[IntArray, ...]:
    """Return all partitions, as the group of each item, numbered as the groups first appear."""
    groups: list[tuple[int, ...]] = [()]
    for _ in range(num_items):
        groups = [(*group, new) for group in groups for new in range(max(group, default=-1) + 2)]
    return tuple(np.array(group) for group in groups)


def microbatch_range(lengths: IntArray, cost: PipelineCost) -> range:
    """Return the numbers of micro-batches that are tried (Appendix C)."""
    total, count = int(lengths.sum()), len(lengths)
    fewest = max(1, -(-total // cost.max_len))
    fewest_kept = max(1, -(-total // min(cost.max_len, cost.kept_len)))
    most = max(total // cost.util_len, 2 * fewest_kept - 1)
    return range(fewest, min(most, count) + 1)


def _spread(lengths: IntArray, times_s: FloatArray, count: int, max_len: int) -> IntArray | None:
    """Return each sequence's micro-batch, the emptiest with room (LPT); None if one doesn't fit.

    There are at least as many sequences as micro-batches, so none stays empty.
    """
    loads_s, room = [0.0] * count, [max_len] * count
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    for index, (length, time_s) in enumerate(zip(lengths.tolist(), times_s.tolist(), strict=True)):
        roomy = [place for place, left in enumerate(room) if left >= length]
        if not roomy:
            return None
        chosen = min(roomy, key=loads_s.__getitem__)
        loads_s[chosen] += time_s
        room[chosen] -= length
        bin_of[index] = chosen
    return bin_of


def _first_fit(lengths: IntArray, cost: PipelineCost) -> IntArray:
    """Return each sequence's micro-batch: the first with room, longest sequences first.

    A sequence above KeptLen is alone in its micro-batch.
    """
    usual = min(cost.max_len, cost.kept_len)
    room: list[int] = []
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    for index, length in enumerate(lengths.tolist()):
        chosen = next((b for b, left in enumerate(room) if left >= length), len(room))
        if chosen == len(room):
            room.append(usual)
        room[chosen] -= length
        bin_of[index] = chosen
    return bin_of


def assign_iteration(
    lengths: ArrayLike, candidates: Sequence[Sequence[PipelineCost]]
) -> Assignment:
    """Return the best candidate plan and its micro-batches; the same for the same arguments.

    Args:
        lengths: Tokens of each sample of the iteration.
        candidates: For each plan its pipelines' costs.

    Raises:
        AssignmentError: No candidate has a pipeline for the longest sample, or there is none.
    """
    sizes = as_lengths(lengths)
    limits = [max((cost.max_len for cost in plan), default=0) for plan in candidates]
    fitting = [
        (latency_bound_s(sizes, CostTable.of(candidates[index])), index)
        for index, limit in enumerate(limits)
        if limit >= sizes.max(initial=1)
    ]
    best: Assignment | None = None
    # Promising plans first, so that the others are dropped early.
    for bound_s, index in sorted(fitting):
        if best and bound_s >= best.latency_s:
            break
        found = dispatch(sizes, candidates[index])
        # Packing only adds to a dispatch's latency.
        if best is None or found.latency_s < best.latency_s:
            packed = _packed(sizes, found, candidates[index], index)
            if best is None or packed.latency_s < best.latency_s:
                best = packed
    if best is None:
        raise AssignmentError(
            f"The longest sample has {int(sizes.max(initial=0))} tokens but the roomiest pipelines "
            f"of {len(candidates)} candidate plans take {limits}. Cut or split samples, or add a "
            "plan with more memory per token (more tensor parallelism or stages)."
        )
    return best


def _packed(
    sizes: IntArray, found: Dispatch, pipelines: Sequence[PipelineCost], plan_index: int
) -> Assignment:
    """Pack a dispatch; its latency is that of `schedule_s`, because Eq. 1 overestimates it."""
    pipeline_of = np.array(found.pipeline_of, dtype=np.int64)
    ends_s, microbatches = [], []
    for index, cost in enumerate(pipelines):
        members = np.flatnonzero(pipeline_of == index)
        own = pack(sizes[members], cost).microbatches
        ends_s.append(cost.schedule_s(microbatch_times_s(sizes[members], own, cost)))
        microbatches.append(tuple(tuple(members[list(batch)].tolist()) for batch in own))
    return Assignment(
        plan_index=plan_index, microbatches=tuple(microbatches), latency_s=max(ends_s)
    )


@dataclass(frozen=True, kw_only=True)
class AssignmentRequest:
    """The arguments of `assign_iteration`."""

    lengths: IntArray
    """Tokens of each sample of the iteration."""
    candidates: tuple[tuple[PipelineCost, ...], ...]
    """For each candidate plan its pipelines' costs."""
    checksum: int = 0
    """Checksum of the samples; `read_assignment` refuses an assignment of others."""


def plan_text(request: AssignmentRequest) -> str:
    """Return the assignment, or the error if there is none, as JSON; the same on every machine."""
    try:
        found = asdict(assign_iteration(request.lengths, request.candidates))
    except AssignmentError as error:
        found = {"error": str(error)}
    return json.dumps({"checksum": request.checksum, **found})


def read_assignment(text: str, request: AssignmentRequest) -> Assignment:
    """Return the assignment in a text of `plan_text`.

    Raises:
        BatchError: The text is for other samples than the request's.
        AssignmentError: The text is an error instead of an assignment.
    """
    data = json.loads(text)
    if data.pop("checksum") != request.checksum:
        raise BatchError(
            "Ranks have drawn different samples for the same iteration, so some would be lost and "
            "others come twice. Give every rank the same dataset and lengths, and seed a stream's "
            "own shuffle alike on all of them."
        )
    if "error" in data:
        raise AssignmentError(data["error"])
    return build(Assignment, data, "assignment", AssignmentError)


def serve() -> None:
    """Answer requests until standard input ends; an `AnsweringProcess` runs this."""
    answer_questions(plan_text)
