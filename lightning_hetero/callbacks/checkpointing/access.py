"""One rank's access to the places where a run keeps checkpoints: leases, run identity, writer.

To *enter* is to take the leases and make the writer. If a fit begins from a checkpoint, all ranks
enter first. If they go on from what they still had, nothing is read, so they enter in the
background, after the first step: a save waits for that, and raises its error on all ranks.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_hetero.callbacks.checkpointing.places import Joined, Places, join, release
from lightning_hetero.callbacks.run import run_of
from lightning_hetero.checkpoint import (
    CheckpointId,
    CheckpointWriter,
    Peers,
    Recovered,
    Tier,
    WriterOptions,
    begin_run,
)
from lightning_hetero.checkpoint.deadlines import BackgroundThread
from lightning_hetero.checkpoint.serving import own_host

__all__ = ["Access", "peers_of"]


@dataclass(kw_only=True)
class _Entered:
    """A rank's tiers, leases and writer, once all ranks have entered."""

    joined: Joined
    writer: CheckpointWriter
    is_closed: bool = False

    def leave(self) -> None:
        if not self.is_closed:
            self.writer.leave()
        release(self.joined.leases)


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
        self._entered: Future[_Entered] = Future()
        self._to_enter: Callable[[], object] | None = None
        """Enters; kept until `begin` is called, if that is to be done after the start."""

    def enter(
        self, look: Callable[..., Recovered | None], *, anew: bool, tidies: bool = True
    ) -> CheckpointId:
        """Enter, and look for a state to recover; every rank calls it. Communicates.

        Args:
            look: Returns the recovered state, given the tiers and further arguments of `recover`.
            anew: Whether a new run begins, whatever is in the places.
            tidies: See `join`.

        Returns:
            Step 0 of the attempt that begins; see `begin_run`.

        Raises:
            CheckpointError: A place can't be used, or another job uses it; and whatever `look` and
                `begin_run` raise.
        """
        is_first = self._is_first_of_node
        joined = join(self._places, self._peers, is_first_of_node=is_first, tidies=tidies)
        seen: dict[str, Any] = {
            "node": joined.node,
            "peers": self._peers,
            "skip_unreadable": self._skip_unreadable,
        }
        try:
            recovered = look(joined.tiers, **seen)
            start = begin_run(joined.tiers, recovered=recovered, anew=anew, **seen)
            if is_first:
                self._places.forget_other_runs(start.run)
            writer = CheckpointWriter(
                joined.tiers,
                node_of_rank=joined.node_of_rank,
                peers=self._peers,
                options=self._options,
            )
        except BaseException:
            release(joined.leases)
            raise
        self._entered.set_result(_Entered(joined=joined, writer=writer))
        return start

    def enter_later(self, recovered: Recovered) -> CheckpointId:
        """Enter when `begin` is called or the writer is first needed; training goes on meanwhile.

        From then on nobody else may use the peers.

        Returns:
            Step 0 of the attempt that begins.
        """
        self._to_enter = partial(self.enter, lambda *_, **__: recovered, anew=False, tidies=False)
        return CheckpointId(0, recovered.report.attempt, recovered.id.run)

    def begin(self) -> None:
        """Begin to enter in the background, if `enter_later` was called."""
        enter, self._to_enter = self._to_enter, None
        if enter is None:
            return

        def work() -> None:
            try:
                enter()
            except BaseException as error:
                self._entered.set_exception(error)

        thread = BackgroundThread("checkpoint-start")
        thread.submit(work)
        thread.finish()

    @property
    def node_of_rank(self) -> tuple[str, ...]:
        """Name of each rank's node; waits until all have entered."""
        return self._wait().joined.node_of_rank

    @property
    def tiers(self) -> list[Tier]:
        """This node's tiers and the remote one; waits until all have entered."""
        return self._wait().joined.tiers

    @property
    def writer(self) -> CheckpointWriter:
        """The writer of this rank's checkpoints; waits until all have entered.

        Raises:
            CheckpointError: Entering failed, or another job has taken a place since.
        """
        entered = self._wait()
        for lease in entered.joined.leases:
            lease.raise_if_lost()
        return entered.writer

    def close(self) -> None:
        """Finish all that was started; see `CheckpointWriter.close`."""
        entered = self._wait()
        entered.is_closed = True
        entered.writer.close()

    def leave(self) -> None:
        """Release the leases and give up unfinished writes; nothing is entered later."""
        self._to_enter = None
        self._entered.add_done_callback(_leave)

    def _wait(self) -> _Entered:
        self.begin()
        return self._entered.result()


def _leave(entered: "Future[_Entered]") -> None:
    if entered.exception() is None:
        entered.result().leave()


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
