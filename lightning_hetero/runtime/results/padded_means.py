"""Detect means over all positions of samples that pipelines have padded to different lengths.

A `collate_fn` that pads does so to the longest sample of its batch. That differs between pipelines,
and from the whole batch's, so a mean counts other numbers of pads unless these are masked. Pads
can't be recognised here. So the detected means are those whose number of elements per sample
follows the samples' shape, if micro-batches differ in shape.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hetero.models.batches import tensors_of
from lightning_hetero.runtime.results.numbers.kinds import Kind, Reduction

__all__ = [
    "NUM_LOOKED_AT",
    "THE_LOSS",
    "PaddedMeans",
    "WholeMean",
    "counting_pads",
    "warn_of_padding",
]

NUM_LOOKED_AT = 4
"""Iterations of an epoch that are looked at; in some, all samples may have one length."""
THE_LOSS = "The loss of training_step"
"""How a message about the loss begins."""
_ALONG_DIM = "Mean {place} of those that a step takes along a dim, such as x.mean(1),"
_MOST_SHIFTED = 1
"""Positions, at most, by which a loss of next tokens is shorter than its samples."""


@dataclass(frozen=True)
class WholeMean:
    """One micro-batch's mean over all positions of its samples."""

    told: str
    """How a message about the mean begins."""
    per_sample: float
    """Numbers of each sample that it averages over; 0 if it leaves some of them out."""
    sizes: tuple[int, ...]
    """The sizes of a sample's tensors, and their numbers of elements."""


class PaddedMeans:
    """The means of one rank's micro-batches in an iteration that is looked at.

    Called for each micro-batch: `begin`, then `see` for each number that the step has made.

    Args:
        waits: Whether the host may wait for counts of an accelerator. If not, means over such
            counts aren't looked at.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._found = dict[WholeMean, None]()
        self._num_samples = 0
        self._sizes: tuple[int, ...] = ()

    def begin(self, microbatch: Any, num_samples: int) -> None:
        """Note the shapes of a micro-batch, unless it cuts itself: then they tell nothing."""
        self._num_samples = 0 if hasattr(microbatch, "num_samples") else num_samples
        shapes = [item.shape[1:] for item in tensors_of(microbatch) if item.ndim > 1]
        sizes = {size for shape in shapes for size in (*shape, math.prod(shape)) if size > 1}
        self._sizes = tuple(sorted(sizes))

    def see(self, told: str, number: Reduction | None) -> None:
        """Look at a number that the step returns or logs."""
        if number is None or number.kind is not Kind.MEAN or not self._num_samples:
            return
        count, places = number.count, number.num_places
        if isinstance(count, Tensor):
            if count.device.type != "cpu" and not self._waits:
                return
            count = places if places and int(count) == places else 0
        self._note(told, float(count) / self._num_samples)

    def see_averaged(self, averaged: Sequence[int]) -> None:
        """Look at means along dims: elements per sample of each, in the order of a step."""
        if self._num_samples:
            for place, size in enumerate(averaged, start=1):
                self._note(_ALONG_DIM.format(place=place), float(size))

    def _note(self, told: str, per_sample: float) -> None:
        self._found[WholeMean(told, per_sample, self._sizes)] = None

    def found(self) -> tuple[WholeMean, ...]:
        """Return the means, each once."""
        return tuple(self._found)


def counting_pads(means: Iterable[WholeMean]) -> tuple[str, ...]:
    """Return how messages begin about means that count pads; each mean once.

    Args:
        means: Those of all ranks.
    """
    by_name: Mapping[str, list[WholeMean]] = defaultdict(list)
    for mean in means:
        by_name[mean.told].append(mean)
    return tuple(told for told, found in by_name.items() if _follow_shapes(found))


def _follow_shapes(means: Sequence[WholeMean]) -> bool:
    """Whether means average over all positions of samples, so over more of longer samples."""
    counts = {mean.per_sample for mean in means}
    if len(counts) == 1 or 0 in counts:
        return False
    ratios = (_ratios(means[0], shift) for shift in range(_MOST_SHIFTED + 1))
    return any(
        all(any(math.isclose(ratio, own) for own in _ratios(mean, shift)) for mean in means)
        for shift, found in enumerate(ratios)
        for ratio in found
    )


def _ratios(mean: WholeMean, shift: int) -> list[float]:
    """Return a mean's elements per sample, divided by each size that may count them."""
    return [mean.per_sample / (size - shift) for size in mean.sizes if size > shift]


def warn_of_padding(told: Sequence[str]) -> None:
    """Warn of means that may count pads, if there are any; called by every rank alike."""
    for name in told:
        rank_zero_warn(
            f"{name} runs over all positions of samples, and pipelines have samples of different "
            "lengths. Where a collate_fn pads, it pads those of each pipeline to their own longest "
            "one, so pads count otherwise than on one device. Leave them out, such as by targets "
            "of -100 or a mask, or pad all samples to one length. If no sample is padded, "
            'HeteroStrategy(loss_reduction="mean") says so of the loss.'
        )
