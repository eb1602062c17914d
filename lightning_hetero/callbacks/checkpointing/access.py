"""One rank's access to the places where a run keeps checkpoints: leases, run identity, writer.

To *enter* is to take the leases and make the writer. If a fit begins from a checkpoint, all ranks
enter first. If they go on from what they still had, nothing is read, so they enter in the
background, after the first step: a save waits for that, and raises its error on all ranks.
"""

from collections.abc import Sequence
from concurrent.futures import Future

import lightning.pytorch as pl

from lightning_hetero.callbacks.checkpointing.places import Joined, Places, join, release
from lightning_hetero.callbacks.run import run_of
from lightning_hetero.checkpoint import (
    CheckpointId,
    CheckpointWriter,
    Peers,
    Recovered,
    SliceNeed,
    WriterOptions,
    begin_run,
    recover,
)
from lightning_hetero.checkpoint.deadlines import BackgroundThread
from lightning_hetero.checkpoint.serving import own_host

__all__ = ["Access", "peers_of"]


class Access:
    """One rank's access: `enter` or `enter_later`, then `leave`; all ranks make the same calls.

    Args:
        places: This node's places.
        peers: All ranks; used by one thread at a time.
        is_first_of_node: Whether this rank looks after its node's places.
        options: The writer's.
        skip_unreadable: Go on without places that can't be read.
    """

    def __init__(
        self,
        places: Places,
        peers: Peers,
        *,
        is_first_of_node: bool,
        options: WriterOptions,
        skip_unreadable: bool,
    ) -> None:
        self._places = places
        self._peers = peers
        self._is_first_of_node = is_first_of_node
        self._options = options
        self._skip_unreadable = skip_unreadable
        self._joined: Joined | None = None
        self._writer: Future[CheckpointWriter] = Future()
        self._later: Recovered | None = None
        """What to enter with once `begin` is called, if that is to be done after the start."""
        self._is_in_background = False
        self._is_closed = False

    def take_leases(self, *, tidies: bool = True) -> None:
        """Take the leases of the places; every rank calls it. Communicates.

        Args:
            tidies: See `join`.

        Raises:
            CheckpointError: A place can't be used, or another job uses it.
        """
        is_first = self._is_first_of_node
        self._joined = join(self._places, self._peers, is_first_of_node=is_first, tidies=tidies)

    def recover(self, needs: Sequence[SliceNeed]) -> Recovered | None:
        """Return the newest checkpoint's state, once leases are taken; see `checkpoint.recover`."""
        assert self._joined is not None
        return recover(
            needs,
            self._joined.tiers,
            node=self._joined.node,
            peers=self._peers,
            skip_unreadable=self._skip_unreadable,
        )

    def enter(self, recovered: Recovered | None) -> CheckpointId:
        """Make the writer, once leases are taken; every rank calls it. Communicates.

        Args:
            recovered: The state from which the ranks go on.

        Returns:
            Step 0 of the attempt that begins; see `begin_run`.

        Raises:
            CheckpointError: See `begin_run`.
        """
        joined = self._joined
        assert joined is not None
        start = begin_run(
            joined.tiers,
            recovered=recovered,
            node=joined.node,
            peers=self._peers,
            skip_unreadable=self._skip_unreadable,
        )
        if self._is_first_of_node:
            self._places.forget_other_runs(start.run)
        writer = CheckpointWriter(
            joined.tiers,
            node_of_rank=joined.node_of_rank,
            peers=self._peers,
            options=self._options,
        )
        self._writer.set_result(writer)
        return start

    def enter_later(self, recovered: Recovered) -> CheckpointId:
        """Enter when `begin` is called or the writer is first needed; training goes on meanwhile.

        From then on nobody else may use the peers.

        Returns:
            Step 0 of the attempt that begins.
        """
        self._later = recovered
        return CheckpointId(0, recovered.report.attempt, recovered.id.run)

    def begin(self) -> None:
        """Begin to enter in the background, if `enter_later` was called."""
        if self._later is not None:
            self._is_in_background = True
            thread = BackgroundThread("checkpoint-start")
            thread.submit(self._enter_behind, self._later)
            thread.finish()
            self._later = None

    def _enter_behind(self, recovered: Recovered) -> None:
        try:
            self.take_leases(tidies=False)
            self.enter(recovered)
        except BaseException as error:
            self._let_go()
            self._writer.set_exception(error)

    @property
    def node_of_rank(self) -> tuple[str, ...]:
        """Name of each rank's node; waits until all have entered."""
        self._wait()
        assert self._joined is not None
        return self._joined.node_of_rank

    @property
    def writer(self) -> CheckpointWriter:
        """The writer of this rank's checkpoints; waits until all have entered.

        Raises:
            CheckpointError: Entering failed, or another job has taken a place since.
        """
        writer = self._wait()
        for lease in () if self._joined is None else self._joined.leases:
            lease.raise_if_lost()
        return writer

    def close(self) -> None:
        """Finish all that was started; see `CheckpointWriter.close`."""
        writer, self._is_closed = self._wait(), True
        writer.close()

    def leave(self) -> None:
        """Release the leases and give up unfinished writes; nothing is entered later."""
        self._later = None
        if self._is_in_background:
            self._writer.add_done_callback(lambda _: self._let_go())
        else:
            self._let_go()

    def _let_go(self) -> None:
        has_writer = self._writer.done() and self._writer.exception() is None
        if has_writer and not self._is_closed:
            self._writer.result().leave()
        if self._joined is not None:
            release(self._joined.leases)

    def _wait(self) -> CheckpointWriter:
        self.begin()
        return self._writer.result()


def peers_of(trainer: pl.Trainer, timeout_s: float) -> Peers:
    """Return the ranks of this fit; after a loss this rank may be the only one that is left."""
    strategy = run_of(trainer).strategy
    if strategy is None or trainer.world_size == 1:
        return Peers(timeout_s=timeout_s)
    processes = strategy.processes
    store, host = processes.open_store("checkpoints")
    return Peers(
        store,
        global_rank=trainer.global_rank,
        world_size=trainer.world_size,
        timeout_s=timeout_s,
        is_over=processes.comms.is_aborted,
        host=own_host(host),
    )
