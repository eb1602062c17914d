"""Make a process a member of a run: with all others at the first start, or as a joiner later."""

import os
import socket
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process import Deadline, machine_namespace, name_membership
from lightning_hetero.runtime.generation.joiners import (
    Admission,
    Joiner,
    begin_numbers,
    draw_number,
    find_layer_call,
    num_first,
)
from lightning_hetero.runtime.generation.membership import Membership
from lightning_hetero.runtime.generation.worker import JOIN, tell_keeper
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, interval_s
from lightning_hetero.runtime.ranks.meeting import choose_connecting

__all__ = [
    "find_layer_call_of_run",
    "find_node",
    "is_joiner",
    "join_membership",
    "open_membership",
    "split_address",
]

OPEN = "lightning_hetero/open membership"
"""Key in the store that holds the prefix of the membership which joiners may join."""


def is_joiner() -> bool:
    """Whether this process was started to join a run that trains, and hasn't yet."""
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
    """Return a member's part in a new membership, once its first generation has formed.

    Every rank of the first start calls it. Its keeper, if it has one, is told, and so are this
    process's leases.

    Args:
        met: What the ranks have met in, served by no rank, as `connect_store` returns it.
        environment: Says which rank this is, and of how many.
        facts: What it runs; joiners must run the same.
        silence_s: How late a beat may be.
        patience_s: See `Membership`.

    Raises:
        PeerError: See `Membership.form`.
    """
    number, world_size = environment.global_rank(), environment.world_size()
    node, address = str(environment.node_rank()), environment.main_address
    assert isinstance(met, PrefixStore)
    server = met.underlying_store
    if number == 0:
        name = uuid.uuid4().hex
        begin_numbers(PrefixStore(_prefix(name), server), world_size)
        met.set("membership", name)
        server.set(OPEN, _prefix(name))
    prefix = _prefix(met.get("membership").decode())
    find_node(PrefixStore(prefix, server), otherwise=node)
    _be_known(prefix, number)
    own, heartbeat = _begin_beats(prefix, server, number, silence_s)
    admission = Admission(own, heartbeat, facts)
    membership = Membership(
        own, number=number, node=node, admission=admission, patience_s=patience_s
    )
    membership.form(range(world_size))
    where = f"{JOIN}={address}:{environment.main_port}"
    rank_zero_info("The same script joins this run with %s.", where)
    return membership, heartbeat


def join_membership(
    facts: Mapping[str, str],
    *,
    start_timeout: timedelta,
    silence_s: float,
    patience_s: float = 60.0,
) -> tuple[Membership, Heartbeat]:
    """Return a member's part in the membership of the run that `JOIN` names, once it is let in.

    Args:
        facts: What it runs.
        start_timeout: How long it may take until it is let in.
        silence_s: How late a beat may be.
        patience_s: See `Membership`.

    Raises:
        ConfigurationError: `JOIN` is no address; or this process is refused.
        PeerError: No run is there, or it doesn't let this process in.
    """
    server, prefix = _connect(os.environ[JOIN], start_timeout)
    of_run = PrefixStore(prefix, server)
    choose_connecting(num_first(of_run))
    number = draw_number(of_run)
    own, heartbeat = _begin_beats(prefix, server, number, silence_s)
    joiner = Joiner(of_run, heartbeat, facts)
    _be_known(prefix, number)
    node = find_node(of_run, otherwise=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    admission = Admission(own, heartbeat, facts)
    membership = Membership(
        own, number=number, node=node, admission=admission, patience_s=patience_s
    )
    membership.enter_called(joiner.wait_for_call(start_timeout.total_seconds()))
    # From now on it is a process like all others, whatever its script does after this fit.
    del os.environ[JOIN]
    return membership, heartbeat


def find_layer_call_of_run(start_timeout: timedelta) -> str:
    """Return what a layer's call looks like in the run that `JOIN` names; empty if nobody says.

    Raises:
        ConfigurationError, PeerError: See `join_membership`.
    """
    server, prefix = _connect(os.environ[JOIN], start_timeout)
    return find_layer_call(PrefixStore(prefix, server))


def _connect(address: str, start_timeout: timedelta) -> tuple[Store, str]:
    """Return the run's store, and what names in its membership begin with."""
    host, port = split_address(address)
    _refuse_unserved(host, port)
    try:
        server = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=start_timeout
        )
        return server, server.get(OPEN).decode()
    except RuntimeError as error:
        raise PeerError(
            f"No run to join at {address} in {start_timeout.total_seconds():.0f} s: {error}. It "
            "must have ElasticRestart(in_place=True) and be reached from here."
        ) from error


def _refuse_unserved(host: str, port: int, *, patience_s: float = 3.0) -> None:
    """Refuse a port that nobody serves: a run that trains has its store there.

    Raises:
        PeerError: Nobody does for `patience_s`, since its host may have just begun.
    """
    deadline = Deadline(patience_s)
    while True:
        try:
            socket.create_connection((host, port), timeout=patience_s).close()
            return
        except ConnectionRefusedError as error:
            if deadline.is_over:
                raise PeerError(
                    f"Nobody serves a store at {host}:{port}: the run has ended, or hasn't begun. "
                    f"A process joins a run that trains; unset {JOIN} to start one."
                ) from error
            time.sleep(0.1)
        except OSError:
            return  # Such as a name that isn't known yet: the store's client tries for longer.


def _prefix(name: str) -> str:
    return f"lightning_hetero/members/{name}"


def _be_known(prefix: str, number: int) -> None:
    """Tell this process's keeper and its leases which member of which run it is."""
    name_membership(prefix)
    tell_keeper(prefix, number)


def _begin_beats(
    prefix: str, server: Store, number: int, silence_s: float
) -> tuple[PrefixStore, Heartbeat]:
    """Return a client for the membership, and this process's heartbeat, which has begun.

    A client of its own, since another one's wait holds up all other calls.
    """
    own = PrefixStore(prefix, server.clone())  # type: ignore[attr-defined]
    heartbeat = Heartbeat(own, number=number, interval_s=interval_s(silence_s))
    heartbeat.begin()
    # So that its connection exists, and isn't mistaken for one that groups open later.
    heartbeat.has_begun.wait(10 * heartbeat.interval_s)
    return own, heartbeat


def find_node(store: Store, *, otherwise: str) -> str:
    """Return what the membership calls this machine; a new name where nobody of it has been.

    Args:
        store: The membership's.
        otherwise: The new name.
    """
    return str(store.compare_set(f"node/{machine_namespace()}", "", otherwise).decode())
