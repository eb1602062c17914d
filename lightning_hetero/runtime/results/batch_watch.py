"""Detect hooks that mix the samples of a batch, of which each pipeline has only a part.

A hook that subtracts the batch's mean uses that of the pipeline's samples, where one device uses
that of all samples. Hooks that process each sample alone give the same result.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hetero.core.errors import BatchError, StepError
from lightning_hetero.models.batches import count_samples, tensors_of
from lightning_hetero.runtime.results.numbers.kinds import TOGETHER
from lightning_hetero.runtime.results.targets import LossWatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BatchWatch"]


class BatchWatch:
    """Watches the hooks around the first batch of each phase.

    Called for a batch that is a part of one: `begin`; if that is true `move`, then, when its step
    begins, `check_unchanged`.
    """

    def __init__(self) -> None:
        self._seen: set[object] = set()
        self._moved: list[tuple[Tensor, int]] = []
        """The tensors of a batch, with their versions."""

    def begin(self, phase: object) -> bool:
        """Return whether a batch of a phase is looked at."""
        is_first = phase not in self._seen
        self._seen.add(phase)
        return is_first

    def move(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return `move(batch)`, and watch the user's hooks that it calls.

        Raises:
            StepError: They mix samples.
        """
        try:
            num_samples = count_samples(batch)
        except BatchError:
            num_samples = 0
        watch = LossWatch((), num_samples)
        watch.resume()
        try:
            moved = move(batch)
        finally:
            watch.stop()
        tensors = tensors_of(moved)
        reductions = watch.reductions
        # Samples that are mixed at random are other ones on one device, too.
        meets = any(reductions.of(item) is TOGETHER for item in tensors)
        if meets and not reductions.has_shuffled:
            raise StepError(
                "A hook around the transfer of a batch brings its samples together (statistics, "
                "such as a mean over them, products, another order), but each pipeline has only "
                "its own samples there, and so would get others than one device. Do it per sample, "
                "or with numbers of the whole data set."
            )
        self._moved = [(item, item._version) for item in tensors if not item.is_inference()]
        return moved

    def check_unchanged(self) -> None:
        """Warn if a hook has changed the batch since it was moved."""
        moved, self._moved = self._moved, []
        if any(item._version != version for item, version in moved):
            warnings.warn(
                "A hook such as on_train_batch_start changes the batch in place. It gets only the "
                "samples of this rank's pipeline, so what it makes of several samples, such as "
                "their mean, isn't what one device has.",
                stacklevel=2,
            )
