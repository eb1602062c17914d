"""The loss of an iteration from the totals of all ranks, and whether gradients are finite.

Each rank checks the gradients that it made, before they travel, and reports the result with its
totals. So if any gradient is NaN or infinite, all ranks know of it, and none steps on it.
"""

import math
import warnings
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan, RankPlace
from lightning_hetero.core.reading.choices import Choice
from lightning_hetero.runtime.results.numbers.kinds import Kind, check_ratios, ends_of, ratio_of
from lightning_hetero.runtime.results.targets import LossWeight

__all__ = [
    "GUESSED_LOSS",
    "NUM_TOTALS",
    "IterationLoss",
    "LossSums",
    "NonfiniteGradients",
    "answer_nonfinite",
    "describe_ranks",
    "has_nonfinite",
    "nonfinite_ranks",
    "power_of_two_near",
    "without_sums",
]

NUM_TOTALS = 5
"""Totals of a rank: the sums of losses (means times their targets) and of target tokens, the least
and the largest ratio of further means (see `kinds.ratio_of`), whether gradients aren't finite."""

GUESSED_LOSS = (
    "What the loss of training_step is over the samples of its batch isn't known, so micro-batches "
    "count as if it were a mean over the targets of its largest loss function, or over samples. "
    'Say what it is: HeteroStrategy(loss_reduction="mean") or "sum"; for a mean over other targets '
    "let the module have num_target_tokens(batch)."
)
"""The warning for a loss that isn't recognised."""

_SMALL_NUMEL = 2**14
"""Largest tensors, in elements, that are copied end to end before they are summed: 49 gradients of
a small model then take 25 µs, not 110."""


@dataclass(frozen=True)
class IterationLoss:
    """An iteration's loss and state of gradients, the same on each rank."""

    value: Tensor
    scale: Tensor
    """Factor for sums of gradients."""
    has_nonfinite: Tensor
    """Whether some rank made gradients that aren't finite."""
    is_guessed: bool
    """Whether some rank didn't know how its losses count."""

    @classmethod
    def of(cls, totals: Tensor, kinds: Set[Kind], *, is_cut: bool) -> "IterationLoss":
        """Return the loss that the ranks' totals give.

        Args:
            totals: The totals of each rank, (num_ranks, NUM_TOTALS or more).
            kinds: Kinds of the losses of all ranks.
            is_cut: Whether the iteration may have several micro-batches.

        Raises:
            StepError: No weights of the micro-batches' losses give the loss of one device.
        """
        if is_cut and (Kind.MIXED in kinds or (Kind.SUM in kinds and len(kinds) > 1)):
            raise StepError(
                "The loss is a sum over samples and something else, in one micro-batch or from one "
                "to another, so no weight of micro-batches gives what one device would. Return a "
                "sum or a mean, or say what it is: "
                'HeteroStrategy(loss_reduction="mean") or "sum".'
            )
        if is_cut and Kind.TOGETHER in kinds:
            raise StepError(
                "The loss needs all samples of a batch at once: they meet each other in it or in "
                "what the layers get (products or differences of samples, statistics or a "
                "reordering of the batch), or it is no mean or sum over them (a root, a norm, a "
                "maximum), or counts their places in the batch. Micro-batches have only their own "
                "samples. Use one pipeline and num_microbatches=1; or say "
                'HeteroStrategy(loss_reduction="mean") to train on the mean of the micro-batches\' '
                "losses, as data parallelism does."
            )
        loss, weight = totals[:, :2].sum(0).unbind()
        broken = totals[:, NUM_TOTALS - 1].any()
        if Kind.SUM in kinds:
            return cls(loss.float(), torch.ones_like(loss), broken, is_guessed=False)
        scale = weight.reciprocal().nan_to_num_(0.0, 0.0, 0.0)  # Of no targets: 0.
        return cls((loss / weight).float(), scale, broken, is_guessed=Kind.UNKNOWN in kinds)


def nonfinite_ranks(totals: Tensor) -> list[int]:
    """Return the ranks that made gradients that aren't finite.

    Args:
        totals: As in `IterationLoss.of`, on the CPU.

    Raises:
        StepError: Losses are sums of means whose shares differ between micro-batches.
    """
    columns = totals.numpy().T
    check_ratios(columns[2].min(), columns[3].max(), "loss")
    ranks: list[int] = columns[NUM_TOTALS - 1].nonzero()[0].tolist()
    return ranks


