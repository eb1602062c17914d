"""`LayerwiseCheckpoint`: save slices in the background, and go on from the newest checkpoint.

After a step every rank passes its slices, their optimizer state and the state of Lightning's loops
to a `CheckpointWriter`; training waits only for the copy to host memory. When fitting starts, the
newest complete checkpoint in any place is restored, whatever plan and number of ranks saved it
(AutoHet §IV). This callback only connects Lightning with `lightning_hetero.checkpoint`.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed import is_torchelastic_launched
from torchmetrics import Metric
from typing_extensions import override

from lightning_hetero.callbacks.checkpointing.live import LiveSteps
from lightning_hetero.callbacks.checkpointing.owned import OwnedState
from lightning_hetero.callbacks.checkpointing.places import (
    FinishedStep,
    Found,
    Places,
    peers_of,
    probe,
    report_recovery,
    take_leases,
)
from lightning_hetero.callbacks.checkpointing.training_state import (
    content_of,
    dump_metadata,
    go_on,
    has_finished_epoch,
    is_complete,
    restore,
)
from lightning_hetero.checkpoint import (
    CheckpointId,
    CheckpointWriter,
    Peers,
    Recovered,
    Recovery,
    SavedCheckpoint,
    WriterOptions,
)
from lightning_hetero.checkpoint.store import local_folder
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.runtime.ranks.failure import AgreedExit
from lightning_hetero.strategy.run import note, run_of

if TYPE_CHECKING:
    from lightning_hetero.checkpoint.claims import Lease


class LayerwiseCheckpoint(Checkpoint):
    """Save every n optimizer steps, layer by layer and slice by slice, and resume automatically.

    `Trainer.fit` continues from the newest complete checkpoint that any node or the remote store
    has; a `ckpt_path` is read at the first start only. To start anew, delete the folders on all
    nodes. Only one job at a time may use them. The callback needs `HeteroStrategy`, also on one
    device; a resumed run may have another plan.

    ::

        saving = LayerwiseCheckpoint("s3://bucket/run", every_n_train_steps=100)
        trainer = Trainer(strategy=HeteroStrategy(), callbacks=[saving])
        trainer.fit(model, datamodule)

    Args:
        path_or_url: A folder or URL that all nodes reach, such as "s3://bucket/run"; None keeps
            checkpoints only in `local_dir`.
        every_n_train_steps: Optimizer steps between checkpoints; the last step is saved as well.
        local_dir: A folder on each node's own disk, not shared between nodes. A restart then reads
            from the remote store only what no node has.
        replicas: Number of nodes that store each slice locally; with 2 the loss of a node loses no
            slice.
        keep: Number of complete checkpoints to keep on disk and in the remote store.
        shared_memory: Whether to keep the newest checkpoint also in shared memory, where it
            outlives the process. That memory is freed when the run has ended and a disk or store
            has the checkpoint.
        timeout: How long to wait for storage that makes no progress, or for a rank that doesn't
            answer. Storage that is slow but makes progress is waited for without limit.
        lasting_within: How long training goes on while neither a disk nor a store accepts a
            checkpoint; after that it ends with an error. A failed save isn't repeated: the next
            checkpoint is the next attempt.
        storage_options: Options of the URL's filesystem, such as an endpoint.
        skip_unreadable: Whether to ignore places that can't be read when fitting starts, although
            one may have the newest checkpoint.
        resume: Whether to continue from the newest checkpoint. If False, each start of the script
            begins a new run: old checkpoints stay, but no later start continues from them.

    Raises:
        ConfigurationError: The options contradict each other, or the strategy and callbacks do.
        CheckpointError: There are checkpoints, but none can be read; a place can't be read or
            written when fitting starts, or another live job writes there; no disk or store has
            taken a checkpoint for too long, or none has the newest one when training ends.
    """

    def __init__(  # noqa: PLR0913 - what a user chooses
        self,
        path_or_url: str | Path | None = None,
        *,
        every_n_train_steps: int = 100,
        local_dir: str | Path | None = None,
        replicas: int = 1,
        keep: int = 2,
        shared_memory: bool = True,
        timeout: timedelta = timedelta(minutes=5),
        lasting_within: timedelta = timedelta(minutes=30),
        storage_options: Mapping[str, Any] | None = None,
        skip_unreadable: bool = False,
        resume: bool = True,
    ) -> None:
        if every_n_train_steps < 1:
            raise ConfigurationError(
                f"every_n_train_steps is {every_n_train_steps}; it must be 1 or more."
            )
        stall_s, lasting_s = timeout.total_seconds(), lasting_within.total_seconds()
        # Absolute, in case the process changes its working directory later.
        place = path_or_url and (local_folder(path_or_url) or path_or_url)
        self.places = Places(
            path_or_url=None if place is None else str(place),
            local_dir=None if local_dir is None else str(Path(local_dir).absolute()),
            shared_memory=shared_memory,
            keep=keep,
            storage_options=storage_options or {},
            # Half of it: ranks wait for each other for longer, so the error names the storage, not
            # a rank.
            stall_s=stall_s / 2,
        )
        self.saved: SavedCheckpoint | None = None
        """The last checkpoint that was started."""
        self._every_n_train_steps = every_n_train_steps
        self._options = WriterOptions(
            replicas=replicas, stall_s=stall_s, lasting_within_s=lasting_s
        )
        self._timeout = timeout
        self._skip_unreadable = skip_unreadable
        self._resume = resume
        self.node_of_rank: tuple[str, ...] = ()
        """Name of each rank's node, from the start of fitting."""
        self._leases: list[Lease] = []
        self._writer: CheckpointWriter | None = None
        self._peers = Peers()
        self._start = CheckpointId(0)
        self._last_step = 0
        self._found: Found | None = None
        """The state that is being restored; None once training has started."""
        self.live = LiveSteps()
        """This rank's record of the last step."""
        self._phases = {"meet": time.time()}
        """When each phase of a start began, in seconds since 1970."""

    # -- start ----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        run = run_of(trainer)
        run.join(run.checkpoints, self)
        if stage == "fit":
            self._phases["plan"] = time.time()
            if not self._resume and is_torchelastic_launched():
                raise ConfigurationError(
                    "Under torchrun LayerwiseCheckpoint(resume=False) would begin anew with every "
                    "restart. Give each run a folder or URL of its own, or delete the old one."
                )
            self._peers = peers_of(trainer, self._timeout.total_seconds())
            if not self._skip_unreadable and run.has_joiners:
                # Early, before the run spends time on planning and measuring.
                probe(self.places, self._peers, is_first_of_node=trainer.local_rank == 0)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._phases["fetch"] = time.time()
        run, owned = run_of(trainer), OwnedState(trainer)
        if run.trained_at_first is None:
            run.trained_at_first = owned.trains()
        goes_on, needs = _goes_on(trainer), owned.needs()
        live = self.live.recover(needs, self._peers) if goes_on else None
        why_not_live = live if isinstance(live, str) else None
        is_first = trainer.local_rank == 0
        tiers, self._leases = take_leases(
            self.places, self._peers, is_first_of_node=is_first, tidies=not goes_on
        )
        recovery = Recovery(
            tiers,
            node=self.places.node,
            peers=self._peers,
            skip_unreadable=self._skip_unreadable,
        )
        self.node_of_rank = recovery.node_of_rank
        anew = not self._resume and not goes_on
        recovered = live if isinstance(live, Recovered) else None
        if recovered is None and not anew:
            recovered = recovery.recover(needs)
        if recovered is None and why_not_live is not None:
            raise CheckpointError(
                f"A rank was lost before any checkpoint was complete, and {why_not_live}; so "
                "there is nothing to go on from in place. Start again."
            )
        self._start = recovery.begin_run(recovered, anew=anew)
        if is_first:
            self.places.forget_other_runs(self._start.run)
        self._writer = CheckpointWriter(
            tiers, node_of_rank=self.node_of_rank, peers=self._peers, options=self._options
        )
        if recovered is None:
            return
        self._phases["load"] = time.time()
        # A step that ranks still have in memory may not have been saved, or not by all ranks.
        self._last_step = 0 if live is recovered else recovered.id.step
        restore(trainer, recovered)
        if goes_on:
            _reset_metrics(pl_module)
        self._found = Found(
            recovered=recovered,
            is_live=live is recovered,
            why_not_live=why_not_live,
        )
        if is_complete(trainer):
            # Training will not start.
            self._report(trainer)
            rank_zero_warn(
                f"LayerwiseCheckpoint: this run is already complete at step {recovered.id.step}, "
                "so nothing is trained. To go on, raise the Trainer's max_steps or max_epochs; to "
                "train it anew, delete its folders (on all nodes), or give resume=False."
            )

    def _report(self, trainer: pl.Trainer) -> None:
        found, self._found = self._found, None
        if found is not None:
            report_recovery(trainer, found, self.places, self._peers, self._phases)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found, strategy = self._found, run_of(trainer).strategy
        if found is not None:
            self._report(trainer)
            go_on(trainer, found.recovered)
        elif strategy.processes.outlives_ranks:
            # Save at once: before the first checkpoint, the state of a lost rank couldn't be
            # recovered.
            self.live.note_step(trainer)
            self._save(trainer)

    # -- steps ----------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._wait_for_snapshot()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Weight averaging may swap weights now.
        self._wait_for_snapshot()
        self.live.begin_evaluation(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.live.begin_epoch(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if trainer.fit_loop._should_accumulate():
            return
        self.live.note_step(trainer)  # First: from here on ranks wait for each other.
        if trainer.local_rank == 0:
            self.places.note(FinishedStep(step=step, at_s=time.time(), run=self._start.run))
        is_saved = False
        for restarter in run_of(trainer).restarters:
            is_saved |= restarter.end_step(trainer)
        is_due = step % self._every_n_train_steps == 0 or step == trainer.max_steps
        if is_due and not is_saved:
            self._save(trainer)
            if step == trainer.max_steps or has_finished_epoch(trainer):
                # Other callbacks, such as weight averaging, may change the slices now.
                self._wait_for_snapshot()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_last = trainer.should_stop or trainer.global_step == trainer.max_steps
        is_last |= trainer.current_epoch + 1 == trainer.max_epochs
        if is_last and self._last_step != trainer.global_step:
            self._save(trainer).wait_for_snapshot()

    def save(self, trainer: pl.Trainer, *, leaving: Collection[str]) -> SavedCheckpoint:
        """Save the step that has ended, and copy the parts of `leaving` nodes to others."""
        saved = self._save(trainer, leaving=leaving)
        if self._writer is not None:
            self._writer.upload_newest()
        return saved

    def _save(self, trainer: pl.Trainer, *, leaving: Collection[str] = ()) -> SavedCheckpoint:
        assert self._writer is not None
        self._raise_if_lost()
        owned = OwnedState(trainer)
        id_ = replace(self._start, step=trainer.global_step)
        content = content_of(trainer, owned, id_, dump_metadata(trainer, owned))
        self.saved = self._writer.save(content, leaving=leaving)
        self._last_step = trainer.global_step
        note(trainer, "checkpoint", complete=self._writer.complete_steps)
        return self.saved

    def _raise_if_lost(self) -> None:
        for lease in self._leases:
            lease.raise_if_lost()

    def _wait_for_snapshot(self) -> None:
        if self.saved is not None:
            self.saved.wait_for_snapshot()

    # -- end ------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._writer is not None:
            self._raise_if_lost()
            # Raises unless a lasting place has the newest checkpoint; shared memory then keeps it.
            self._writer.close()
            note(trainer, "checkpoint", complete=self._writer.complete_steps)
        if trainer.local_rank == 0 and self.saved is not None:
            self.places.forget_memory()
        self._let_go()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._let_go()  # `on_train_end` isn't called if there was nothing left to train.
        self.live = LiveSteps()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        # Don't wait for unfinished writes: other ranks may be gone, and a restart is due. If this
        # rank leaves alone, the others go on in its folders.
        self._let_go(goes_on=isinstance(exception, AgreedExit) and exception.code == 0)
        self.live = LiveSteps()

    def keep_live(self, trainer: pl.Trainer, generation: int) -> bool:
        """Keep the state of the last step of a generation that has ended; return whether it is."""
        return self.live.keep(trainer, self._start, generation)

    def on_generation(self, trainer: pl.Trainer, old: Any, new: Any) -> None:
        """Restart the clock that measures the phases of a start."""
        self._phases = {"meet": time.time()}

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Does nothing after a run's normal end. After the loss of a rank, another fit may follow.
        self._let_go(goes_on=_goes_on(trainer))
        self.saved = self._found = None

    def _let_go(self, *, goes_on: bool = False) -> None:
        writer, leases, self._writer, self._leases = self._writer, self._leases, None, []
        if writer is not None:
            writer.leave()
        for lease in leases:
            lease.release(goes_on=goes_on)
        self.node_of_rank = ()
        self._peers.close()


def _reset_metrics(module: pl.LightningModule) -> None:
    """Reset metrics, as a new process would: those of all ranks must cover the same steps."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.reset()


def _goes_on(trainer: pl.Trainer) -> bool:
    return run_of(trainer).strategy.awaits_recovery
