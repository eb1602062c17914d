"""Connect the processes of a run, and notice when one of them fails.

World size and ranks come from the cluster environment, so nodes may run different numbers of
processes. Every wait for another rank can end in `PeerError`, which names the rank and why.
"""

import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process import allow_files
from lightning_hetero.runtime.generation.entering import (
    GenerationEnvironment,
    is_joiner,
    join_membership,
    open_membership,
)
from lightning_hetero.runtime.generation.log import Generation
from lightning_hetero.runtime.ranks.communicators import (
    Communicators,
    check_queues,
    init_process_group,
    reduce_over,
)
from lightning_hetero.runtime.ranks.connections import Connections
from lightning_hetero.runtime.ranks.failure import AgreedExit, FailureDetector
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring, interval_s
from lightning_hetero.runtime.ranks.meeting import (
    connect_store,
    ended_when_late,
    package_versions,
)
from lightning_hetero.runtime.results.step_logs import ALREADY_REDUCED
from lightning_hetero.strategy.trainable import facts_of_fit

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.runtime.generation.membership import Membership


StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

_MAX_EAGER_RANKS = 64
"""Largest number of ranks for which gloo connects all pairs of a new group at once, not on
demand."""
_FORMING = 1.5
"""If a generation hasn't formed after `patience_s` times this factor, the store counts as
frozen."""
_STORE = "the membership's store"
_FIRST_FIT = (
    "With ElasticRestart(in_place=True) fit must be a Trainer's first call, and its only fit, for "
    "others may join it. Make another Trainer for each other fit, or leave in_place out."
)


