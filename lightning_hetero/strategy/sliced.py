"""What Lightning does with a module's weights while they are slices.

It saves and loads them whole (files that plain Lightning reads), copies them for averages, swaps
them around validation. `HeteroStrategy` adds the plan and the steps.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.slices.known_by_shape import with_whole_shapes
from lightning_hetero.runtime.slices.state import (
    agree_on_groups,
    cut_copy,
    cut_when_loading,
    gather_optimizer_state,
    leave_stand_ins,
    load_module_state,
    scatter_optimizer_state,
    spread_whole,
    whole_module_state,
)
from lightning_hetero.runtime.slices.whole_tensors import no_norm_of_slices
from lightning_hetero.strategy.processes import ProcessesStrategy

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["SlicesStrategy"]


class SlicesStrategy(ProcessesStrategy):
    """Keeps a module's parameters as slices; how they are trained is a subclass's.

    Args:
        whole_after_run: See `HeteroStrategy`.
        **options: See `ProcessesStrategy`.
    """

    def __init__(self, *, whole_after_run: bool, **options: Any) -> None:
        super().__init__(**options)
        # Other processes than these would get the module back, and they have no slices.
        self._whole_after_run = whole_after_run or self._start_method != "popen"
        self._failed = False
        self._engine: Engine | None = None
        self._kept: SliceStore | None = None
        """Slices of the last run, for which the module has stand-ins now."""
        self._trained: SliceStore | None = None
        """What the optimizers hold, also after the run that trained."""
        self._cut_when_loading: RemovableHandle | None = None
        self._example: Any = None
        """The module's `example_input_array`, hidden while it has slices."""

    @property
    def engine(self) -> Engine:
        """What runs the plan; there from `setup` to `teardown`."""
        assert self._engine is not None, "the strategy has not been set up"
        return self._engine

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _cut_copies(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Let whole state dicts be loaded into slices, and cut what callbacks have copied."""
        assert self._communicators is not None
        store = self.engine.store
        self._cut_when_loading = cut_when_loading(module, store)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                continue
            copy = callback._average_model
            if copy is not None:
                whole = copy.module if isinstance(copy, AveragedModel) else copy
                cut_copy(whole, store, self._communicators)

    def _hide_example(self, module: pl.LightningModule) -> None:
        """Keep Lightning's summary from calling the module on its example: that needs it whole."""
        if self.world_size > 1:
            self._example, module.example_input_array = module.example_input_array, None

    @override
    def model_to_device(self) -> None:
        # Parameters are slices on the device already; what is left are buffers.
        for owner in self._module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        several = self.world_size > 1
        with with_whole_shapes(self.engine.store) if several else nullcontext():
            super().setup_optimizers(trainer)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._kept is not None:
            # Not earlier: what has no values can't move to CPU, as the slices just did.
            leave_stand_ins(self._kept)

    # -- weights that the engine must pull again -------------------------------------------------

    def _follow_freezing(self) -> None:
        """Train what callbacks have frozen or thawed since; called by every rank."""
        if not self.engine.plans.follow_freezing():
            return
        assert self._communicators is not None
        names = {master: name for name, master in self.engine.store.masters.items()}
        for index, optimizer in enumerate(self.optimizers):
            agree_on_groups(self.engine.store, self._communicators, optimizer)
            for callback in self._finetuning_callbacks():
                # What it wrote down to save is this rank's view before they agreed.
                groups = callback._apply_mapping_to_param_groups(optimizer.param_groups, names)
                callback._internal_optimizer_metadata[index] = groups

    def _finetuning_callbacks(self) -> list[BaseFinetuning]:
        callbacks: list[pl.Callback] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        return [item for item in callbacks if isinstance(item, BaseFinetuning)]

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        several = self.world_size > 1
        with no_norm_of_slices(self.engine.store) if several else nullcontext():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.engine.mark_weights_stale(only_trainable=True)
        return output

    @override
    def on_train_start(self) -> None:
        self.engine.mark_weights_stale()

    @override
    def on_validation_start(self) -> None:
        self.engine.buffers.share()
        # Callbacks such as weight averaging may swap weights in before and out after validation.
        self.engine.mark_weights_stale()

    @override
    def on_validation_end(self) -> None:
        self.engine.mark_weights_stale()

    @override
    def on_test_start(self) -> None:
        self.engine.buffers.share()
        self.engine.mark_weights_stale()

    @override
    def on_predict_start(self) -> None:
        self.engine.buffers.share()
        self.engine.mark_weights_stale()

    # -- checkpoints ----------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def whole_state_dict(self) -> dict[str, Any]:
        """Return the whole module's `state_dict` on rank 0, an empty one elsewhere.

        During a run and behind it; every rank must call it. Behind a run the module keeps its
        slices: its Trainer goes on with them and saves checkpoints, and any other use of a value is
        refused.
        """
        store = self._kept if self._engine is None else self._engine.store
        if store is None:
            return self._module.state_dict()
        assert self._communicators is not None
        if self._engine is not None:
            self._engine.buffers.share()
        return whole_module_state(store, self._communicators, self._module)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.whole_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._communicators is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        assert self._trained is not None, "nothing was trained"
        return gather_optimizer_state(self._trained, self._communicators, optimizer)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(str(checkpoint_path))
        try:
            if type(self.checkpoint_io) is TorchCheckpointIO and path.is_file():
                # Every rank reads only the pages of its slices.
                with suppress(RuntimeError):
                    loaded: dict[str, Any] = torch.load(
                        path, map_location="cpu", mmap=True, weights_only=weights_only
                    )
                    return loaded
            return super().load_checkpoint(checkpoint_path, weights_only)
        except UnpicklingError as error:
            # Lightning hands `weights_only` to no strategy that restores after setup.
            raise CheckpointError(
                f"{checkpoint_path} holds more than tensors and plain values, and reading that can "
                f"run code: {str(error).splitlines()[0]} Allow its classes by "
                "torch.serialization.add_safe_globals, or, if you trust the file, set "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 for this run."
            ) from error

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_module_state(self.engine.store, self._module, checkpoint["state_dict"], strict=strict)
        self.engine.mark_weights_stale()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for callback in self._finetuning_callbacks():
            # It makes the groups that it added again, but Lightning has called it too early: this
            # strategy restores callbacks after `on_fit_start`.
            callback.on_fit_start(self._module.trainer, self._module)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            scatter_optimizer_state(self.engine.store, optimizer, state)
            _optimizer_to_device(optimizer, self.root_device)

    def _remove_engine(self) -> None:
        """Keep the slices for what comes behind the run, or make the module whole, collectively."""
        if self._example is not None:
            self._module.example_input_array, self._example = self._example, None
        if self._cut_when_loading is not None:
            self._cut_when_loading.remove()
            self._cut_when_loading = None
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        if not self._failed:
            engine.buffers.share()
        engine.remove()
        if self._whole_after_run and not self._failed:
            spread_whole(engine.store, engine.comms)
        elif self.world_size > 1:
            self._kept = engine.store
