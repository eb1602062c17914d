"""Lightning's strategy hooks; each passes its work on to one of the strategy's parts.

`HeteroStrategy` adds the user's options and the set-up of a run. `docs/private-names.md` lists the
private names of Lightning that are used here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.slices.rows import HookedSlices
from lightning_hetero.runtime.slices.state import load_module_state, scatter_optimizer_state
from lightning_hetero.strategy.connected import ConnectedStrategy
from lightning_hetero.strategy.precision import HeteroPrecision
from lightning_hetero.strategy.processes import Processes, StartMethod
from lightning_hetero.strategy.sliced_state import SlicedState, move_buffers, read_checkpoint
from lightning_hetero.strategy.steps import Steps, epoch_to_load, explained, sees_early

if TYPE_CHECKING:
    from lightning_hetero.autoplan.out_of_memory import MemoryWatch
    from lightning_hetero.callbacks.checkpointing.training_state import Restored
    from lightning_hetero.data.dealer import Dealer

_T = TypeVar("_T")


class HookedStrategy(ConnectedStrategy):
    """Passes Lightning's calls on to the strategy's parts.

    Args:
        processes: Connects this process with the others.
        slices: The module's weights and optimizer states.
        start_method: How processes are started; see `HeteroStrategy`.
        **options: Lightning's own arguments of every strategy.
    """

    def __init__(
        self,
        processes: Processes,
        slices: SlicedState,
        *,
        start_method: StartMethod,
        **options: Any,
    ) -> None:
        super().__init__(processes, start_method=start_method, **options)
        self._slices = slices
        self._failed = False
        self._shows_early = False
        """Whether some hook reads parameters or gradients between `training_step` and `backward`,
        so that it must get this rank's slices then."""
        self.num_changes = 0
        """How often an optimizer has begun to change the slices."""
        self._restored: Restored | None = None
        """The state that Lightning restores next, in place of a checkpoint file."""
        self._dealer: Dealer | None = None
        """Deals samples out to ranks; set by `setup`."""
        self._steps: Steps | None = None
        """Runs the steps; set by `setup`."""
        self.memory: MemoryWatch | None = None
        """Explains out-of-memory errors, and tells whether a plan fits; set by `setup`."""
        self.has_begun_training = False
        """Whether a fit has begun to train; before that, the loss of a rank ends the run."""
        self.has_trained = False
        """Whether this generation has finished a step."""

    @property
    def engine(self) -> Engine:
        """The engine that runs the plan; available from `setup` to `teardown`."""
        if self._slices.engine is None:
            raise ConfigurationError("The strategy has its plan and engine only while a run is on.")
        return self._slices.engine

    @property
    def hooked_slices(self) -> HookedSlices:
        """The slices as hooks see them; available from `setup` to `teardown`."""
        assert self._slices.hooked is not None, "the strategy has not been set up"
        return self._slices.hooked

    @property
    def plan(self) -> ParallelPlan:
        """The plan that runs."""
        return self.engine.plan

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    @override
    def precision_plugin(self) -> HeteroPrecision:
        plugin = self._precision_plugin or HeteroPrecision()
        assert isinstance(plugin, HeteroPrecision)
        return plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin and HeteroPrecision.of(precision_plugin)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # `Trainer.init_module(empty_init=True)`: make no values here, since slices get them later.
        with torch.device("meta") if empty_init else super().tensor_init_context():
            yield

    @override
    def model_to_device(self) -> None:
        move_buffers(self._module, self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with self._slices.whole_shapes():
            super().setup_optimizers(trainer)

    # -- data and steps -------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # For users who build samplers from it; our own runs don't use it, see `setup`.
        place = self.engine.place
        index = 0 if place is None else place.pipeline_index
        return {"num_replicas": self.plan.num_pipelines, "rank": index}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._dealer is not None
        trainer = self._trainer
        return self._dealer.deal(
            dataloader, is_training=trainer.training, epoch=epoch_to_load(trainer)
        )

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        assert self._steps is not None
        return self._steps.to_device(batch, device, dataloader_idx, super().batch_to_device)

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        assert self._steps is not None
        self.hooked_slices.leave()
        self.engine.gradients.loss_scale = self.precision_plugin.loss_scale
        with self._explained(trains=True):
            self.engine.change_plan(self._steps.plan_to_train(batch))
            self._slices.follow_freezing(self.optimizers, self._trainer.callbacks)
            trained = self._steps.train(batch, args, kwargs)
        members, described = self.processes.membership, self.engine.boundary.first_call
        if members is not None and described and not self.has_trained:
            members.tell_layer_call(described)
        self.has_trained = True
        if self._shows_early:
            self.hooked_slices.enter()
        return trained

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(self._module.validation_step, batch, args, kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(self._module.test_step, batch, args, kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Callbacks that write predictions get the sample indices of this rank's pipeline only.
        return self._evaluate(self._module.predict_step, batch, args, kwargs, of_pipeline=True)

    def _evaluate(self, *args: Any, of_pipeline: bool = False) -> Any:
        assert self._steps is not None
        self.hooked_slices.leave()
        with self._explained(trains=False):
            output = self._steps.evaluate(*args, of_pipeline=of_pipeline)
        self.hooked_slices.enter()
        return output

    def _explained(self, *, trains: bool) -> AbstractContextManager[None]:
        assert self.memory is not None
        watching, explain_dtypes = self.processes.watching, self.precision_plugin.explain_dtypes
        return explained(watching, self.memory, explain_dtypes, trains=trains)

    def deposit_gradients(self) -> None:
        """Move the iteration's gradients into the slices; called by the precision plugin."""
        self.precision_plugin.note_gradients(are_finite=self.engine.gradients.are_finite)
        number = self._trainer.accumulate_grad_batches
        are_first = self._trainer.fit_loop.batch_idx % number == 0
        self._slices.deposit_gradients(1.0 / number, are_first=are_first)

    def norm_of_gradients(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the norm of parameters' gradients over all ranks; collective."""
        return self.hooked_slices.norm(parameters)

    def begin_change(self) -> None:
        """Note that an optimizer is about to change the slices."""
        self.hooked_slices.leave()
        self.num_changes += 1

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._slices.note_step()
        self.hooked_slices.enter()
        return result

    @override
    def on_train_start(self) -> None:
        self._restored = None
        self._shows_early = sees_early(self._module, *self._trainer.callbacks)
        self.has_begun_training = True
        self.processes.begin_training()
        self.engine.mark_weights_stale()

    @override
    def on_validation_start(self) -> None:
        self.engine.buffers.share()
        # Callbacks such as weight averaging may swap weights in before validation, and out after
        # it.
        self.engine.mark_weights_stale()

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_train_end(self) -> None:
        self.engine.settle()

    on_test_end = on_predict_end = on_train_end

    @override
    def on_validation_end(self) -> None:
        self.engine.settle()
        self.engine.mark_weights_stale()

    # -- checkpoints ----------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def whole_state_dict(self) -> dict[str, Any]:
        """Return the whole module's `state_dict` on rank 0, an empty one elsewhere.

        Every rank must call it, during a run or after it. After a run the module keeps its slices:
        its Trainer can go on with them and save checkpoints; any other use of their values is
        refused.
        """
        return self._slices.whole_state_dict(self._module)

    lightning_module_state_dict = whole_state_dict

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._slices.optimizer_state(optimizer)

    def restore_from(self, restored: "Restored") -> None:
        """Let Lightning restore a state that has this rank's slices; called after `setup`."""
        self._restored = restored

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored.checkpoint  # The file is read at the first start only.
        return read_checkpoint(
            checkpoint_path,
            weights_only=weights_only,
            by_pages=type(self.checkpoint_io) is TorchCheckpointIO,
            otherwise=super().load_checkpoint,
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._restored is None:
            state = checkpoint["state_dict"]
            load_module_state(self.engine.store, self._module, state, strict=strict)
            self.engine.mark_weights_stale()
        else:
            self._restored.load_weights()
            self._slices.note_recovery()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._slices.refit_finetuning(self._trainer)
        if self._restored is None:
            states = checkpoint["optimizer_states"]
            for optimizer, state in zip(self.optimizers, states, strict=True):
                if optimizer.param_groups:
                    scatter_optimizer_state(self.engine.store, optimizer, state)
        else:
            self._restored.load_optimizers()
        _optimizers_to_device(self.optimizers, self.engine.store.owned_device)

    # -- the end --------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self.memory is not None:
            self.memory.explain(exception)
        self.processes.fail(exception)

    def await_recovery(self, trained_at_first: Mapping[str, bool]) -> None:
        """Drop what was set up because a rank is lost; the next `setup` recovers the state.

        Args:
            trained_at_first: Whether parameters trained when the run began, by name.
        """
        self._failed, self.has_trained = True, False
        self._slices.await_recovery(trained_at_first)
        # Otherwise `teardown` would move their state to the CPU and keep the old engine in memory.
        self.optimizers, self._restored = [], None
        self._dealer = self._steps = self.memory = None

    @property
    def awaits_recovery(self) -> bool:
        """Whether the slices' values have yet to be recovered, after a rank was lost."""
        return self._slices.awaits_recovery

    @override
    def teardown(self) -> None:
        with self.processes.watching():  # Ranks may gather whole weights.
            self._slices.end(self._lightning_module, failed=self._failed)
        module = self._lightning_module
        if not self._failed:
            self.processes.stop_watching()
        elif module is not None and any(parameter.is_meta for parameter in module.parameters()):
            # Lightning moves the module to the CPU. Meta tensors refuse that, which would hide the
            # first error.
            self._lightning_module = None
        super().teardown()
        # Not earlier: stand-ins have no values, so they can't be moved to the CPU as the slices
        # just were.
        self._slices.leave_stand_ins()
        # Stop watching last: after a failure it also ends waits for a dead rank in this method.
        self.processes.stop_watching()
