"""Keep a module's parameters as slices: save and load them whole, freeze, average, add gradients.

Checkpoint files are ones that plain Lightning reads, whatever plan cut the parameters.
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
from lightning_hetero.runtime.slices.known_by_shape import with_whole_shapes
from lightning_hetero.runtime.slices.slice_uses import KnownUses, SliceUses
from lightning_hetero.runtime.slices.standby_check import StandbyCheck
from lightning_hetero.runtime.slices.state import (
    agree_on_groups,
    cut_copy,
    cut_when_loading,
    gather_optimizer_state,
    leave_stand_ins,
    load_module_state,
    scatter_optimizer_state,
    spread_whole,
    stand_for_awaited,
    whole_module_state,
)
from lightning_hetero.runtime.slices.step_trial import Verdict, check_steps_alike
from lightning_hetero.runtime.slices.whole_tensors import NoNorms, check_optimizers
from lightning_hetero.strategy.trainable import check_parameter_hooks

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_hetero.runtime.ranks.communicators import Communicators
    from lightning_hetero.runtime.setup.layout import Slot
    from lightning_hetero.runtime.slices.known_by_shape import Awaited
    from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["SlicedState", "move_buffers", "read_checkpoint"]


class SlicedState:
    """A module's weights, and its optimizers' states, during a run and after it.

    1. `begin`: the engine has cut the parameters,
    2. whatever Lightning does with weights during the run,
    3. `end`: the module keeps its slices, or becomes whole,
    4. `leave_stand_ins`: once Lightning has moved what it moves to the CPU.

    Args:
        whole_after_run: See `HeteroStrategy`.
    """

    def __init__(self, *, whole_after_run: bool) -> None:
        self.engine: Engine | None = None
        """The engine that runs the plan; there from `begin` to `end`."""
        self._whole_after_run = whole_after_run
        self._comms: Communicators | None = None
        self._kept: SliceStore | None = None
        """Slices of the last run, for which the module has stand-ins now."""
        self._trained: SliceStore | None = None
        """Slices that the optimizers hold, even after the run that trained them."""
        self._cut_when_loading: RemovableHandle | None = None
        self._standbys: StandbyCheck | None = None
        """Compares slices with their standbys while it trains."""
        self._uses: SliceUses | None = None
        """Watches how hooks use slices."""
        self._were_watched = False
        """Whether `_uses` watched slices before the current iteration."""
        self.refusing_norms: AbstractContextManager[Any] = nullcontext()
        """The context of optimizers' steps, in which hooks may not take norms of slices."""
        self._example: Any = None
        """The module's `example_input_array`, hidden while it has slices."""
        self._awaited: list[tuple[Slot, Awaited]] = []
        """Placeholders of the module's slices between two generations of a run."""
        self.awaits_recovery = False
        """Whether the slices' values have yet to be recovered."""
        self.known_uses = KnownUses()
        """The uses of slices that earlier generations have seen; the others tell newcomers."""
        self._step_verdicts: dict[bytes, Verdict] = {}

    @property
    def _running(self) -> Engine:
        assert self.engine is not None, "the strategy has not been set up"
        return self.engine

    @property
    def _several(self) -> bool:
        return self._running.comms.world_size > 1

    # -- begin and end --------------------------------------------------------------------------

    def begin(self, engine: Engine, *, trains: bool) -> None:
        """Take over a run's engine, which has cut the parameters; `trains` if the run is a fit."""
        self.engine, self._comms, self._kept = engine, engine.comms, None
        if trains:
            self._trained = engine.store
            self._standbys = StandbyCheck(
                engine.store, engine.comms, num_steps=engine.config.standby_check_steps
            )
        is_whole = engine.comms.world_size == 2 and engine.store.has_standbys
        others_lack = self._several and not is_whole
        self._uses = SliceUses(engine.store, others_lack=others_lack, known=self.known_uses)
        self.refusing_norms = NoNorms(engine.store) if self._several else nullcontext()

    def prepare_module(self, module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
        """Let whole states be loaded, and cut the copies of the module that callbacks keep."""
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
            # Lightning's summary would call the module on its example, and that needs it whole.
            self._example, module.example_input_array = module.example_input_array, None

    def await_recovery(self) -> None:
        """Drop all values; they are recovered when the next generation is set up."""
        self._forget_uses()
        if self.engine is not None:
            engine, self.engine = self.engine, None
            self._awaited = stand_for_awaited(engine.store)
            engine.remove()
        for slot, awaited in self._awaited:
            slot.put(awaited)
        self._comms = self._kept = self._trained = None
        self.awaits_recovery = True

    def end(self, module: pl.LightningModule | None, *, failed: bool) -> None:
        """Keep the slices after the run, or make the module whole, which is collective."""
        self._forget_uses()
        if module is not None and self._example is not None:
            module.example_input_array, self._example = self._example, None
        if self._cut_when_loading is not None:
            self._cut_when_loading.remove()
            self._cut_when_loading = None
        if self.engine is None:
            return
        self.known_uses = KnownUses()
        engine, self.engine = self.engine, None
        if not failed:
            engine.buffers.share()
        engine.remove()
        if self._whole_after_run and not failed:
            spread_whole(engine.store, engine.comms)
        elif engine.comms.world_size > 1:
            self._kept = engine.store

    def leave_stand_ins(self) -> None:
        """Replace the module's slices by stand-ins, which have no values to move."""
        if self._kept is not None:
            leave_stand_ins(self._kept)

    # -- how hooks use slices -------------------------------------------------------------------

    def begin_iteration(self, *, trains: bool) -> None:
        """Stop watching uses of slices: an iteration begins."""
        self._were_watched = self._uses is not None and self._uses.stop()
        if self._were_watched and trains and self._uses is not None:
            # A generation of fewer ranks allows more uses, so it doesn't count.
            self.known_uses.were_watched |= self._uses.others_lack

    def end_iteration(self, *, trains: bool, is_looked_at: bool = False) -> None:
        """Watch uses of slices after an iteration, if its hooks are to be looked at."""
        if self._uses is not None:
            if trains:
                self._uses.is_after_step = True
            if (is_looked_at or self.known_uses.ask_later) if trains else self._were_watched:
                self._uses.start()

    def watch_uses(self) -> None:
        """Watch uses of slices from now on, until the next iteration."""
        known = self.known_uses
        if self._uses is not None and (known.ask_first or not known.were_watched):
            self._uses.start()

    def leave_hooks(self) -> None:
        """Note that an optimizer steps now: the hooks before the step have ended."""
        if self._uses is not None:
            self._uses.leave_hooks()

    def _forget_uses(self) -> None:
        if self._uses is not None:
            self._uses.stop()
            self._uses = None
        self.refusing_norms = nullcontext()

    # -- weights that the engine must pull again ------------------------------------------------

    def share_buffers(self) -> None:
        """Let the evaluation that begins use the present buffers and weights; collective."""
        self._running.buffers.share()
        # Callbacks such as weight averaging may swap weights in before and out after validation.
        self._running.mark_weights_stale()

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
                # What it has noted to be saved is this rank's view from before they agreed.
                groups = callback._apply_mapping_to_param_groups(optimizer.param_groups, names)
                callback._internal_optimizer_metadata[index] = groups

    # -- optimizers -----------------------------------------------------------------------------

    def whole_shapes(self) -> AbstractContextManager[None]:
        """Return a context in which parameters show their whole shapes, to make optimizers in."""
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
            # The callback may go to another Trainer after this run.
            with nullcontext() if self.engine is None else self.whole_shapes():
                hook(*args)

        return run

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that need more of a parameter than its slices; collective."""
        store = self._running.store
        check_optimizers(list(optimizers), store.slices)
        if store.has_standbys:
            check_steps_alike(optimizers, store, self._running.comms, self._step_verdicts)

    def deposit_gradients(self, scale: float) -> None:
        """Add the iteration's gradients, times `scale`, to the slices', as a backward would."""
        engine = self._running
        masters = engine.store.masters
        for name, gradient in engine.gradients.items():
            master = masters[name]
            if scale != 1.0:
                gradient.mul_(scale)
            if master.grad is None:
                master.grad = gradient
            else:
                master.grad += gradient
        engine.gradients = {}

    def owned_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parts of parameters' gradients that this rank owns: norms count these rows."""
        store = self._running.store
        gradients = {item: item.grad for item in parameters if item.grad is not None}
        if not store.has_standbys:
            return list(gradients.values())
        names: dict[Tensor, str] = {master: name for name, master in store.masters.items()}
        owned = [store.owned_parts(names[item], grad) for item, grad in gradients.items()]
        return [part for parts in owned for part in parts]

    def note_step(self) -> None:
        """Note that an optimizer has changed the slices."""
        if self._uses is not None:
            self._uses.return_to_hooks()
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
            self.engine.settle()  # Raises if the last iteration's numbers are bad: save none.
            self.engine.buffers.share()
        assert self._comms is not None
        return whole_module_state(store, self._comms, module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0; collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if not optimizer.param_groups:  # Lightning's own, where the module configures none.
            return optimizer.state_dict()
        assert self._trained is not None, "nothing was trained"
        assert self._comms is not None
        return gather_optimizer_state(self._trained, self._comms, optimizer)

    def load_module(
        self, module: pl.LightningModule, state: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Take this rank's slices of a whole module's state."""
        load_module_state(self._running.store, module, state, strict=strict)
        self._running.mark_weights_stale()

    def load_optimizers(
        self,
        trainer: pl.Trainer,
        optimizers: Callable[[], Sequence[Optimizer]],
        states: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take this rank's slices of whole optimizer states.

        Args:
            trainer: The run's.
            optimizers: Returns the run's optimizers; called once callbacks have added groups.
            states: The whole state of each optimizer.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, BaseFinetuning):
                # It makes the groups that it added again, but Lightning has called it too early:
                # this strategy restores callbacks after `on_fit_start`.
                callback.on_fit_start(trainer, trainer.lightning_module)
        for optimizer, state in zip(optimizers(), states, strict=True):
            if optimizer.param_groups:
                scatter_optimizer_state(self._running.store, optimizer, state)


def move_buffers(module: pl.LightningModule, device: torch.device) -> None:
    """Move a module's buffers; its parameters are slices on the device already."""
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
        by_pages: Whether the file may be mapped, so that a rank reads only the pages of its slices.
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
        # Lightning hands `weights_only` to no strategy that restores after setup.
        raise CheckpointError(
            f"{checkpoint_path} holds more than tensors and plain values, and reading that can "
            f"run code: {str(error).splitlines()[0]} Allow its classes by "
            "torch.serialization.add_safe_globals, or, if you trust the file, set "
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 for this run."
        ) from error