def power_of_two_near(weight: float) -> float:
    """Return the power of two next to a number above 0; 1 for any other."""
    return 2.0 ** round(math.log2(weight)) if 0 < weight < math.inf else 1.0


class LossSums:
    """The losses of one rank's micro-batches, summed as `IterationLoss` takes them.

    Args:
        device: Where they are summed.
    """

    def __init__(self, device: torch.device) -> None:
        self.kinds: set[Kind] = set()
        """Kinds of the losses."""
        self.has_nonfinite: Tensor | None = None
        """What the function returns for the rank's gradients; None if there are none."""
        self._device = device
        self._sums: list[Tensor] = []
        self._means: list[tuple[Tensor, Tensor]] = []
        """With their weights."""
        self._weights: list[Tensor] = []
        self._ratios: list[Tensor] = []
        self._alone: list[Tensor] = []
        """The weights of means to which no other was added, so that their ratio is 0."""

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, loss: Tensor, judged: LossWeight, weight: Tensor) -> None:
        """Add the loss of a micro-batch; `weight` is its number of targets."""
        self.kinds.add(judged.kind)
        if judged.kind is Kind.SUM:
            self._sums.append(loss.detach())
        else:
            self._means.append((loss.detach(), weight))
        self._weights.append(weight)
        self._ratios += ratio_of(judged.others, weight)
        if judged.kind is Kind.MEAN and not judged.others:
            self._alone.append(weight)

    def totals(self) -> Tensor:
        """Return this rank's totals of losses and gradients, (NUM_TOTALS,)."""
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        loss = weight = nothing
        if self._sums:
            loss = loss + torch.stack(self._sums).double().sum()
        if self._means:
            losses, weights = map(torch.stack, zip(*self._means, strict=True))
            # The mean of no targets is NaN, and must count nothing.
            loss = loss + torch.where(weights > 0, losses * weights, 0.0).sum()
        if self._weights:
            weight = torch.stack(self._weights).sum()
        broken = nothing if self.has_nonfinite is None else self.has_nonfinite
        alone = [nothing / torch.stack(self._alone).sum()] if self._alone else []
        ends = ends_of([*self._ratios, *alone], self._device)
        return torch.stack([loss, weight, *ends, broken])


def without_sums(row: Tensor) -> Tensor:
    """Return a rank's row without the sums that another rank reports; gradients still count."""
    row = row.clone()
    row[:2], row[NUM_TOTALS:] = 0, 0
    return row


class NonfiniteGradients(Choice):
    """Answer to gradients that aren't finite."""

    ERROR = "error"
    SKIP = "skip"


def has_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return NaN if any element is NaN or infinite, else 0.0, without waiting for the device."""
    real = [torch.view_as_real(item) if item.is_complex() else item for item in tensors]
    # A sum keeps NaN and infinity, and reads each tensor once. For small ones calls cost more.
    small = [item for item in real if item.numel() <= _SMALL_NUMEL]
    sums = [item.sum(dtype=torch.float32) for item in real if item.numel() > _SMALL_NUMEL]
    if small:
        line: Tensor = _flatten_dense_tensors(small)  # type: ignore[no-untyped-call]
        sums.append(line.sum(dtype=torch.float32))
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack(sums).double().sum() if len(sums) > 1 else sums[0].double()
    return total * 0.0


def answer_nonfinite(found: str, answer: NonfiniteGradients, *, is_late: bool) -> None:
    """Raise or warn, as the user chose; called by every rank alike.

    Args:
        found: Describes the gradients; the message goes on after it.
        answer: The user's choice.
        is_late: Whether the optimizer has stepped since, on zeros in their place.

    Raises:
        StepError: The answer is an error.
    """
    if answer is NonfiniteGradients.ERROR:
        since = (
            "The step on them took zeros in their place"
            if is_late
            else "Nothing was changed by them"
        )
        raise StepError(
            f"Gradients of {found} {since}. Look for a division by zero or an "
            'overflow in the loss or the layers; HeteroStrategy(nonfinite_gradients="skip") leaves '
            "such iterations out."
        )
    warnings.warn(f"Gradients of {found} This iteration is left out.", stacklevel=2)


def describe_ranks(global_ranks: Iterable[int], plan: ParallelPlan) -> str:
    """Name ranks with gradients that aren't finite: one per pipeline, of the last such stage.

    From there backward passes carry NaN and infinity on to all earlier stages.
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
