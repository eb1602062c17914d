"""Assign iterations in another process: requests in, texts out.

A planning process is this module run by `serve`: it answers one request after the other and knows
nothing of earlier ones.
"""

import json
from dataclasses import dataclass

from lightning_hetero.assign.iteration import assign_iteration
from lightning_hetero.assign.pipeline_cost import PipelineCost
from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.assignment import Assignment
from lightning_hetero.core.errors import AssignmentError, BatchError
from lightning_hetero.core.process.answering import answer_questions

__all__ = ["AssignmentRequest", "plan_text", "read_assignment", "serve"]


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
    """Of the samples: who asks for others reads no assignment of these."""


def plan_text(request: AssignmentRequest) -> str:
    """Return the assignment as a text, or why there is none: the same on every machine."""
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
    """Return the assignment of a text.

    Raises:
        BatchError: It was made for other samples than the request's.
        AssignmentError: It says why there is none.
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
    """Answer requests, as an `AnsweringProcess` does."""
    answer_questions(plan_text)
