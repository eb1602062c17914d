"""What happens where gradients are no numbers: all ranks know of it, and none steps on them.

Each rank looks at the gradients that it made, before they travel, and says so with its sums.
"""

import warnings
from collections.abc import Iterable
from enum import StrEnum

import torch
from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan, RankPlace

__all__ = ["NonfiniteGradients", "answer_nonfinite", "describe_ranks", "has_nonfinite"]


class NonfiniteGradients(StrEnum):
    """What an iteration does whose gradients aren't finite."""

    ERROR = "error"
    SKIP = "skip"


def has_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if any element is NaN or infinite, else 0.0, without waiting for the device."""
    # A sum keeps what isn't finite, and reads each tensor once, writing nothing.
    sums = [_real(tensor).sum(dtype=torch.float32) for tensor in tensors]
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.isfinite(torch.stack(sums)).all().logical_not().double()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def answer_nonfinite(found: str, answer: NonfiniteGradients) -> None:
    """Raise or warn, as the user chose; called by every rank alike.

    Raises:
        StepError: The answer is an error.
    """
    if answer is NonfiniteGradients.ERROR:
        raise StepError(
            f"Gradients of {found} Nothing was changed by them. Look for a division by zero or an "
            'overflow in the loss or the layers; HeteroStrategy(nonfinite_gradients="skip") leaves '
            "such iterations out."
        )
    warnings.warn(f"Gradients of {found} This iteration is left out.", stacklevel=2)


def describe_ranks(global_ranks: Iterable[int], plan: ParallelPlan) -> str:
    """Name ranks with gradients that aren't finite: of each pipeline those furthest behind.

    What isn't finite there goes on to all stages before.
    """
    furthest: dict[int, RankPlace] = {}
    names: dict[int, int] = {}
    for global_rank in global_ranks:
        place = plan.place(global_rank)
        assert place is not None
        found = furthest.get(place.pipeline_index)
        if found is None or found.stage_index < place.stage_index:
            furthest[place.pipeline_index], names[place.pipeline_index] = place, global_rank
    return ", ".join(
        f"rank {names[index]} (pipeline {index}, stage {place.stage_index})"
        for index, place in furthest.items()
    )
