"""Exchange statuses between ranks that save or recover together, as keys of a store.

A rank that has finished its work sets its key. Rank 0 collects the keys of all ranks and sets one
key that contains all. So no rank waits in a collective. A rank with slow storage sets its key
later, and increases a common counter as long as its work makes progress. A wait ends with an error
when

- the counter hasn't changed for too long,
- the run's failure detection reports that a rank is gone, or
- the process of a rank has ended. A wait for keys doesn't notice this, since no connection breaks.
  So each rank that waits checks once a second whether the next rank's server accepts connections.

Keys are reused, so the store doesn't grow. The bytes of files don't travel through the store but
directly between ranks (`serving`).
"""

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from lightning_hetero.checkpoint.deadlines import MARGIN, BackgroundThread
from lightning_hetero.checkpoint.serving import Address, FileServer, Probe, Readable
from lightning_hetero.core.errors import CheckpointError, PeerError
from lightning_hetero.core.process import Deadline, Progress

_LOOK_AGAIN_S = 1.0
"""Seconds between two checks of a rank's server."""
_T = TypeVar("_T")


class Peers:
    """One rank's view of all ranks; all of them make the same calls in the same order.

    ::

        peers = Peers(store, global_rank=rank, world_size=4)
        peers.gather({"step": 7})  # what each rank gave, by rank
        peers.do(lambda progress: read_slowly(progress))

    Only one thread at a time may use it; `branch` makes another one for another thread.

    Args:
        keys: The run's key-value store; a single rank needs none.
        global_rank: This rank.
        world_size: Number of ranks.
        timeout_s: How long to wait for work that makes no progress.
        is_over: Whether a rank is known to be gone.
        host: Address under which other ranks reach this one's server of files.
    """

    def __init__(
        self,
        keys: Store | None = None,
        *,
        global_rank: int = 0,
        world_size: int = 1,
        timeout_s: float = 300.0,
        is_over: Callable[[], bool] = lambda: False,
        host: str = "127.0.0.1",
    ) -> None:
        self.global_rank = global_rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.server = FileServer(host)
        self.progress = Progress()
        """Ticks whenever any rank makes progress while this one waits."""
        self._keys = keys or HashStore()
        self._prefix = ""
        self._is_over = is_over
        self._round = 0
        self._branches = itertools.count()
        self._next_rank = Probe(host)

    def branch(self, *, timeout_s: float, progress: Progress) -> "Peers":
        """Return an object for another thread; all ranks call it in the same order.

        Args:
            timeout_s: How long the other thread waits for work that makes no progress.
            progress: Ticks whenever any rank makes progress while the thread waits.
        """
        made = copy.copy(self)
        made.timeout_s, made.progress = timeout_s, progress
        made._round, made._branches = 0, itertools.count()
        made._prefix = f"{self._prefix}{next(self._branches)}/"
        return made

    def serve(self, stores: Mapping[str, Readable]) -> Address | None:
        """Let other ranks read the named stores; return the address, None for a single rank."""
        if self.world_size == 1:
            return None
        self.server.stores.update(stores)
        with self._naming() as keys:
            keys.set(f"checkpoint/address {self.global_rank}", json.dumps(self.server.address))
        return self.server.address

    def close(self) -> None:
        """Stop serving files."""
        self.server.close()

    def gather(self, value: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return the values that all ranks gave, by rank; each must be valid JSON.

        Raises:
            PeerError: A rank is gone, or there has been no progress anywhere for too long.
        """
        self.progress.tick()
        self._round += 1
        limit_s = timeout_s or self.timeout_s
        with self._naming() as keys:
            keys.set(self._name(f"rank {self.global_rank}"), json.dumps([self._round, value]))
            arrived = keys.add(self._name("arrived"), 1)
            if self.global_rank != 0:
                self._await("shown", self._round, limit_s)
            else:
                if arrived < self._round * self.world_size:
                    self._await("arrived", self._round * self.world_size, limit_s)
                found = [self._value_of(rank)[1] for rank in range(self.world_size)]
                keys.set(self._name("all"), json.dumps(found))
                keys.add(self._name("shown"), 1)
                return found
            values: list[Any] = json.loads(keys.get(self._name("all")))
            return values

    def do(
        self,
        work: Callable[[Progress], _T],
        describe: Callable[[_T], Mapping[str, Any]] = lambda _: {},
        *,
        may_fail: bool = False,
    ) -> "tuple[Future[_T], list[dict[str, Any]]]":
        """Do some work on a thread of each rank; return this rank's future and all statuses.

        If the work has made no progress for too long, or another rank is lost, it is no longer
        waited for; it may still run.

        Args:
            work: The work; it ticks the progress that it gets.
            describe: Makes a rank's status of the work's result. If the work failed or was given
                up, the status is the reason, as "error".
            may_fail: Whether failures are left to the caller.

        Raises:
            CheckpointError: The work of a rank failed, unless it `may_fail`; all ranks raise it.
        """
        thread = BackgroundThread("checkpoint-work")
        done = thread.submit(work, thread.progress)
        thread.finish()
        deadline, seen = Deadline(self.timeout_s, thread.progress), thread.progress.count
        try:
            while not wait([done], timeout=min(0.5, self.timeout_s)).done and not deadline.is_over:
                if seen != (seen := thread.progress.count):
                    self.progress.tick()
                    with self._naming() as keys:
                        keys.add(self._name("beats"), 1)
            own = self._status(done, describe)
            answers = self.gather(own, timeout_s=MARGIN * self.timeout_s)
        finally:
            if not done.done():
                thread.progress.give_up()
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors and not may_fail:
            raise CheckpointError(" ".join(errors))
        return done, answers

    def _status(
        self, work: "Future[_T]", describe: Callable[[_T], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        if not work.done():
            why = f"storage made no progress for {self.timeout_s:g} s."
        elif (error := work.exception()) is not None:
            why = str(error)
        else:
            return describe(work.result())
        return {"error": f"Rank {self.global_rank}: {why}"}

    def _await(self, name: str, count: int, limit_s: float) -> None:
        """Wait until a counter has come to `count`."""
        deadline, beats, pause_s = Deadline(limit_s), -1, 0.001
        look = Deadline(_LOOK_AGAIN_S)
        while self._keys.add(self._name(name), 0) < count:
            if self._is_over():
                raise PeerError(f"Rank {self.global_rank} lost another rank.")
            if look.is_over:
                gone = self._find_gone()
                # After the last answer that is needed here, its process may have ended normally.
                if gone is not None and self._keys.add(self._name(name), 0) < count:
                    raise PeerError(f"The process of rank {gone} has ended. See its own log.")
                look = Deadline(_LOOK_AGAIN_S)
            if beats != (beats := self._keys.add(self._name("beats"), 0)):
                deadline.renew()
                self.progress.tick()
            if deadline.is_over:
                raise PeerError(
                    f"Rank {self.global_rank} has waited {limit_s:g} s for ranks "
                    f"{self._missing()} to answer about checkpoints. See whether they hang; if "
                    "they are only slow, allow more time (timeout)."
                )
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, 0.05 * _LOOK_AGAIN_S)

    def _find_gone(self) -> int | None:
        """Return a rank whose process has ended; None if no rank has found one.

        Each rank checks the next one, and tells all others through the store.
        """
        following = (self.global_rank + 1) % self.world_size
        key = f"checkpoint/address {following}"
        # Rank 0 is still needed after its own answer: it collects those of all ranks.
        is_awaited = following == 0 or self._value_of(following)[0] < self._round
        if is_awaited and self._keys.check([key]):
            address: Address = json.loads(self._keys.get(key))
            if self._next_rank.has_ended(address):
                self._keys.set(self._name("gone"), str(following))
        told = self._keys.check([self._name("gone")])
        return int(self._keys.get(self._name("gone"))) if told else None

    def _missing(self) -> list[int]:
        """Return the ranks that haven't answered in this round."""
        ranks = range(self.world_size)
        return [rank for rank in ranks if self._value_of(rank)[0] < self._round] or [0]

    def _value_of(self, rank: int) -> list[Any]:
        """Return a rank's newest value, as [number of its round, value]."""
        key = self._name(f"rank {rank}")
        if not self._keys.check([key]):
            return [0, None]
        found: list[Any] = json.loads(self._keys.get(key))
        return found

    def _name(self, name: str) -> str:
        return f"checkpoint/{self._prefix}{name}"

    @contextmanager
    def _naming(self) -> Iterator[Store]:
        try:
            yield self._keys
        except RuntimeError as error:
            raise PeerError(
                f"Rank {self.global_rank} lost the store in which ranks tell each other of "
                f"checkpoints: {error}"
            ) from error
