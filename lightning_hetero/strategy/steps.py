"""What Lightning does with batches while a plan runs: it deals them out and steps through them.

`HeteroStrategy` adds which plan that is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage
from typing_extensions import override

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.models.batches import AssignedBatch, fingerprint_of
from lightning_hetero.runtime.iteration.config import IterationKey, Phase
from lightning_hetero.runtime.results.appended_lists import extend_lists
from lightning_hetero.runtime.results.outputs import Records, join_outputs
from lightning_hetero.strategy.sliced import SlicesStrategy

if TYPE_CHECKING:
    from lightning_hetero.data.dealer import Dealer

__all__ = ["StepsStrategy"]

_PHASES = {
    RunningStage.TRAINING: Phase.TRAIN,
    RunningStage.SANITY_CHECKING: Phase.VALIDATE,
    RunningStage.VALIDATING: Phase.VALIDATE,
    RunningStage.TESTING: Phase.TEST,
    RunningStage.PREDICTING: Phase.PREDICT,
}


class StepsStrategy(SlicesStrategy):
    """Runs an iteration of the engine for each of Lightning's steps; a subclass chooses the plan.

    Args:
        **options: See `SlicesStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._dealer: Dealer | None = None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Not used by our own runs, see `setup`; for users who build samplers from it.
        place = self.engine.place
        index = 0 if place is None else place.pipeline_index
        return {"num_replicas": self.plan.num_pipelines, "rank": index}

    @property
    def plan(self) -> ParallelPlan:
        """The plan that runs."""
        return self.engine.plan

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._dealer is not None
        trainer = self._module.trainer
        return self._dealer.deal(
            dataloader, is_training=trainer.training, epoch=_epoch_to_load(trainer)
        )

    def _attach_logs(self, trainer: Any) -> None:
        """Let callbacks log as the module does now; Lightning gave them what was there before."""
        self._compare_hooks()
        for callback in trainer.callbacks:
            callback.log = self._module.log

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # Here, because on an accelerator reading values would wait for it.
        parts = batch.microbatches if isinstance(batch, AssignedBatch) else [batch]
        self.engine.fingerprint = fingerprint_of(parts)
        if not isinstance(batch, AssignedBatch):
            return super().batch_to_device(batch, device, dataloader_idx)
        moved = [
            super(StepsStrategy, self).batch_to_device(item, device, dataloader_idx)
            for item in batch.microbatches
        ]
        return replace(batch, microbatches=tuple(moved))

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        module = self._module

        def step(microbatch: Any) -> Any:
            return module.training_step(microbatch, *args, **kwargs)

        assert self._dealer is not None
        batch_idx = module.trainer.fit_loop.batch_idx
        with self._watching():
            self.engine.change_plan(self._dealer.plan_to_run(batch, batch_idx))
            self._follow_freezing()
            loss, records = self.engine.run(step, batch, self._key(args))
        return {"loss": loss, **(self._left_behind(records) or {})}

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(self._module.validation_step, batch, args, kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(self._module.test_step, batch, args, kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Predictions are written by the indices of the samples that a pipeline has loaded.
        return self._evaluate(self._module.predict_step, batch, args, kwargs, of_pipeline=True)

    def _evaluate(
        self,
        method: Callable[..., Any],
        batch: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        of_pipeline: bool = False,
    ) -> Any:
        assert self._dealer is not None
        with self._watching():
            self.engine.change_plan(self._dealer.plan_to_evaluate(batch))
            _, records = self.engine.run(
                lambda microbatch: method(microbatch, *args, **kwargs), batch, self._key(args)
            )
            return self._left_behind(records, of_pipeline=of_pipeline)

    def _left_behind(self, records: Records, *, of_pipeline: bool = False) -> Any:
        """Extend the module's lists as the whole step would have; return what it would have."""
        everything = [item for index in sorted(records) for item in records[index]]
        extend_lists(self._module, everything)
        if of_pipeline:
            place = self.engine.place
            everything = [] if place is None else records.get(place.pipeline_index, [])
        return join_outputs(everything)

    def _key(self, args: tuple[Any, ...]) -> IterationKey:
        trainer = self._module.trainer
        stage = trainer.state.stage
        assert stage is not None
        batch_idx = args[0] if args and isinstance(args[0], int) else 0
        return IterationKey(phase=_PHASES[stage], epoch=trainer.current_epoch, batch_idx=batch_idx)

    def _deposit_gradients(self) -> None:
        """Add the iteration's gradients to the slices, as a backward would."""
        scale = 1.0 / self._module.trainer.accumulate_grad_batches
        for name, gradient in self.engine.gradients.items():
            master = self.engine.store.masters[name]
            gradient = gradient.mul_(scale) if scale != 1.0 else gradient
            if master.grad is None:
                master.grad = gradient
            else:
                master.grad += gradient
        self.engine.gradients = {}


def _epoch_to_load(trainer: pl.Trainer) -> int:
    """Return the epoch that a new loader is for: the next one if a run resumes where one ended."""
    loop: Any = trainer.fit_loop
    counted = loop.epoch_progress.total
    has_ended = (
        loop.restarting
        and loop.epoch_loop.batch_progress.is_last_batch
        and counted.processed < counted.started
    )
    return int(trainer.current_epoch + has_ended)
