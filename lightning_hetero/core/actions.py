"""A pipeline schedule as data: which pass of which micro-batch a stage runs, and when.

The runtime executes these lists, the simulator times them and tests check laws on them. 1F1B is
PipeDream-flush (Narayanan et al. 2021): a warm-up of forwards, then one forward and one backward in
turn, then a cool-down of backwards, so that a stage never holds the activations of more than
`num_stages - stage_index` micro-batches. A backward may be split in two, as in Zero Bubble (Qi et
al. 2023): the gradient of the stage's input, for which the stage before waits, and the gradients of
its weights, for which nobody waits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

__all__ = [
    "MAX_KEPT_SENDS",
    "Action",
    "ActionKind",
    "most_held",
    "schedule_1f1b",
    "schedule_forward",
]

MAX_KEPT_SENDS = 2
"""Most unfinished sends to a neighbouring stage in forward-only passes."""


class ActionKind(StrEnum):
    """The passes of a micro-batch through a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: INPUT, then WEIGHT."""
    INPUT = "I"
    """The gradient of the stage's input."""
    WEIGHT = "W"
    """The gradients of the stage's weights, as far as they can wait."""


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


def most_held(actions: Iterable[Action]) -> int:
    """Return the most micro-batches between their forward and the gradient of their input."""
    held = most = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            held += 1
            most = max(most, held)
        elif action.kind is not ActionKind.WEIGHT:
            held -= 1
    return most
