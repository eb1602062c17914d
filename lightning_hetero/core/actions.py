"""Describe an iteration's work as data: the passes of each stage, the samples of each micro-batch.

A schedule is a list of actions for each stage: the runtime executes it, the simulator times it.
1F1B is PipeDream-flush (Narayanan et al. 2021): a warm-up of forwards, then one forward and one
backward in turn, then a cool-down of backwards. So a stage never holds the activations of more than
`num_stages - stage_index` micro-batches. Example: stage 0 of 2 runs F0 F1 B0 F2 B1 B2, stage 1 runs
F0 B0 F1 B1 F2 B2. A backward may be split in two, as in Zero Bubble (Qi et al. 2023): the gradient
of the stage's input, for which the previous stage waits, and the gradients of its weights, for
which no stage waits.

An `Assignment` says which plan an iteration runs and which samples each micro-batch has. Planning
processes make assignments ahead of time and pass them on as JSON.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from lightning_hetero.core.reading import readable

MAX_KEPT_SENDS = 2
"""Largest number of unfinished sends to the next stage in forward-only passes."""


class ActionKind(StrEnum):
    """The passes of a micro-batch through a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: INPUT, then WEIGHT."""
    INPUT = "I"
    """The gradient of the stage's input."""
    WEIGHT = "W"
    """The gradients of the stage's weights that can be computed later."""


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of a micro-batch on a stage; `F3`: forward of micro-batch 3."""

    kind: ActionKind
    stage_index: int
    microbatch_index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch_index}"


@lru_cache(maxsize=256)
def schedule_1f1b(
    *, stage_index: int, num_stages: int, num_microbatches: int
) -> tuple[Action, ...]:
    """Return the 1F1B actions of a stage in the order in which it runs them."""
    num_warmup = min(num_stages - stage_index - 1, num_microbatches)

    def act(kind: ActionKind, microbatch_index: int) -> Action:
        return Action(kind, stage_index, microbatch_index)

    actions = [act(ActionKind.FORWARD, m) for m in range(num_warmup)]
    for m in range(num_microbatches - num_warmup):
        actions.append(act(ActionKind.FORWARD, m + num_warmup))
        actions.append(act(ActionKind.BACKWARD, m))
    actions += [
        act(ActionKind.BACKWARD, m) for m in range(num_microbatches - num_warmup, num_microbatches)
    ]
    return tuple(actions)


@lru_cache(maxsize=256)
def schedule_forward(*, stage_index: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of a stage that only runs forward: validation, test, prediction."""
    return tuple(Action(ActionKind.FORWARD, stage_index, m) for m in range(num_microbatches))


def most_held(actions: Iterable[Action]) -> dict[int, int]:
    """Return for each stage the largest number of micro-batches between F and I (or B)."""
    held: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for action in actions:
        stage = action.stage_index
        if action.kind is ActionKind.FORWARD:
            held[stage] += 1
            most[stage] = max(most[stage], held[stage])
        elif action.kind is not ActionKind.WEIGHT:
            held[stage] -= 1
    return dict(most)


@readable
class Assignment:
    """The plan and the micro-batches of one iteration."""

    plan_index: int
    """Index of the plan among the candidates."""
    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """For each pipeline its micro-batches, each as the indices of its samples: ((0, 2), (1,)) is
    two micro-batches of one pipeline."""
    latency_s: float
    """Estimated seconds of the iteration's forward and backward passes."""

    @property
    def num_samples(self) -> int:
        """Number of samples in all micro-batches."""
        return sum(len(batch) for batches in self.microbatches for batch in batches)
