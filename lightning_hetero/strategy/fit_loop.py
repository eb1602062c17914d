"""Lightning's fit loop, except that it can begin with what follows a step trained earlier.

A rank may be lost after a step: in a validation, or at the end of an epoch or of training. Resumed
from that step's state, Lightning's own loop would skip these: it begins the next epoch, or is done.
"""

from typing import Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from typing_extensions import override

__all__ = ["FitLoop"]


class FitLoop(_FitLoop):
    """A fit loop that can go on from the state at the end of a step.

    Args:
        trainer: Whose loop it is.
        epochs: Fewest and most epochs.
        steps: Fewest and most steps.
    """

    def __init__(self, trainer: Any, epochs: tuple[Any, Any], steps: tuple[Any, Any]) -> None:
        super().__init__(trainer, *epochs)
        self.epoch_loop = _TrainingEpochLoop(trainer, *steps)
        self.begins_at_end = False
        """Whether the epoch or training ends after the step whose state was loaded: a validation
        that is due, hooks and schedulers come first, even where all steps are trained."""
        self.lacks_nothing = False
        """Whether this process still has all that was logged in the epoch so far."""

    @property
    @override
    def done(self) -> bool:
        return not self.begins_at_end and super().done

    @override
    def reset(self) -> None:
        if not self.begins_at_end:
            super().reset()
            return
        torch.set_grad_enabled(True)
        # In the restored state nothing of what follows the step has begun.
        _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]
        self.epoch_loop.batch_progress.increment_completed()

    @override
    def on_advance_start(self) -> None:
        if not self.begins_at_end:
            super().on_advance_start()

    @override
    def advance(self) -> None:
        if self.begins_at_end:
            assert self._data_fetcher is not None
            self.epoch_loop.on_advance_end(self._data_fetcher)
        else:
            super().advance()

    @override
    def on_advance_end(self) -> None:
        if self.lacks_nothing:
            # Schedulers that monitor something may step, as if nothing had been restarted.
            self._restarting = False
        super().on_advance_end()
        self.begins_at_end = False
