"""Save and restore a run's state besides its slices: loops, schedulers, callbacks, data, buffers.

It is what Lightning puts into a checkpoint, with two differences: parameters stay in slices, and
everything can be read with `weights_only=True`, so no objects are pickled.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hetero.callbacks.checkpointing.owned import OwnedState, average_models
from lightning_hetero.checkpoint import CheckpointContent, CheckpointId, Recovered
from lightning_hetero.core.process import installed_version
from lightning_hetero.runtime.random_state import RandomState
from lightning_hetero.runtime.slices.state import without_weights
from lightning_hetero.strategy.run import run_of

_OWN = "lightning_hetero"
_DUE = "lightning_hetero validation due"


def content_of(
    trainer: pl.Trainer,
    owned: OwnedState,
    id_: CheckpointId,
    metadata: Mapping[str, Any],
    *,
    with_standbys: bool = False,
) -> CheckpointContent:
    """Return what this rank saves at a step's end: all that it owns, and its random state.

    With `with_standbys`, also the rows that it keeps as a standby, which other ranks save.
    """
    return CheckpointContent(
        id=id_,
        global_rank=trainer.global_rank,
        world_size=trainer.world_size,
        num_layers=owned.num_layers,
        slices=owned.contents(with_standbys=with_standbys),
        metadata=metadata,
        rank_metadata=RandomState.now().to_dict(),
        plan=owned.plan,
    )


def dump_metadata(trainer: pl.Trainer, owned: OwnedState) -> dict[str, Any]:
    """Return the checkpoint's entries that are equal on all ranks, under Lightning's names.

    Called by every rank; communicates if buffers have changed.
    """
    engine = run_of(trainer).strategy.engine
    engine.buffers.share()
    module: Any = trainer.lightning_module
    metadata: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": installed_version("lightning"),
        "state_dict": _buffers(module, owned),
        "loops": dump_loops(trainer),
        "optimizer_states": owned.optimizer_groups(),
        _OWN: {
            "averages": [dict(average.named_buffers()) for average in average_models(trainer)],
            "seed": engine.config.seed,
            "frozen": owned.frozen_fingerprints(),
            "trains": _changed_freezing(trainer, owned),
        },
        **dump_changing(trainer),
    }
    for item in (module, trainer.datamodule):  # type: ignore[attr-defined]
        if item is not None and item.hparams:
            metadata[item.CHECKPOINT_HYPER_PARAMS_NAME] = getattr(item, "_hparams_name", "kwargs")
            metadata[item.CHECKPOINT_HYPER_PARAMS_KEY] = dict(item.hparams)
    for save in hooks_that_save(trainer):
        save(metadata)
    return metadata


def dump_changing(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the state of callbacks, schedulers, data and precision, which each step changes."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    plugin = trainer.precision_plugin
    states = {
        "callbacks": call._call_callbacks_state_dict(trainer),
        "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        _DUE: is_validation_due(trainer),
    }
    if plugin_state := plugin.state_dict():
        states[type(plugin).__qualname__] = plugin_state
    if datamodule is not None and (state := datamodule.state_dict()):
        states[type(datamodule).__qualname__] = state
    return states


def hooks_that_save(trainer: pl.Trainer) -> list[Callable[[dict[str, Any]], None]]:
    """Return the hooks of callbacks and module that add to a checkpoint or change one."""
    module = trainer.lightning_module
    hooks: list[Callable[[dict[str, Any]], None]] = [
        partial(callback.on_save_checkpoint, trainer, module)
        for callback in _callbacks(trainer)
        if getattr(callback.on_save_checkpoint, "__func__", None)
        is not pl.Callback.on_save_checkpoint
    ]
    if is_overridden("on_save_checkpoint", module, pl.LightningModule):
        hooks.append(module.on_save_checkpoint)
    return hooks


def restore(trainer: pl.Trainer, recovered: Recovered) -> None:
    """Restore the loops now, and let Lightning restore the rest after `on_fit_start`.

    Raises:
        CheckpointError: A frozen weight differs from the one that the run was trained with.
    """
    checkpoint = dict(recovered.metadata)
    own = checkpoint.pop(_OWN)
    owned = OwnedState(trainer)
    if owned.own_all_saved(own):
        owned = OwnedState(trainer)
    owned.freeze(own.get("trains", {}))
    if own["averages"]:
        # Averages are recovered with the slices, not from their callback's entries.
        warnings.filterwarnings("ignore", "The checkpoint was not created with WeightAveraging")
    strategy, connector = run_of(trainer).strategy, trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    strategy.engine.reseed(own["seed"])
    strategy.restore_from(Restored(trainer, owned, recovered, checkpoint=checkpoint, own=own))
    # Lightning does it again later, but it must be known earlier what is left to train.
    connector.restore_loops()
    # A loader that was made early (for `estimated_stepping_batches`) must be made again, from its
    # state.
    trainer.fit_loop._combined_loader = None


class Restored:
    """A recovered state, of which this rank has its slices; Lightning restores it."""

    def __init__(
        self,
        trainer: pl.Trainer,
        owned: OwnedState,
        recovered: Recovered,
        *,
        checkpoint: dict[str, Any],
        own: Mapping[str, Any],
    ) -> None:
        self.checkpoint = checkpoint
        self._trainer = trainer
        self._owned = owned
        self._by_name = {item.parameter: item for item in recovered.slices}
        self._averages = own["averages"]

    def load_weights(self) -> None:
        """Put weights and buffers into the module."""
        self._trainer.lightning_module.load_state_dict(self.checkpoint["state_dict"], strict=False)
        self._owned.load_weights(self._by_name)

    def load_optimizers(self) -> None:
        """Put the optimizers' states, and averages of weights, in place."""
        saved = self.checkpoint["optimizer_states"]
        states = self._owned.optimizer_states(self._by_name, saved)
        for optimizer, state in zip(self._owned.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self._owned.load_averages(self._by_name)
        for average, buffers in zip(average_models(self._trainer), self._averages, strict=True):
            for name, buffer in average.named_buffers():
                buffer.copy_(buffers[name])


def go_on(trainer: pl.Trainer, recovered: Recovered) -> None:
    """Let Lightning go on from a restored state; called when training starts."""
    # Not earlier, because the loader's iterator draws a random number when it is made.
    if recovered.rank_metadata is not None:  # Only if as many ranks saved the checkpoint.
        RandomState.from_dict(recovered.rank_metadata).put_back()
    if has_finished_epoch(trainer):
        # In an uninterrupted run the next epoch's iterator has drawn its random number by now.
        torch.empty((), dtype=torch.int64).random_()
        _begin_next_epoch(trainer)
    elif recovered.metadata.get(_DUE, False) and _validates_now(trainer):
        _make_up_validation(trainer)


def _changed_freezing(trainer: pl.Trainer, owned: OwnedState) -> dict[str, bool]:
    """Return, for parameters frozen or unfrozen since the first fit began, whether they train.

    Callbacks freeze and unfreeze once, for instance when an epoch begins; after a restart that
    epoch doesn't begin again.
    """
    first = run_of(trainer).trained_at_first or {}
    return {n: trains for n, trains in owned.trains().items() if trains is not first.get(n, trains)}


def _buffers(module: pl.LightningModule, owned: OwnedState) -> dict[str, Any]:
    return without_weights(module.state_dict(), owned.names_of_slots)


def dump_loops(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the state of all loops, and of the training loaders."""
    loops: dict[str, Any] = trainer._checkpoint_connector._get_loops_state_dict()
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    if batches.is_last_batch:
        # A loader restored to the end of this epoch would make the next epoch empty.
        loops["fit_loop"]["state_dict"].pop("combined_loader", None)
    if batches.current.completed < batches.current.processed:
        # In mid-epoch. If training was resumed at the end of the previous epoch, Lightning hasn't
        # counted the beginning of this one; a run resumed from such a state would stay an epoch
        # behind.
        for epochs in loops["fit_loop"]["epoch_progress"].values():
            epochs["ready"] = epochs["started"] = epochs["processed"] + 1
            epochs["completed"] = epochs["processed"]
    return loops


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks whose checkpoint hooks don't need whole weights."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [item for item in callbacks if not isinstance(item, WeightAveraging)]


def _begin_next_epoch(trainer: pl.Trainer) -> None:
    """Make Lightning count the epoch that begins after a resume at the end of another epoch.

    By itself, Lightning takes the new epoch for the rest of the old one. Checkpoints saved in it
    would then look like those of a finished epoch, and a second restart would begin the epoch
    again.
    """
    if trainer.num_training_batches != float("inf"):
        trainer.fit_loop.reset_restart_stage()


def is_complete(trainer: pl.Trainer) -> bool:
    """Whether a resumed run has nothing left to train."""
    # A checkpoint of an epoch's last batch is saved before the epoch counts as finished.
    is_last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.fit_loop.done or (is_last_epoch and has_finished_epoch(trainer))


def has_finished_epoch(trainer: pl.Trainer) -> bool:
    """Whether the last step was its epoch's last."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def is_epoch_ending(trainer: pl.Trainer) -> bool:
    """Whether the end of an epoch follows the batch that is being trained."""
    epoch_loop = trainer.fit_loop.epoch_loop
    has_begun = epoch_loop.batch_progress.current.ready > 0
    return has_begun and epoch_loop._num_ready_batches_reached()


def is_end_near(trainer: pl.Trainer) -> bool:
    """Whether the end of the epoch, or of training, follows the batch that was trained."""
    fit_loop = trainer.fit_loop
    stops = trainer.should_stop and fit_loop._can_stop_early
    return is_epoch_ending(trainer) or fit_loop.epoch_loop._is_training_done or stops


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Whether a validation in mid-epoch follows the batch that is being trained."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    batches = epoch_loop.batch_progress.current
    under_way = batches.completed < batches.ready and not is_epoch_ending(trainer)
    return under_way and _validates_now(trainer)


def _make_up_validation(trainer: pl.Trainer) -> None:
    """Make Lightning validate before it trains: a validation was due when the state was saved.

    By itself, it assumes that the validation after the saved step has been done.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    # As if the first batch of that validation had begun.
    epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
    epoch_loop.val_loop.batch_progress.reset_on_run()
    # Loggers' steps: the end of the step that was saved is counted once more.
    epoch_loop._batches_that_stepped -= 1


def _validates_now(trainer: pl.Trainer) -> bool:
    fit_loop: Any = trainer.fit_loop
    return bool(fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher))