class Processes:
    """One process's connections to the others of a run.

    1. `meet`: connect to the others and begin to watch them,
    2. `reduce` and other collectives, inside `watching`,
    3. at the end `fail` or `stop_watching`,
    4. or, after `outlive_ranks`: `form_generation`, `enter_generation`, and `meet` again.

    Args:
        timeout: How long a rank waits for another before it gives up, once all have connected.
        start_timeout: How long until all must have connected.
        backend: "nccl", "gloo", …; None takes what fits the device.
    """

    def __init__(
        self, *, timeout: timedelta, start_timeout: timedelta, backend: str | None
    ) -> None:
        self._backend = backend
        self._timeout = timeout
        self.start_timeout = start_timeout
        self._environment: ClusterEnvironment | None = None
        self._store: Store | None = None
        self._comms: Communicators | None = None
        self._detector: FailureDetector | None = None
        self._silence: timedelta | None = None
        self.membership: Membership | None = None
        """This process's membership in a run that outlives ranks; None until it is a member."""
        self._connections = Connections()
        self._heartbeat: Heartbeat | None = None
        """This process's heartbeat, until the run ends."""

    @property
    def comms(self) -> Communicators:
        """The communicators; available once the processes have met."""
        assert self._comms is not None, "the processes have not met"
        return self._comms

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The group of small messages on CPU; None before the processes have met."""
        return None if self._comms is None else self._comms.control

    def meet(
        self,
        environment: ClusterEnvironment,
        device: torch.device,
        module: "pl.LightningModule | None" = None,
    ) -> ClusterEnvironment:
        """Connect to the other processes, unless they are connected already. All of them call it.

        Args:
            environment: Knows this process's rank.
            device: This process's device.
            module: The module to train: a process that joins later must have the same.

        Returns:
            The environment that knows this process's rank from now on.
        """
        self._environment = environment
        if environment.world_size() > _MAX_EAGER_RANKS:
            allow_files(os.getpid())
            if self._silence is None:
                # Lazily, since each group costs a rank as many sockets as there are ranks. But
                # connections that may have to be closed can be recorded only if they are made with
                # their group.
                os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        if self._silence is not None and self.membership is None:
            environment = self._become_member(package_versions() | facts_of_fit(module))
        if environment.world_size() > 1 or self.membership is not None:
            check_queues(device, os.environ)
            # From here on, this rank may have to wait for another.
            if self._detector is None:
                self._detector = self._make_detector()
                self._detector.expect_slow_start(is_expected=self._silence is not None)
            self._detector.start()
        if not dist.is_initialized():
            self._connections.open(lambda: self._init_process_group(device))
        if self._comms is None:
            self._comms = Communicators.create(
                device=device, timeout=self._timeout, connections=self._connections
            )
        return self._environment

    def begin_training(self) -> None:
        """Limit the silence of heartbeats as usual from now on: all processes have started."""
        if self._detector is not None:
            self._detector.expect_slow_start(is_expected=False)

    def _make_detector(self) -> FailureDetector:
        if self.membership is not None and self._silence is not None:
            assert self.membership.generation is not None
            ring = self.membership.ring_of(self.membership.generation)
        else:
            assert self._environment is not None
            rank, world_size = self._environment.global_rank(), self._environment.world_size()
            ring = Ring(numbers=tuple(range(world_size)), rank=rank)
            beat_s = interval_s(self._timeout.total_seconds())
            self._heartbeat = Heartbeat(self._connect_store(), number=rank, interval_s=beat_s)
        assert self._heartbeat is not None
        return FailureDetector(
            self._heartbeat, ring, timeout=self._timeout, silence=self._silence, abort=self._abort
        )

    def _abort(self) -> None:
        connections = self._connections  # The present ones, whenever communicators are aborted.
        if self._comms is not None:
            self._comms.abort()
        if self.membership is not None:
            connections.close()

    @property
    def are_several(self) -> bool:
        """Whether there are other processes."""
        return self._environment is not None and self._environment.world_size() > 1

    def _connect_store(self) -> Store:
        environment = self._environment
        assert environment is not None
        if self._store is None:
            self._store = connect_store(
                environment.main_address,
                environment.main_port,
                global_rank=environment.global_rank(),
                world_size=environment.world_size(),
                start_timeout=self.start_timeout,
            )
            self._store.set_timeout(self._timeout)
        return self._store

    def open_store(self, name: str) -> tuple[Store, str]:
        """Return a part of the ranks' store under a name of its own, by a new client; and its host.

        All ranks must call it the same number of times.
        """
        store, rank = self._connect_store(), self.comms.global_rank
        number = store.add(f"{name}/{rank}", 1)
        own = self._connections.open(store.clone)  # type: ignore[attr-defined]
        server = own
        while isinstance(server, PrefixStore):
            server = server.underlying_store
        return PrefixStore(f"{name} {number}", own), server.host

    def _init_process_group(self, device: torch.device) -> None:
        assert self._environment is not None
        self._backend = self._backend or dist.get_default_backend_for_device(device)
        store, rank = self._connect_store(), self._environment.global_rank()
        device_id = None if device.type == "cpu" else device
        options = {"timeout": self._timeout, "device_id": device_id}
        init_process_group(self._backend, store, rank, self._environment.world_size(), **options)

    # -- failures -------------------------------------------------------------------------------

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that turns others' failures into `PeerError`, and reports own ones."""
        return nullcontext() if self._detector is None else self._detector.watching()

    def stop_watching(self) -> None:
        """Stop watching the others; called by every rank when all are about to end."""
        if self._detector is not None:
            self._detector.stop()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends, unless all have agreed to end."""
        if isinstance(error, AgreedExit | SIGTERMException):
            self.stop_watching()
        elif self._detector is not None:
            self._detector.report(error)

    # -- generations ----------------------------------------------------------------------------

    def outlive_ranks(self, silence: timedelta) -> None:
        """Go on in place when another rank is lost; called before the processes first meet.

        Args:
            silence: How long a rank may show no heartbeat before it counts as lost.

        Raises:
            ConfigurationError: They have met already.
        """
        if self._comms is not None:
            raise ConfigurationError(_FIRST_FIT)
        self._silence = silence

    def end_generations(self) -> None:
        """Note that training has ended: from now on, if a rank is lost, the others end, too."""
        if self.membership is not None:
            self.membership.tell_end()  # Keepers of lost members then end.
        # What follows, such as a test, may make others wait as long as in any other run.
        self._silence = self._detector = None

    @property
    def outlives_ranks(self) -> bool:
        """Whether the others go on in their processes when a rank is lost."""
        return self.membership is not None

    @property
    def joins(self) -> bool:
        """Whether this process is to join a run that is training already."""
        return self._silence is not None and is_joiner()

    @property
    def generation(self) -> int:
        """Number of the newest generation that this process was in."""
        generation = self.membership and self.membership.generation
        return generation.number if generation else 0

    def _become_member(self, facts: dict[str, str]) -> ClusterEnvironment:
        """Form the first generation with all started processes, or join a later one."""
        assert self._environment is not None
        assert self._silence is not None
        patience_s = min(60.0, self._timeout.total_seconds())
        waits = {"silence_s": self._silence.total_seconds(), "patience_s": patience_s}
        start, rank = self.start_timeout, self._environment.global_rank()
        with ended_when_late(rank, _STORE, start.total_seconds() + _FORMING * patience_s):
            if self.joins:
                found = join_membership(facts, start_timeout=start, **waits)
            else:
                found = open_membership(self._connect_store(), self._environment, facts, **waits)
        membership, self._heartbeat = found
        self.membership = membership
        assert membership.generation is not None
        return self._enter(membership.generation)

    def _enter(self, generation: Generation) -> ClusterEnvironment:
        assert self.membership is not None
        assert self._environment is not None
        environment = GenerationEnvironment(self._environment, generation, self.membership.number)
        self._environment = environment
        # Closing the connections must also end waits in the store for ranks that don't come.
        self._connections = Connections(may_end=True)
        self._store = self._connections.open(partial(self.membership.store_of, generation))
        self._store.set_timeout(self._timeout)
        return environment

    def lost_peer(self, error: Exception) -> PeerError | None:
        """Return the loss of another rank if it caused an error and the others go on, else None."""
        if self.membership is None or self._detector is None:
            return None
        try:
            with self._detector.watching():
                raise error
        except PeerError as lost:
            return lost
        except Exception:
            return None

    def leave_generation(self) -> None:
        """Close all connections to the others, but keep sending heartbeats."""
        self._stop_judging()
        self._abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._comms = None

    def _stop_judging(self) -> None:
        if self._detector is not None:
            self._detector.pause()
            self._detector = None

    def form_generation(
        self, leaving: Collection[int] = (), *, calls_joiners: bool = True
    ) -> tuple[Generation, Generation]:
        """Agree with the others on who goes on; `enter_generation` follows.

        If a rank was lost, call `leave_generation` before, so that no rank waits in a group. If all
        have stopped between two steps, call it afterwards, so that no connection in use is closed.

        Args:
            leaving: Ranks that don't go on; the same on all others.
            calls_joiners: Whether waiting joiners may be in it.

        Returns:
            The old generation and the new one.

        Raises:
            PeerError: The others go on without this process, or the store is gone.
        """
        self._stop_judging()
        membership = self.membership
        assert membership is not None
        with ended_when_late(membership.number, _STORE, _FORMING * membership.patience_s):
            return membership.form_next(leaving, calls_joiners=calls_joiners)

    def enter_generation(self, new: Generation) -> ClusterEnvironment:
        """Enter a generation that has formed; return the environment that knows its ranks."""
        self._detector = self._make_detector()
        return self._enter(new)

    def wait_until_others_go_on(self) -> None:
        """On a rank that leaves, wait until the others have formed the next generation."""
        membership = self.membership
        assert membership is not None
        self._stop_judging()
        with ended_when_late(membership.number, _STORE, _FORMING * membership.patience_s):
            membership.wait_for_next(_FORMING * membership.patience_s)

    def leave_members(self, error: BaseException) -> None:
        """Tell the others at once that this process is about to end, and why."""
        if self.membership is not None:
            with suppress(Exception):
                text = f"{type(error).__name__}: {error}"
                self.membership.tell_gone(self.membership.number, text)

    # -- collectives ----------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any, reduce_op: ReduceOp | str | None) -> Any:
        """Reduce a tensor over all ranks; see `Strategy.reduce`.

        Args:
            tensor: The tensor; anything else is returned as it is.
            group: A process group, or `ALREADY_REDUCED`.
            reduce_op: "mean", "sum" or another name of a `ReduceOp`.
        """
        if not self.are_several or not isinstance(tensor, Tensor) or group == ALREADY_REDUCED:
            return tensor
        with self.watching():
            return reduce_over(tensor, group, reduce_op)

    def reduce_in_hooks(self, own: Tensor, operation: str, device: torch.device) -> Tensor:
        """Return a "sum", "max" or "min" over all ranks, made on `device`; collective."""
        found: Tensor = self.reduce(own.to(device), None, operation)
        return found.to(own.device)

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers; collective."""
        return int(self.reduce(torch.tensor(number), self.control, "max"))
