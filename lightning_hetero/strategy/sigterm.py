"""End a run on all ranks after the same iteration, once any of them has got a SIGTERM.

Lightning broadcasts before each step whether rank 0 has got one, and reads the answer from the
device, so each host waits for rank 0 and for its device. Its signal handler broadcasts, too, which
would never end on another rank. Here a SIGTERM sets a flag, which travels with an iteration's row.
"""

import weakref
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_hetero.runtime.iteration.engine import Engine

__all__ = ["heed_sigterm", "note_sigterm"]


def note_sigterm(trainer: Any, engine: Engine) -> None:
    """Tell all ranks of a SIGTERM to this one with the next iteration; called before a run."""
    running = weakref.ref(engine)  # Else its groups would live until the Trainer is collected.

    def note(number: int, _: object) -> None:
        launcher, engine = trainer.strategy.launcher, running()
        if engine is not None:
            if launcher is not None and not engine.is_leaving:
                launcher.kill(number)
            engine.tell(is_leaving=True)

    trainer._signal_connector._sigterm_notifier_fn = note
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def heed_sigterm(trainer: Any, engine: Engine) -> None:
    """Let Lightning end the run after an iteration in which a rank said that it got a SIGTERM.

    `ElasticRestart` ends a fit by itself, from the first step on.
    """
    is_restarted = trainer.strategy.run.restarters and trainer.state.fn == TrainerFn.FITTING
    if engine.leaving and not is_restarted:
        trainer._signal_connector.received_sigterm = True
