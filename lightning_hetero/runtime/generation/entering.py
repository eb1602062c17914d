"""Make a process a member of a run: with all others at the first start, or as a joiner later.

From then on Lightning gets the process's rank from each generation (`GenerationEnvironment`). The
process also takes its share of the machine's cores: with two threads in each of four processes on
two cores an iteration takes three times as long, because idle threads spin.
"""

import os
import socket
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process import machine_namespace, name_membership
from lightning_hetero.runtime.generation.keeper import JOIN, tell_keeper
from lightning_hetero.runtime.generation.log import Generation
from lightning_hetero.runtime.generation.membership import (
    LAYER_CALL,
    MOST_SILENT_S,
    Membership,
    begin_numbers,
    draw_number,
)
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, interval_s

OPEN = "lightning_hetero/open membership"
"""Key in the store whose value is the prefix of the membership that processes may join."""
_NUM_THREADS = "OMP_NUM_THREADS"
_SHARED = "LIGHTNING_HETERO_SHARES_CORES"
"""Environment variable that is set if this package, not the user, has chosen the number of
threads."""


def is_joiner() -> bool:
    """Whether this process was started to join a running training, and hasn't joined yet."""
    return JOIN in os.environ


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address as in `JOIN`; ConfigurationError if it isn't one."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(
            f"{JOIN} is {address!r}; it must be host:port of the run's store, which is "
            "MASTER_ADDR:MASTER_PORT of its processes."
        )
    return host, int(port)


def open_membership(
    met: Store,
    environment: ClusterEnvironment,
    facts: Mapping[str, str],
    *,
    silence_s: float,
    patience_s: float = 60.0,
) -> tuple[Membership, Heartbeat]:
    """Form the first generation of a new membership; return this process's part in it.

    Every rank of the first start calls it. It also tells the process's keeper, if it has one, and
    its leases which member the process is.

    Args:
        met: The store that all ranks have connected to, as `connect_store` returns it.
        environment: Knows this process's rank and the number of ranks.
        facts: What this process runs, by name; joiners must run the same.
        silence_s: Seconds without a heartbeat after which a process counts as lost.
        patience_s: See `Membership`.

    Raises:
        PeerError: See `Membership.form_first`.
    """
    number, world_size = environment.global_rank(), environment.world_size()
    assert isinstance(met, PrefixStore)
    server = met.underlying_store
    if number == 0:
        prefix = f"lightning_hetero/members/{uuid.uuid4().hex}"
        begin_numbers(PrefixStore(prefix, server), world_size)
        met.set("membership", prefix)
        server.set(OPEN, prefix)
    prefix = met.get("membership").decode()
    own, heartbeat = _begin_beats(prefix, server, number, silence_s)
    node = _find_node(own, otherwise=str(environment.node_rank()))
    membership = Membership(
        own, heartbeat, node=node, facts=facts, silence_s=silence_s, patience_s=patience_s
    )
    membership.form_first(world_size)
    where = f"{JOIN}={environment.main_address}:{environment.main_port}"
    rank_zero_info("The same script joins this run with %s.", where)
    return membership, heartbeat


