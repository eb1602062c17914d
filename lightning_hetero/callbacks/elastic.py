"""`ElasticRestart`: stop together when a machine is about to be taken away, and lose nothing.

A SIGTERM or a provider's notice only sets a flag. Each iteration's agreement carries the flags, so
all ranks learn of it in the same step, and none waits. At the end of that step all save, the parts
of leaving nodes are copied to nodes that stay, and all processes end with an exit code on which
torchrun restarts them on the remaining nodes (AutoHet §IV). A SIGTERM to the whole job may reach
one node much later than another. So while ranks wait for the checkpoint, they go on telling each
other which got one; if all did, they stay until it is uploaded.
"""

import logging
import os
import signal
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed import is_torchelastic_launched
from typing_extensions import override

from lightning_hetero.callbacks.checkpointing.training_state import (
    has_finished_epoch,
    is_epoch_ending,
)
from lightning_hetero.checkpoint import (
    NoticeWatcher,
    PreemptionNotice,
    SavedCheckpoint,
    SigtermNotice,
)
from lightning_hetero.core.errors import CheckpointError, ConfigurationError, PeerError
from lightning_hetero.runtime.ranks.failure import AgreedExit, GenerationChange
from lightning_hetero.strategy.run import Run, note, run_of

_log = logging.getLogger(__name__)

_SETTLE_S = 5.0
"""Seconds after ranks begin to stop in which a SIGTERM may still reach the other nodes."""


