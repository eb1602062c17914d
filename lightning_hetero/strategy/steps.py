"""Run one iteration of the engine for each of Lightning's steps, under the plan of its batch.

A SIGTERM to any rank ends the run on all ranks after the same iteration: it sets a flag, and each
iteration's agreement carries the flags of all ranks. Lightning's own handling is switched off for
two reasons. Before each step it broadcasts whether rank 0 has got a SIGTERM and reads the answer
from the device, so each host waits for the broadcast and for its device. And its signal handler
broadcasts, too, which never ends if another rank has got no signal.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hetero.autoplan.out_of_memory import MemoryWatch
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.dealer import Dealer
from lightning_hetero.models.batches import AssignedBatch, fingerprint_of
from lightning_hetero.runtime.iteration.config import IterationKey, Phase
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.results.outputs import Records, extend_lists, join_outputs

_PHASES = {
    RunningStage.TRAINING: Phase.TRAIN,
    RunningStage.SANITY_CHECKING: Phase.VALIDATE,
    RunningStage.VALIDATING: Phase.VALIDATE,
    RunningStage.TESTING: Phase.TEST,
    RunningStage.PREDICTING: Phase.PREDICT,
}


class Steps:
    """Runs the training, validation, test and predict steps of one run.

    Args:
        module: The user's LightningModule.
        engine: Runs the iterations.
        dealer: Says under which plan a batch is run.
        context: Returns the context for each call of a step.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        engine: Engine,
        dealer: Dealer,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module = module
        self._context = context
        self._engine = engine
        self._dealer = dealer
        _note_sigterm(module.trainer, engine)

    def to_device(
        self,
        batch: Any,
        device: torch.device | None,
        dataloader_idx: int,
        move: Callable[[Any, torch.device | None, int], Any],
    ) -> Any:
        """Return a batch on the device; `move` moves the batch, or each assigned micro-batch."""
        parts: Sequence[Any] = [batch]
        if isinstance(batch, AssignedBatch):
            parts = batch.microbatches
        # Before the move: to read values back from an accelerator, the host would have to wait for
        # it.
        self._engine.fingerprint = fingerprint_of(parts)

        def move_part(part: Any) -> Any:
            return move(part, device, dataloader_idx)

        moved = [move_part(part) for part in parts]
        if isinstance(batch, AssignedBatch):
            return replace(batch, microbatches=tuple(moved))
        return moved[0]

    def plan_to_train(self, batch: Any) -> ParallelPlan:
        """Return the plan under which a batch is trained on; called by all ranks."""
        self._dealer.compare_orders(self._engine.comms.gather_objects)
        return self._dealer.plan_to_run(batch, self._module.trainer.fit_loop.batch_idx)

    def train(self, batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Train on a batch; return the loss and what else the step returned. All ranks call it."""
        loss, records = self._run(self._module.training_step, batch, args, kwargs)
        return {"loss": loss, **(self._join_results(records) or {})}

    def evaluate(
        self,
        step: Callable[..., Any],
        batch: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        of_pipeline: bool = False,
    ) -> Any:
        """Run a step forward only; return what it would return on one device. All ranks call it.

        Args:
            step: The module's `validation_step`, `test_step` or `predict_step`.
            batch: The batch.
            args: The step's other positional arguments.
            kwargs: The step's keyword arguments.
            of_pipeline: Whether to return only the outputs of this rank's pipeline.
        """
        self._dealer.compare_orders(self._engine.comms.gather_objects)
        self._engine.change_plan(self._dealer.plan_to_evaluate(batch))
        _, records = self._run(step, batch, args, kwargs)
        return self._join_results(records, of_pipeline=of_pipeline)

    def _run(
        self,
        step: Callable[..., Any],
        batch: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[torch.Tensor | None, Records]:
        def run_step(microbatch: Any) -> Any:
            with self._context():
                return step(microbatch, *args, **kwargs)

        made = self._engine.run(run_step, batch, self._key())
        _heed_sigterm(self._module.trainer, self._engine)
        return made

    def _join_results(self, records: Records, *, of_pipeline: bool = False) -> Any:
        """Append to the module's lists what one device's step would, and return its output."""
        everything = [item for index in sorted(records) for item in records[index]]
        extend_lists(self._module, everything)
        if of_pipeline:
            place = self._engine.place
            everything = [] if place is None else records.get(place.pipeline_index, [])
        return join_outputs(everything)

    def _key(self) -> IterationKey:
        trainer = self._module.trainer
        stage = trainer.state.stage
        assert stage is not None
        # Not from the step's arguments, since a step needn't take `batch_idx`.
        loop: Any = trainer.fit_loop.epoch_loop if trainer.training else trainer._active_loop
        batch_idx = loop.batch_progress.current.ready - 1
        return IterationKey(phase=_PHASES[stage], epoch=trainer.current_epoch, batch_idx=batch_idx)


_INDEX = (
    "As a rule a token id that an embedding has no row for, or a label that the logits have no "
    "class for: compare the tokenizer's vocabulary with the model's. On CUDA, a step with "
    "CUDA_LAUNCH_BLOCKING=1 shows where."
)
_UNUSED = (
    "Where a plan cuts the model into stages, a step can differentiate its loss only by what the "
    "last stage computes. A gradient penalty by the model's input needs a plan whose pipelines "
    "have one stage."
)

_NOT_SET = (
    "If that is an attribute which a layer sets in its forward: only the stage that runs the layer "
    "has it. Return it from the layer, or use a plan whose pipelines have one stage."
)


@contextmanager
def explained(
    watching: Callable[[], AbstractContextManager[None]],
    memory: MemoryWatch,
    explain_dtypes: Callable[[], AbstractContextManager[None]],
    *,
    trains: bool,
) -> Iterator[None]:
    """Context that adds an explanation to an iteration's error, and reports it to other ranks.

    Args:
        watching: See `Processes`.
        memory: Explains out-of-memory errors.
        explain_dtypes: See `HeteroPrecision`.
        trains: Whether the iteration is one of training.
    """
    try:
        yield
    except Exception as error:
        if "index out of range" in str(error) or "device-side assert" in str(error):
            error.add_note(_INDEX)
        if "appears to not have been used in the graph" in str(error):
            error.add_note(_UNUSED)
        if isinstance(error, TypeError) and "NoneType" in str(error):
            error.add_note(_NOT_SET)
        # Entered only after an error, since each would cost every iteration some microseconds.
        explaining = memory.explaining(trains=trains)
        with watching(), explaining, explain_dtypes():
            raise


def sees_early(*hooked: pl.LightningModule | Callback) -> bool:
    """Whether any hook is overridden that runs between `training_step` and `backward`."""
    names = ("on_before_zero_grad", "on_before_backward")
    return any(is_overridden(name, item) for item in hooked for name in names)


def epoch_to_load(trainer: pl.Trainer) -> int:
    """Return the epoch of a new loader: the next one if a run resumes at the end of an epoch."""
    loop: Any = trainer.fit_loop
    counted = loop.epoch_progress.total
    has_ended = (
        loop.restarting
        and loop.epoch_loop.batch_progress.is_last_batch
        and counted.processed < counted.started
    )
    return int(trainer.current_epoch + has_ended)


def _note_sigterm(trainer: Any, engine: Engine) -> None:
    """Tell all ranks of a SIGTERM to this one with the next iteration; called before a run."""
    running = weakref.ref(engine)  # So that its groups don't live as long as the Trainer.

    def note(number: int, _: object) -> None:
        launcher, engine = trainer.strategy.launcher, running()
        if engine is not None:
            if launcher is not None and not engine.is_leaving:
                launcher.kill(number)
            engine.tell(is_leaving=True)

    trainer._signal_connector._sigterm_notifier_fn = note
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def _heed_sigterm(trainer: Any, engine: Engine) -> None:
    """Let Lightning end the run after an iteration in which any rank has got a SIGTERM.

    With an `ElasticRestart`, that callback ends the fit instead.
    """
    is_restarted = trainer.strategy.run.restarters and trainer.state.fn == TrainerFn.FITTING
    if engine.leaving and not is_restarted:
        trainer._signal_connector.received_sigterm = True