def join_membership(
    facts: Mapping[str, str],
    *,
    start_timeout: timedelta,
    silence_s: float,
    patience_s: float = 60.0,
) -> tuple[Membership, Heartbeat]:
    """Join the run that `JOIN` names; return this process's part in its membership.

    Args:
        facts: What this process runs.
        start_timeout: How long this process waits until it is admitted.
        silence_s: Seconds without a heartbeat after which a process counts as lost.
        patience_s: See `Membership`.

    Raises:
        ConfigurationError: `JOIN` isn't an address, or the run refuses this process.
        PeerError: There is no run at this address, or it doesn't let this process in.
    """
    prefix, server = _connect_to_run(start_timeout)
    number = draw_number(PrefixStore(prefix, server))
    own, heartbeat = _begin_beats(prefix, server, number, silence_s)
    node = _find_node(own, otherwise=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    membership = Membership(
        own, heartbeat, node=node, facts=facts, silence_s=silence_s, patience_s=patience_s
    )
    membership.join(start_timeout.total_seconds())
    # From now on it is a process like all others, also for what its script does after this fit.
    del os.environ[JOIN]
    return membership, heartbeat


def layer_call_of_run(start_timeout: timedelta) -> str:
    """Return how the run that `JOIN` names calls a layer; "" before its first step."""
    prefix, server = _connect_to_run(start_timeout)
    own = PrefixStore(prefix, server)
    return own.get(LAYER_CALL).decode() if own.check([LAYER_CALL]) else ""


def _connect_to_run(start_timeout: timedelta) -> tuple[str, Store]:
    """Return the prefix of the membership of the run that `JOIN` names, and its store."""
    address = os.environ[JOIN]
    host, port = split_address(address)
    timeout = min(timedelta(seconds=MOST_SILENT_S), start_timeout)
    try:
        server = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        server.set_timeout(start_timeout)
        return server.get(OPEN).decode(), server
    except RuntimeError as error:
        raise PeerError(
            f"No run to join at {address}: {error}. It must train, have "
            f"ElasticRestart(in_place=True), and be reached from here. Unset {JOIN} to start one."
        ) from error


def _begin_beats(
    prefix: str, server: Store, number: int, silence_s: float
) -> tuple[PrefixStore, Heartbeat]:
    """Tell this process's keeper and leases which member it is, and begin its heartbeat.

    Returns a new client of the store, because a wait in a client holds up its other calls.
    """
    name_membership(prefix)
    tell_keeper(prefix, number)
    own = PrefixStore(prefix, server.clone())  # type: ignore[attr-defined]
    heartbeat = Heartbeat(own, number=number, interval_s=interval_s(silence_s))
    heartbeat.begin()
    # Wait until the heartbeat's connection exists, so that it isn't taken for one of a group's.
    heartbeat.has_begun.wait(10 * heartbeat.interval_s)
    return own, heartbeat


def _find_node(store: Store, *, otherwise: str) -> str:
    """Return this machine's name in the membership; a new one if it has no member yet."""
    return str(store.compare_set(f"node/{machine_namespace()}", "", otherwise).decode())


def share_cores(num_processes: int) -> None:
    """Take this process's share of its machine's cores, but never more than it had.

    A number of threads that the user has chosen stays.
    """
    if _NUM_THREADS in os.environ and _SHARED not in os.environ:
        return
    part = max(1, len(os.sched_getaffinity(0)) // num_processes)
    num_threads = min(part, torch.get_num_threads())
    torch.set_num_threads(num_threads)
    os.environ |= {_SHARED: "1", _NUM_THREADS: str(num_threads)}


class GenerationEnvironment(TorchElasticEnvironment):
    """Sets the ranks of a generation in `os.environ`, where Lightning and other code read them.

    On creation, this process takes its share of the machine's cores.

    Args:
        first: The environment in which the processes were started.
        generation: The members that train together.
        number: This process's number as a member.
    """

    def __init__(self, first: ClusterEnvironment, generation: Generation, number: int) -> None:
        before = first if isinstance(first, GenerationEnvironment) else None
        self.first: ClusterEnvironment = first if before is None else before.first
        self.device_index: int = first.local_rank() if before is None else before.device_index
        """Index of this process's device on its node; it never changes, unlike the local rank."""
        rank = generation.rank_of(number)
        assert rank is not None
        nodes = list(dict.fromkeys(item.node for item in generation.members))
        own_node = generation.members[rank].node
        self._node_rank = nodes.index(own_node)
        share_cores(sum(item.node == own_node for item in generation.members))
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(generation.world_size),
            "LOCAL_RANK": str(generation.local_rank_of(rank)),
        }

    @override
    def node_rank(self) -> int:
        return self._node_rank