class ElasticRestart(Callback):
    """Turn SIGTERM and spot notices into a checkpoint and a restart.

    ::

        saving = LayerwiseCheckpoint("s3://bucket/run", local_dir="/scratch/run")
        trainer = Trainer(strategy=HeteroStrategy(), callbacks=[saving, ElasticRestart()])
        trainer.fit(model, datamodule)

    Needs a `LayerwiseCheckpoint` beside it, and for restarts torchrun with `--max-restarts`.

    With `in_place=True` the loss of a rank ends no other process, ranks that are told to leave do
    so alone, and new processes may join. Another process is started on the device of a lost one. To
    add more, start the same script, by hand or by another torchrun, with
    `LIGHTNING_HETERO_JOIN=host:port` in its environment: the address of the run's store, which rank
    0 prints. Joiners prepare alone as far as they can, and join between two steps. The script must
    call `fit` before `validate` and the like, and once per Trainer.

    The script then begins twice: in the process that was started, which at the first `fit` (or
    `validate`, …) becomes the keeper of a worker, and in the worker. Started as `torchrun ... -m
    lightning_hetero.keep script.py` it begins once. For callbacks, loggers and data modules each
    generation of ranks is a fit: they get `teardown`, `on_generation(trainer, old, new)` if they
    have it, and `setup` again. From `on_generation` on, `trainer.global_rank`, `world_size` and
    `is_global_zero` are new; rank 0 may be another process, which then logs. `on_exception` isn't
    called. A callback's `state_dict` is that of the step from which training goes on. With
    redundancy, `state_dict` and `on_save_checkpoint` are called after each step.

    Args:
        preemption_notice: Tells whether this machine will be taken away, such as `AwsSpotNotice()`;
            if there are several, each is asked. SIGTERM always counts.
        drain_timeout_s: How long to wait at the end until the checkpoint is safe: on the nodes, or,
            if all nodes go, in the remote store. Providers give 30 s (GCP, Azure) or 120 s (AWS),
            torchrun 30 s after its SIGTERM.
        in_place: Whether the other processes go on without a lost rank, under a plan for the
            remaining ranks and with as many samples per iteration as before. With
            `HeteroStrategy(redundancy=1)` they go on from their own slices, and no step is lost. In
            three cases they go back to the newest checkpoint, and the log says why: a slice's owner
            and standby are both lost, only some ranks have made the optimizer step, or an epoch or
            training was about to end. Ranks that leave on a notice, and joiners, cost no step,
            since all save first. All processes end, as without this option, if there is no
            checkpoint yet, if the node that serves the store is lost, or if the same fault recurs.
        heartbeat_timeout: With `in_place`, a rank counts as lost after this long without a
            heartbeat (before training begins, after 20 s). A process that has died is noticed at
            once.
        replace_lost: With `in_place`, whether another process is started on the device of one that
            was lost (not of one that left): after 5 s, and if one is lost there again within an
            hour, after 20 s, 80 s, …, 10 minutes. Never after SIGTERM, SIGINT or SIGHUP.

    Raises:
        ConfigurationError: There is no LayerwiseCheckpoint, a number is too small, or `in_place`
            doesn't work here.
    """

    def __init__(
        self,
        preemption_notice: PreemptionNotice | Sequence[PreemptionNotice] | None = None,
        *,
        drain_timeout_s: float = 25.0,
        in_place: bool = False,
        heartbeat_timeout: timedelta = timedelta(seconds=2),
        replace_lost: bool = True,
    ) -> None:
        if drain_timeout_s <= 0:
            raise ConfigurationError(f"drain_timeout_s is {drain_timeout_s}; it must be above 0.")
        notices = [] if preemption_notice is None else preemption_notice
        self._notices = list(notices) if isinstance(notices, Sequence) else [notices]
        if heartbeat_timeout.total_seconds() < 0.5:
            raise ConfigurationError(
                f"heartbeat_timeout is {heartbeat_timeout.total_seconds()} s; it must be 0.5 s or "
                "more, or ranks that only compute would count as lost."
            )
        self.in_place, self.replace_lost = in_place, replace_lost
        self.heartbeat_timeout = heartbeat_timeout
        self._drain_timeout_s = drain_timeout_s
        self._sigterm: SigtermNotice | None = None
        self._between: SigtermNotice | None = None
        """Notes a SIGTERM between the end of a fit and the start of training in the next fit."""
        self._watcher: NoticeWatcher | None = None
        self._run: Run
        """The run; from `setup` on."""
        self._global_rank = 0
        self._is_first_of_node = True
        self._is_excluded = False
        self._change: GenerationChange | None = None
        """Raised before the next step, to end this generation."""
        self._holds_back = False
        self._lets_in_at_s = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._run = run = run_of(trainer)
        run.join(run.restarters, self)
        self._global_rank = trainer.global_rank
        self._is_first_of_node = trainer.local_rank == 0
        if self.in_place:
            if stage == "fit":
                self._check_in_place(trainer)
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank_zero_warn(
                "Nodes can't come and go: torchrun would send restarted processes to the store of "
                "the first start. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts."
            )

    def _check_in_place(self, trainer: pl.Trainer) -> None:
        if trainer.world_size > 1 and not self._run.strategy.processes.outlives_ranks:
            raise ConfigurationError(
                "ElasticRestart(in_place=True) needs processes that run a script again, started by "
                "torchrun, by hand or by HeteroStrategy(start_method='popen'). Leave in_place out."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        count = len(self._run.checkpoints)
        if count != 1:
            raise ConfigurationError(
                f"ElasticRestart needs one LayerwiseCheckpoint among the callbacks; there are "
                f"{count}. Give the Trainer one."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Until now the strategy handled SIGTERM.
        self._sigterm = self._hear_sigterm(told=self._run.strategy.engine.is_leaving)
        if self._notices and trainer.local_rank == 0:
            self._watcher = NoticeWatcher(self._notices)
            self._watcher.start()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        change, self._change = self._change, None
        if change is not None:
            raise change
        engine = self._run.strategy.engine
        engine.tell(is_leaving=self.is_leaving, sees_joiners=self._sees_joiners(trainer))

    def _sees_joiners(self, trainer: pl.Trainer) -> bool:
        """On rank 0, whether joiners wait that may join after this step.

        Not after an epoch's last step: a checkpoint from before the epoch's end lacks what that end
        changes. One step later they may, even if that step also ends an epoch.
        """
        members = self._run.strategy.processes.membership
        waits = trainer.is_global_zero and members is not None and members.look_for_joiners()
        self._holds_back = waits and not self._holds_back and is_epoch_ending(trainer)
        return waits and not self._holds_back and time.monotonic() >= self._lets_in_at_s

    @override
    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # The next generation repeats a validation in mid-epoch, but not one at the end of an epoch,
        # or of training: joiners wait for that, and ranks that leave may have no time for it.
        at_end = has_finished_epoch(trainer) or trainer.fit_loop.epoch_loop._is_training_done
        if self._change is not None and (self._change.leaving or not at_end):
            change, self._change = self._change, None
            raise change

    def end_step(self, trainer: pl.Trainer) -> bool:
        """End a step after which ranks leave or join; called by every rank at a step's end.

        Returns:
            Whether the step was saved, or needn't be.
        """
        engine = self._run.strategy.engine
        if not engine.leaving and not engine.has_joiners:
            return False
        if self.in_place:
            self._stop_in_place(trainer, engine.leaving)
        else:
            self._leave(trainer, engine.leaving)
        return True

    def _save(self, trainer: pl.Trainer, leaving: Collection[int]) -> SavedCheckpoint:
        """Save the step, with copies of what leaving ranks have."""
        node_of_rank = self._run.checkpoints[0].node_of_rank
        return self._run.checkpoints[0].save(
            trainer, leaving={node_of_rank[rank] for rank in leaving}
        )

    @property
    def is_leaving(self) -> bool:
        """Whether this process was told to leave; all ranks know it one step later."""
        is_told = self._sigterm is not None and self._sigterm.pending() is not None
        return is_told or self._loses_machine

    @property
    def _loses_machine(self) -> bool:
        """Whether all processes of this machine are to leave."""
        is_told = self._watcher is not None and self._watcher.pending() is not None
        return is_told or self._is_excluded

    def num_left(self, exclude: Sequence[int]) -> int:
        """Return how many ranks a restart without the machines of `exclude` would have.

        0 if nobody would start the processes again.
        """
        nodes = self._run.checkpoints[0].node_of_rank
        gone = {nodes[rank] for rank in exclude}
        return sum(node not in gone for node in nodes) if is_torchelastic_launched() else 0

    def request_restart(self, reason: str, *, exclude: Sequence[int]) -> None:
        """Save and end all processes one step later; nodes of ranks in `exclude` don't come back.

        Called by every rank with the same `exclude`. torchrun restarts the others, if it has its
        least number of nodes.
        """
        rank_zero_info(f"ElasticRestart: {reason}.")
        nodes = self._run.checkpoints[0].node_of_rank
        self._is_excluded = nodes[self._global_rank] in {nodes[rank] for rank in exclude}

    def _stop_in_place(self, trainer: pl.Trainer, told_to_leave: Collection[int]) -> None:
        """Before the next step, let ranks leave that were told to, and let joiners in.

        Saves only if the ranks that stay don't have all rows; all leave if these couldn't go on.
        """
        comms, nodes = self._run.comms, self._run.checkpoints[0].node_of_rank
        rows = comms.gather_objects((self.is_leaving, self._loses_machine))
        lost_nodes = {node for node, row in zip(nodes, rows, strict=True) if row[1]}
        told = {rank for rank, row in enumerate(rows) if row[0]}
        leaving = frozenset(r for r, node in enumerate(nodes) if r in told or node in lost_nodes)
        if (why := self._why_all_leave(trainer, leaving)) is not None:
            rank_zero_info("Not going on in place, because %s.", why)
            self._leave(trainer, leaving)
            return
        if not all(comms.gather_objects(self._run.checkpoints[0].live.can_go_on(trainer, leaving))):
            saved = self._save(trainer, told_to_leave)
            errors = [
                error for error in comms.gather_objects(self._confirm(saved)) if error is not None
            ]
            if errors and not leaving:
                self._lets_in_at_s = time.monotonic() + 2 * self._drain_timeout_s
                rank_zero_warn(f"Joiners wait, since {saved.id} isn't safe: {errors[0]}")
                return
        reason = f"{len(leaving)} ranks leave on a notice" if leaving else "joiners are let in"
        if leaving:
            note(trainer, "leaving", ranks=sorted(leaving), in_place=True)
        self._change = GenerationChange(f"After step {trainer.global_step}, {reason}.", leaving)

    def _why_all_leave(self, trainer: pl.Trainer, leaving: Collection[int]) -> str | None:
        """Return why the others couldn't go on without the leaving ranks; None if they can."""
        membership = self._run.strategy.processes.membership
        if membership is None or len(leaving) == trainer.world_size:
            return "nobody would be left"
        return "the store goes with its node" if membership.loses_store(leaving) else None

    def _confirm(self, saved: SavedCheckpoint) -> str | None:
        """Wait until a checkpoint is safe; return the error that prevented it, None without one."""
        try:
            saved.wait_until_confirmed(self._drain_timeout_s)
        except (CheckpointError, PeerError, OSError) as error:
            _log.warning("The checkpoint of %s isn't safe: %r", saved.id, error)
            return repr(error)
        return None

    def _leave(self, trainer: pl.Trainer, leaving: Collection[int]) -> None:
        """Save, wait until the checkpoint is safe, then end this process as all others do."""
        saved, start_s = self._save(trainer, leaving), time.monotonic()
        error_seen = self._confirm(saved)
        try:
            leaving = self._await_upload(trainer, saved, start_s)
        except RuntimeError as error:
            error_seen = repr(error)
            _log.warning("A rank is lost while %s is uploaded: %r", saved.id, error)
        rank_zero_info(f"ElasticRestart: all ranks leave with {saved.id} to be started again.")
        drain_s = time.monotonic() - start_s
        note(trainer, "leaving", ranks=sorted(leaving), drain_s=drain_s, error=error_seen)
        if self._loses_machine and self._is_first_of_node and is_torchelastic_launched():
            # Otherwise the agent would bring this machine back into the run that it is about to
            # leave.
            os.kill(os.getppid(), signal.SIGTERM)
        raise AgreedExit

    def _await_upload(
        self, trainer: pl.Trainer, saved: SavedCheckpoint, start_s: float
    ) -> frozenset[int]:
        """Wait, as all ranks do, until none needs to; return the ranks that were told to leave."""
        comms, nodes = self._run.comms, self._run.checkpoints[0].node_of_rank
        settled_s = min(_SETTLE_S, self._drain_timeout_s)
        while True:
            waits = _is_uploading(saved)
            rows = comms.gather_objects((waits, self.is_leaving, time.monotonic() - start_s))
            told = frozenset(rank for rank, row in enumerate(rows) if row[1])
            nobody_stays = {nodes[rank] for rank in told} == set(nodes)
            longest_s = self._drain_timeout_s if nobody_stays else settled_s
            if rows[0][2] > longest_s or not any(row[0] for row in rows):
                return told

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_watching()
        if self._sigterm is not None:
            self._sigterm.restore()
            self._sigterm = None

    @override
    def on_exception(self, *_: Any) -> None:
        # A SIGTERM from now on only sets the flag, since this process ends anyway.
        self._stop_watching()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # After the loss of a rank another fit follows, which handles a SIGTERM from before it.
        self._change, self._holds_back = None, False
        self._stop_watching()
        # Lightning has just restored the SIGTERM handler from before this fit.
        if self._between is not None:
            self._between.restore()
            self._between = None
        if self.in_place and self._sigterm is not None:
            self._sigterm = self._between = self._hear_sigterm()

    def _hear_sigterm(self, *, told: bool = False) -> SigtermNotice:
        told = told or (self._sigterm is not None and self._sigterm.pending() is not None)
        return SigtermNotice(pass_on=False, is_received=told)

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()


def _is_uploading(saved: SavedCheckpoint) -> bool:
    """Wait a moment; return whether this rank's part isn't in the remote store yet."""
    try:
        saved.wait_until_uploaded(0.1)
    except TimeoutError:
        return True
    except (CheckpointError, PeerError, OSError) as error:
        _log.warning("Leaving without the upload of %s: %r", saved.id, error)
    return False
