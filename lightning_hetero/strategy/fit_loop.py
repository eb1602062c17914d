"""Lightning's fit loop, which may begin with what follows a step that was trained before.

A validation, the end of an epoch or of training follows a step, and a rank may be lost in it.
Resumed from that step's state Lightning's own loop leaves it out: it begins the next epoch, or is
done.
"""

from typing import Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from typing_extensions import override

__all__ = ["FitLoop"]


class FitLoop(_FitLoop):
    """A loop that goes on from a state of the last step's end.

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
        """Whether what was logged in the epoch that goes on is here, too."""

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
        # Nothing of it was begun, as far as the state knows.
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
