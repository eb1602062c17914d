"""Assign an iteration's samples under the best of the candidate plans (Hydraulis §4, steps 1-4).

For every candidate that can hold the sequences, these are dispatched to its pipelines and packed;
the plan with the smallest estimated latency runs. A candidate is dropped as soon as its lower
bound, or its dispatch before packing, takes longer than the best so far.

A planning process runs `serve` of this module: it answers one request after the other with a text,
and keeps nothing between them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.dispatch import Dispatch, dispatch, latency_bound_s
from lightning_hetero.assign.pack import pack
from lightning_hetero.assign.pipeline_cost import (
    CostTable,
    PipelineCost,
    as_lengths,
    microbatch_times_s,
)
from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.assignment import Assignment
from lightning_hetero.core.errors import AssignmentError, BatchError
from lightning_hetero.core.process.answering import answer_questions

__all__ = [
    "AssignmentRequest",
    "assign_iteration",
    "plan_text",
    "read_assignment",
    "serve",
]


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
    """Pack a dispatch; its latency is by `schedule_s`, because Eq. 1 overestimates it."""
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
        found = assign_iteration(request.lengths, request.candidates).to_dict()
    except AssignmentError as error:
        found = {"error": str(error)}
    return json.dumps({"checksum": request.checksum, **found})


def read_assignment(text: str, request: AssignmentRequest) -> Assignment:
    """Return the assignment in a text of `plan_text`.

    Raises:
        BatchError: The text is for other samples than the request's.
        AssignmentError: The text holds an error instead of an assignment.
    """
    data = json.loads(text)
    if data["checksum"] != request.checksum:
        raise BatchError(
            "Ranks have drawn different samples for the same iteration, so some would be lost and "
            "others come twice. Give every rank the same dataset and lengths, and seed a stream's "
            "own shuffle alike on all of them."
        )
    if "error" in data:
        raise AssignmentError(data["error"])
    return Assignment.from_dict(data)


def serve() -> None:
    """Answer requests until standard input ends; an `AnsweringProcess` runs this."""
    answer_questions(plan_text)
