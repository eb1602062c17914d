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

from lightning_hetero.assign.dispatch import Dispatch, dispatch, fast_lower_bound_s
from lightning_hetero.assign.pack import Packing, pack_all
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
    "pack_dispatch",
    "plan_text",
    "read_assignment",
    "serve",
]


@dataclass(frozen=True, kw_only=True)
class _Packed:
    dispatch: Dispatch
    packings: tuple[Packing, ...]
    latency_s: float


def assign_iteration(
    lengths: ArrayLike,
    candidates: Sequence[Sequence[PipelineCost]],
    *,
    num_trials: int = 100,
    seed: int = 0,
) -> Assignment:
    """Return the best candidate plan and its micro-batches; the same for the same arguments.

    Args:
        lengths: Tokens of each sample of the iteration.
        candidates: For each plan its pipelines' costs.
        num_trials: Orders tried in dispatching.
        seed: Seed of those orders.

    Raises:
        AssignmentError: No candidate has a pipeline for the longest sample, or there is none.
    """
    sizes = as_lengths(lengths)
    bounds_s = [_bound_s(sizes, pipelines) for pipelines in candidates]
    best: _Packed | None = None
    best_index = -1
    # Promising plans first, so that the others are dropped early.
    for index in sorted(range(len(candidates)), key=bounds_s.__getitem__):
        if bounds_s[index] == np.inf or (best and bounds_s[index] >= best.latency_s):
            break
        pipelines = candidates[index]
        found = dispatch(sizes, pipelines, num_trials, seed, tight_bound=False)
        # Packing only adds to a dispatch's latency.
        if best and found.latency_s >= best.latency_s:
            continue
        packed = _packed(sizes, found, pipelines)
        if best is None or packed.latency_s < best.latency_s:
            best, best_index = packed, index
    if best is None:
        limits = [max((p.max_len for p in plan), default=0) for plan in candidates]
        raise AssignmentError(
            f"The longest sample has {int(sizes.max(initial=0))} tokens but the roomiest pipelines "
            f"of {len(candidates)} candidate plans take {limits}. Cut or split samples, or add a "
            "plan with more memory per token (more tensor parallelism or stages)."
        )
    return Assignment(
        plan_index=best_index,
        microbatches=_sample_indices(best),
        latency_s=best.latency_s,
        lower_bound_s=min(*bounds_s, best.latency_s),
    )


def _packed(sizes: IntArray, dispatched: Dispatch, pipelines: Sequence[PipelineCost]) -> _Packed:
    """Pack a dispatch; its latency is by `schedule_s`, because Eq. 1 overestimates it."""
    packings = pack_dispatch(sizes, dispatched, pipelines)
    pipeline_of = np.array(dispatched.pipeline_of, dtype=np.int64)
    ends_s = [
        cost.schedule_s(microbatch_times_s(sizes[pipeline_of == j], packing.microbatches, cost))
        for j, (cost, packing) in enumerate(zip(pipelines, packings, strict=True))
    ]
    return _Packed(dispatch=dispatched, packings=packings, latency_s=max(ends_s))


def pack_dispatch(
    lengths: IntArray, dispatched: Dispatch, pipelines: Sequence[PipelineCost]
) -> tuple[Packing, ...]:
    """Pack every pipeline's sequences; indices in the packings count within the pipeline."""
    pipeline_of = np.array(dispatched.pipeline_of, dtype=np.int64)
    return pack_all([lengths[pipeline_of == j] for j in range(len(pipelines))], pipelines)


def _bound_s(sizes: IntArray, pipelines: Sequence[PipelineCost]) -> float:
    """Return the fast lower bound of a plan, infinite if it can't hold the longest sequence."""
    if not pipelines or int(sizes.max(initial=0)) > max(p.max_len for p in pipelines):
        return float("inf")
    table = CostTable.of(pipelines)
    return fast_lower_bound_s(sizes, table.fitting_times_s(sizes), table)


def _sample_indices(packed: _Packed) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return each pipeline's micro-batches with indices of the iteration's samples."""
    pipeline_of = np.array(packed.dispatch.pipeline_of, dtype=np.int64)
    result = []
    for index, packing in enumerate(packed.packings):
        members = np.flatnonzero(pipeline_of == index)
        result.append(tuple(tuple(members[list(batch)].tolist()) for batch in packing.microbatches))
    return tuple(result)


@dataclass(frozen=True, kw_only=True)
class AssignmentRequest:
    """The arguments of `assign_iteration`."""

    lengths: IntArray
    """Tokens of each sample of the iteration."""
    candidates: tuple[tuple[PipelineCost, ...], ...]
    """For each candidate plan its pipelines' costs."""
    num_trials: int = 100
    """Orders tried in dispatching."""
    seed: int = 0
    """Seed of those orders."""
    checksum: int = 0
    """Checksum of the samples; `read_assignment` refuses an assignment of others."""


def plan_text(request: AssignmentRequest) -> str:
    """Return the assignment, or the error if there is none, as JSON; the same on every machine."""
    try:
        found = assign_iteration(
            request.lengths,
            request.candidates,
            num_trials=request.num_trials,
            seed=request.seed,
        ).to_dict()
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
