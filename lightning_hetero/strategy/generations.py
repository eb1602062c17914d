"""Run one fit after another, each with the remaining ranks, without ending their processes.

With `ElasticRestart(in_place=True)` a worker's fit may end because a rank is lost, joins or leaves.
Then another fit follows:

1. The failure detector is paused, the old generation's groups are closed, and this rank's part of
   the last step is kept in memory (`checkpoint.live`).
2. The fit ends as Lightning ends it: `teardown` of strategy, loops, callbacks and data module.
3. The remaining ranks form the next generation, together with joiners that wait
   (`runtime.generation.membership`). If ranks have stopped between two steps to let some join or
   leave, this comes first, so that no rank closes connections that others still use.
4. Random state, loops and flags are set back to what they were before the first fit.
5. Callbacks get `on_generation(trainer, old, new)`, and the fit begins as after any restart:
   processes connect, a plan is made for the remaining ranks, and the state comes from what they
   have kept in memory, or else from the newest checkpoint.

A joiner comes here in its first fit, as every process does, and enters the generation that has
called it. If an error occurs before that generation has finished a step, its joiners are assumed to
be the cause, and the others go on without them.

This is written for NCCL, too, but hasn't been tried with it. Only ranks abort operations, before
anything waits for them, and a step that a device hadn't finished by then doesn't count
(`communicators.StepEnd`). Generations share no communicators, and an error that makes a process
unusable (CUDA's) ends only that process.

Why not repeat the failed iteration instead? It would save the set-up. But loaders, optimizers,
loops and callbacks depend on ranks and shares of data, and each would need a second way to change
them. A new process must enter a run in this way in any case, so old processes do it, too.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.runtime.random_state import RandomState
from lightning_hetero.runtime.ranks.communicators import leave_failures_to_ranks
from lightning_hetero.runtime.ranks.failure import AgreedExit, GenerationChange

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategy.hooks import HookedStrategy

_log = logging.getLogger(__name__)
_MOST_IN_VAIN = 10
"""Number of successive generations without a finished step after which the run ends: its fault then
recurs always."""


def size_that_stays(told: Iterable[int]) -> int:
    """Return how many of a loader's batches make an iteration: all generations keep the number.

    Args:
        told: The number on each rank; 0 on a joiner.

    Raises:
        CheckpointError: Only joiners are left.
    """
    most = max(told)
    if not most:
        raise CheckpointError(
            "All ranks that had trained were lost before joiners had been told what they train. "
            "Start the run again; it goes on from its newest checkpoint."
        )
    return most


class Generations:
    """The fits, one for each generation, that make up one `Trainer.fit`.

    Args:
        strategy: The Trainer's strategy.
        trainer: The Trainer.
        silence: How long a rank may show no heartbeat.
    """

    def __init__(
        self, strategy: "HookedStrategy", trainer: "pl.Trainer", silence: timedelta
    ) -> None:
        self._strategy = strategy
        self._processes = strategy.processes
        self._trainer: Any = trainer
        self._num_in_vain = 0
        self._joiners: tuple[int, ...] = ()
        """The numbers of the members that weren't in the previous generation."""
        self._processes.outlive_ranks(silence)
        leave_failures_to_ranks(os.environ)

    def fit(self, work: Callable[[], Any]) -> Any:
        """Fit until training has ended, even if ranks join, leave or are lost."""
        # After a loss, a collection needn't visit objects that stay, such as modules.
        gc.collect()
        gc.freeze()
        before = _BeforeFit(self._trainer)
        if self._processes.joins:
            self._strategy.await_recovery({})
            self._strategy.has_begun_training = True
        try:
            while True:
                try:
                    result = work()
                except GenerationChange as change:
                    end = _End(reason=str(change), leaving=change.leaving)
                except Exception as error:
                    reason = self._reason_to_go_on(error)
                    if reason is None:
                        raise
                    end = _End(reason=reason)
                else:
                    self._processes.end_generations()
                    return result
                # Outside of `except`, in which the error would keep old objects alive.
                self._begin_next(end, before)
        except BaseException as error:
            if not isinstance(error, AgreedExit):
                self._processes.leave_members(error)
            raise

    def _reason_to_go_on(self, error: Exception) -> str | None:
        """Return why a next generation follows an error; None, and log why, if none does."""
        if self._strategy.memory is not None:
            self._strategy.memory.explain(error)  # First: others are told the explanation.
        trained, joiners = self._strategy.has_trained, self._joiners
        lost = self._processes.lost_peer(error)
        if joiners and not trained:
            reason = f"{type(error).__name__}: {error}"
            membership = self._processes.membership
            if lost is None and membership is not None:
                for number in joiners:
                    membership.tell_gone(number, f"The others can't train with it: {reason}")
            return f"Joiners {list(joiners)} couldn't be taken in. {reason}"
        if lost is None:
            return None
        self._num_in_vain = 0 if trained else self._num_in_vain + 1
        why = ""
        if not self._strategy.has_begun_training:
            why = "training hadn't begun"
        elif self._num_in_vain >= _MOST_IN_VAIN:
            why = f"{self._num_in_vain} generations in a row have trained no step"
        if why:
            _log.warning("Not going on in place, because %s. %s", why, lost)
        return None if why else str(lost)

    def _begin_next(self, end: "_End", before: "_BeforeFit") -> None:
        trainer, processes = self._trainer, self._processes
        ended = processes.generation
        if end.leaving is None:
            self._end_fit(ended)
            old, new = processes.form_generation(calls_joiners=False)
        else:
            processes.comms.step_end.wait()  # Before groups are closed, which would interrupt it.
            if processes.comms.global_rank in end.leaving:
                processes.wait_until_others_go_on()
                raise AgreedExit(0)
            old, new = processes.form_generation(end.leaving)
            self._end_fit(ended)
        self._strategy.cluster_environment = processes.enter_generation(new)
        self._strategy.set_world_ranks()
        before.put_back(trainer)
        self._joiners = new.joiners_since(old)
        trainer.strategy.run.has_joiners = bool(self._joiners)
        rank_zero_info(
            "Generation %s: %s ranks go on in place, without ranks %s of the one before%s. %s",
            new.number,
            new.world_size,
            list(old.without(new)),
            f", with members {list(self._joiners)}" if self._joiners else "",
            end.reason,
        )
        for callback in trainer.callbacks:
            notify = getattr(callback, "on_generation", None)
            if notify is not None:
                notify(trainer, old, new)

    def _end_fit(self, generation: int) -> None:
        """Close a generation's groups, and end its fit as Lightning does."""
        module = self._strategy.lightning_module
        self._processes.leave_generation()
        if not self._trainer.training:
            # An interrupted validation has left modules in evaluation mode.
            self._trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()
        run = self._trainer.strategy.run
        for checkpoint in run.checkpoints:
            checkpoint.keep_live(self._trainer, generation)
        self._strategy.await_recovery(run.trained_at_first or {})
        self._trainer._teardown()
        self._strategy._lightning_module = module
        call._call_teardown_hook(self._trainer)
        gc.collect()


@dataclass(frozen=True, kw_only=True)
class _End:
    """Why a generation has ended."""

    reason: str
    leaving: frozenset[int] | None = None
    """The ranks that leave, if all have stopped between two steps; None if a rank was lost."""


class _BeforeFit:
    """The state of a Trainer, and of the random number generators, before a fit.

    Args:
        trainer: The Trainer whose fit begins.
    """

    def __init__(self, trainer: Any) -> None:
        self._random_state = RandomState.now()
        fit_loop = trainer.fit_loop
        self._epochs = fit_loop.min_epochs, fit_loop.max_epochs
        self._steps = fit_loop.epoch_loop.min_steps, fit_loop.epoch_loop.max_steps

    def put_back(self, trainer: Any) -> None:
        """Restore that state, with new loops, as in a new process."""
        self._random_state.put_back()
        trainer.fit_loop = _FitLoop(trainer, *self._epochs)
        trainer.fit_loop.epoch_loop = _TrainingEpochLoop(trainer, *self._steps)
        trainer.should_stop = False
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.state.stage = RunningStage.TRAINING
