"""The loss of an iteration from what its ranks say of theirs."""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.reductions import NO_RATIO, Kind, check_ratios

__all__ = ["GUESSED_LOSS", "NUM_TOTALS", "IterationLoss", "no_totals", "without_sums"]

NUM_TOTALS = 5
"""Of a rank: the sums of losses (means times their targets) and of target tokens, the least and the
largest ratio of further means (see `reductions.ratio_of`), whether gradients aren't finite."""

GUESSED_LOSS = (
    "What the loss of training_step is over the samples of its batch isn't known, so micro-batches "
    "count as if it were a mean over the targets of its largest loss function, or over samples. "
    'Say what it is: HeteroStrategy(loss_reduction="mean") or "sum"; for a mean over other targets '
    "let the module have num_target_tokens(batch)."
)
"""The warning for a loss that isn't recognised."""


@dataclass(frozen=True)
class IterationLoss:
    """What all ranks know of an iteration's loss and gradients, the same on each."""

    value: Tensor
    scale: Tensor
    """What sums of gradients are multiplied by."""
    nonfinite_ranks: tuple[int, ...]
    """Those that made gradients that aren't finite."""
    is_guessed: bool
    """Whether some rank didn't know how its losses count."""

    @classmethod
    def of(cls, totals: Tensor, kinds: Set[Kind], *, is_cut: bool) -> "IterationLoss":
        """Return what the ranks' totals make, (num_ranks, NUM_TOTALS) or more.

        Args:
            totals: What each rank says.
            kinds: What losses were, of all ranks.
            is_cut: Whether the iteration may have several micro-batches.

        Raises:
            StepError: The losses of micro-batches don't go together.
        """
        if is_cut and (Kind.MIXED in kinds or (Kind.SUM in kinds and len(kinds) > 1)):
            raise StepError(
                "The loss is a sum over samples and something else, in one micro-batch or from one "
                "to another, so no weight of micro-batches gives what one device would. Return a "
                "sum or a mean, or say what it is: "
                'HeteroStrategy(loss_reduction="mean") or "sum".'
            )
        check_ratios(totals[:, 2], totals[:, 3], "loss")
        loss, weight = totals[:, :2].sum(0)
        broken = tuple(totals[:, NUM_TOTALS - 1].nonzero().flatten().tolist())
        if Kind.SUM in kinds:
            return cls(loss.float(), torch.ones_like(loss), broken, is_guessed=False)
        scale = torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))
        return cls((loss / weight).float(), scale, broken, is_guessed=Kind.UNKNOWN in kinds)


def no_totals(device: torch.device) -> Tensor:
    """Return the totals of a rank that makes no losses."""
    return torch.tensor([0.0, 0.0, *NO_RATIO, 0.0], dtype=torch.float64, device=device)


def without_sums(row: Tensor) -> Tensor:
    """Return a rank's row as one that another rank has said already, but for its gradients."""
    row = row.clone()
    row[:2], row[NUM_TOTALS:] = 0, 0
    return row
