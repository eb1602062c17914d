"""Runs under solved schedules, as processes of the pool make them."""

from typing import Any
from unittest import mock

import numpy as np

from lightning_hetero.runtime.iteration import schedule_choice
from lightning_hetero.runtime.iteration.passes import StagePasses
from lightning_hetero.schedules import Schedule
from tests.runtime.runs import Case, Outcome, train


def train_ordered(rank: int, case: Case, schedule: str) -> tuple[Outcome, set[str], int]:
    """Train under a schedule, however little it gains.

    Returns also the kinds of the actions that ran, and the most micro-batches held at once.
    """
    kinds: set[str] = set()
    original = StagePasses.run

    def noted(passes: StagePasses, actions: Any, step: Any, **more: Any) -> None:
        kinds.update(action.kind.value for action in actions.actions)
        original(passes, actions, step, **more)

    options = (*case.options, ("schedule", schedule))
    with (
        mock.patch.object(Schedule, "least_gain", -np.inf),
        mock.patch.object(schedule_choice, "_MEASURED_ITERATIONS", 2),
        mock.patch.object(schedule_choice, "_LONG_S", 0.0),
        mock.patch.object(StagePasses, "run", noted),
    ):
        outcome = train(rank, replace_options(case, options))
    return outcome, kinds, outcome.peak_in_flight


def replace_options(case: Case, options: tuple[tuple[str, Any], ...]) -> Case:
    """Return a case with other options of the strategy."""
    return Case(**{**vars(case), "options": options})
