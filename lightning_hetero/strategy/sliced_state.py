"""Manage a module's parameters as slices: save and load whole ones, freeze, average, add gradients.

Plain Lightning can read the checkpoint files, under whatever plan the parameters were cut.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.slices.digests import StandbyCheck
from lightning_hetero.runtime.slices.known_by_shape import with_whole_shapes
from lightning_hetero.runtime.slices.rows import HookedSlices
from lightning_hetero.runtime.slices.state import (
    agree_on_groups,
    cut_copy,
    cut_when_loading,
    gather_optimizer_state,
    leave_stand_ins,
    spread_frozen,
    spread_whole,
    stand_for_awaited,
    whole_module_state,
)
from lightning_hetero.strategy.trainable import check_parameter_hooks

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_hetero.runtime.ranks.communicators import Communicators
    from lightning_hetero.runtime.setup.layout import Slot
    from lightning_hetero.runtime.slices.known_by_shape import StandIn
    from lightning_hetero.runtime.slices.weights import SliceStore


class SlicedState:
    """A module's weights and its optimizers' states, during a run and after it.

    1. `begin`: after the engine has cut the parameters.
    2. The run, in which Lightning saves, loads and changes weights.
    3. `end`: the module keeps its slices, or becomes whole.
    4. `leave_stand_ins`: after Lightning has moved the module to the CPU.

    Args:
        whole_after_run: See `HeteroStrategy`.
    """

    def __init__(self, *, whole_after_run: bool) -> None:
        self.engine: Engine | None = None
        """The engine that runs the plan; there from `begin` to `end`."""
        self._whole_after_run = whole_after_run
        self._comms: Communicators | None = None
        self._kept: SliceStore | None = None
        """The slices of the last run, if the module has stand-ins for them now."""
        self._trained: SliceStore | None = None
        """The slices that the optimizers have, also after the run that trained them."""
        self._cut_when_loading: list[RemovableHandle] = []
        self._standbys: StandbyCheck | None = None
        """Compares slices with their standbys during training."""
        self.hooked: HookedSlices | None = None
        """Gives hooks access to the slices; there from `begin` to `end`."""
        self._example: Any = None
        """The module's `example_input_array`, hidden while it has slices."""
        self._awaited: list[tuple[Slot, StandIn]] = []
        """Where the module had slices, and the stand-ins that are there between two generations of
        a run."""
        self.awaits_recovery = False
        """Whether the slices' values still have to be recovered."""

    @property
    def _running(self) -> Engine:
        assert self.engine is not None, "the strategy has not been set up"
        return self.engine

    @property
    def _several(self) -> bool:
        return self._running.comms.world_size > 1

    # -- begin and end --------------------------------------------------------------------------

    def begin(
        self, engine: Engine, *, trains: bool, reduce: Callable[[Tensor, str], Tensor]
    ) -> None:
        """Take over a run's engine, which has cut the parameters.

        Args:
            engine: The engine.
            trains: Whether the run is a fit.
            reduce: Returns a "sum", "max" or "min" over all ranks.
        """
        self.engine, self._comms, self._kept = engine, engine.comms, None
        if trains:
            self._trained = engine.store
            self._standbys = StandbyCheck(
                engine.store, engine.comms, num_steps=engine.config.standby_check_steps
            )
        is_whole = engine.comms.world_size == 2 and engine.store.has_standbys
        is_needed = self._several and not is_whole
        self.hooked = HookedSlices(engine.store, reduce, is_needed=is_needed)

    def prepare_module(self, module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
        """Let whole states be loaded, and cut the module's copies that callbacks keep."""
        engine = self._running
        self._cut_when_loading = cut_when_loading(module, engine.store)
        for callback in callbacks:
            if not isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                continue
            copy = callback._average_model
            if copy is not None:
                whole = copy.module if isinstance(copy, AveragedModel) else copy
                cut_copy(whole, engine.store, engine.comms)
        if self._several:
            # Lightning's summary would call the module on its example, for which it must be whole.
            self._example, module.example_input_array = module.example_input_array, None

    def await_recovery(self, trained_at_first: Mapping[str, bool]) -> None:
        """Drop all values; the set-up of the next generation recovers them.

        It also recovers what callbacks have frozen or unfrozen. Until then parameters train as
        `trained_at_first` says, as they do in the script of a rank that joins.
        """
        self._leave_hooks()
        if self.engine is not None:
            engine, self.engine = self.engine, None
            self._awaited = stand_for_awaited(engine.store, trained_at_first)
            engine.remove()
        for slot, awaited in self._awaited:
            slot.put(awaited)
        self._comms = self._kept = self._trained = None
        self.awaits_recovery = True

    def note_recovery(self) -> None:
        """Note that the slices were recovered, so may have changed."""
        self._running.mark_weights_stale()
        self.awaits_recovery = False

    def end(self, module: pl.LightningModule | None, *, failed: bool) -> None:
        """Keep the slices after the run, or make the module whole, which is collective."""
        self._leave_hooks()
        if module is not None and self._example is not None:
            module.example_input_array, self._example = self._example, None
        for handle in self._cut_when_loading:
            handle.remove()
        self._cut_when_loading = []
        if self.engine is None:
            return
        engine, self.engine = self.engine, None
        if not failed:
            engine.buffers.share()
        engine.remove()
        if self._whole_after_run and not failed:
            spread_whole(engine.store, engine.comms)
        elif engine.comms.world_size > 1:
            self._kept = engine.store
        else:
            spread_frozen(engine.store)

    def leave_stand_ins(self) -> None:
        """Replace the module's slices by stand-ins, which have no values that could be moved."""
        if self._kept is not None:
            leave_stand_ins(self._kept)

    def _leave_hooks(self) -> None:
        if self.hooked is not None:
            self.hooked.close()
            self.hooked = None

    def follow_freezing(
        self, optimizers: Sequence[Optimizer], callbacks: Iterable[Callback]
    ) -> None:
        """Follow what callbacks have frozen or unfrozen since the last call; called by every rank.

        Raises:
            ConfigurationError: A parameter has got a hook that would never run.
        """
        engine = self._running
        check_parameter_hooks(engine.store.masters.items())
        if not engine.plans.follow_freezing():
            return
        names = {master: name for name, master in engine.store.masters.items()}
        finetuning = [item for item in callbacks if isinstance(item, BaseFinetuning)]
        for index, optimizer in enumerate(optimizers):
            agree_on_groups(engine.store, engine.comms, optimizer)
            for callback in finetuning:
                # What the callback has noted for its state covers only this rank's slices so far.
                groups = callback._apply_mapping_to_param_groups(optimizer.param_groups, names)
                callback._internal_optimizer_metadata[index] = groups

    # -- optimizers -----------------------------------------------------------------------------

    def whole_shapes(self) -> AbstractContextManager[None]:
        """Return a context in which parameters have their whole shapes, for making optimizers."""
        return with_whole_shapes(self._running.store) if self._several else nullcontext()

    def show_whole_in_summaries(self, callbacks: Iterable[Callback]) -> None:
        """Let Lightning's summaries count whole parameters, not this rank's slices."""
        for callback in callbacks:
            if isinstance(callback, ModelSummary):
                callback.on_fit_start = self._in_whole_shapes(  # type: ignore[method-assign]
                    partial(type(callback).on_fit_start, callback)
                )

    def _in_whole_shapes(self, hook: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            # The callback may be used by another Trainer after this run.
            with nullcontext() if self.engine is None else self.whole_shapes():
                hook(*args)

        return run

    def deposit_gradients(self, scale: float, *, are_first: bool) -> None:
        """Add the iteration's gradients, times `scale`, to the slices', as a backward would.

        Args:
            scale: The iteration's share in the gradients of a step.
            are_first: Whether it is the first iteration of a step.
        """
        engine, hooked = self._running, self.hooked
        assert hooked is not None
        masters = engine.store.masters
        trained = {
            name for name, item in masters.items() if item.requires_grad
        } - engine.gradients.unused
        hooked.note_gradients(trained if engine.gradients.are_finite else (), are_first=are_first)
        for name, gradient in engine.gradients.by_name.items():
            master = masters[name]
            if scale != 1.0:
                gradient.mul_(scale)
            if master.grad is None:
                master.grad = gradient
            else:
                master.grad += gradient
        engine.gradients.by_name = {}
        hooked.enter()

    def note_step(self) -> None:
        """Note that an optimizer has changed the slices."""
        self._running.mark_weights_stale(only_trainable=True)
        if self._standbys is not None:
            self._standbys.after_step()

    # -- checkpoints ----------------------------------------------------------------------------

    def whole_state_dict(self, module: pl.LightningModule) -> dict[str, Any]:
        """Return the whole module's `state_dict` on rank 0, an empty one elsewhere; collective."""
        store = self._kept if self.engine is None else self.engine.store
        if store is None:
            return module.state_dict()
        if self.engine is not None:
            self.engine.settle()  # Raises if the last sums are bad: they mustn't be saved.
            self.engine.buffers.share()
        assert self._comms is not None
        return whole_module_state(store, self._comms, module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0; collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if not optimizer.param_groups:  # Lightning's own, if the module configures no optimizer.
            return optimizer.state_dict()
        assert self._trained is not None, "nothing was trained"
        assert self._comms is not None
        return gather_optimizer_state(self._trained, self._comms, optimizer)

    def refit_finetuning(self, trainer: pl.Trainer) -> None:
        """Let callbacks add their groups to the optimizers again.

        Lightning asks them too early, because this strategy restores callbacks after
        `on_fit_start`.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, BaseFinetuning):
                callback.on_fit_start(trainer, trainer.lightning_module)


def move_buffers(module: pl.LightningModule, device: torch.device) -> None:
    """Move a module's buffers; its parameters are slices, which are on the device already."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def read_checkpoint(
    checkpoint_path: str | Path,
    *,
    weights_only: bool | None,
    by_pages: bool,
    otherwise: Callable[[str | Path, bool | None], dict[str, Any]],
) -> dict[str, Any]:
    """Return what a whole checkpoint's file holds.

    Args:
        checkpoint_path: The file.
        weights_only: See `torch.load`.
        by_pages: Whether to map the file into memory, so that a rank reads only the pages of its
            slices.
        otherwise: Reads a file that can't be mapped.

    Raises:
        CheckpointError: The file holds more than tensors and plain values.
    """
    path = Path(str(checkpoint_path))
    try:
        if by_pages and path.is_file():
            with suppress(RuntimeError):
                loaded: dict[str, Any] = torch.load(
                    path, map_location="cpu", mmap=True, weights_only=weights_only
                )
                return loaded
        return otherwise(checkpoint_path, weights_only)
    except UnpicklingError as error:
        # Lightning doesn't give `weights_only` to strategies that restore after setup.
        raise CheckpointError(
            f"{checkpoint_path} holds more than tensors and plain values, and reading that can "
            f"run code: {str(error).splitlines()[0]} Allow its classes by "
            "torch.serialization.add_safe_globals, or, if you trust the file, set "
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 for this run."
        ) from error
