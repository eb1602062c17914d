"""Whoever waits for another rank can hang up, and the other rank notices it."""

import socket
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.runtime.ranks.communicators import init_process_group
from lightning_hetero.runtime.ranks.connections import Connections, is_broken_connection
from tests.processes import ProcessPool


def talk_until_hung_up(rank: int, *, port: int, num_times: int) -> set[str]:
    """Exchange message after message until both ranks hang up, many times; return how waits ended.

    A wait that isn't ended by hanging up ends by its timeout, and gloo says so. No rank serves the
    store at the port.
    """
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    found = set()
    for number in range(num_times):
        connections = Connections()
        store = dist.PrefixStore(str(number), server)
        options = {"timeout": timedelta(seconds=5)}
        connections.open(partial(init_process_group, "gloo", store, rank, 2, **options))
        hangs_up = threading.Timer((1 + number % 7) * 1e-3, connections.close)
        dist.barrier()
        hangs_up.start()
        try:
            while True:
                dist.all_reduce(torch.zeros(100))
        except RuntimeError as error:
            if not is_broken_connection(error):
                raise
            found.add("Timed out" if "Timed out" in str(error) else "ended")
        hangs_up.join()
        dist.destroy_process_group()
        store.add("left", 1)
        while store.add("left", 0) < 2:
            time.sleep(0.001)
    return found


@pytest.mark.dist
def test_ranks_that_talk_while_both_hang_up_notice_it(pool: ProcessPool) -> None:
    """gloo forgets a send whose write fails, so connections first end for reading only."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    talk = partial(talk_until_hung_up, port=server.port, num_times=15)
    assert pool.run(talk, 2) == [{"ended"}, {"ended"}]


def test_what_was_there_before_is_never_hung_up() -> None:
    """Such as a membership's own connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as kept,
        server.accept()[0] as other,
    ):
        connections = Connections(may_end=True)
        connections.close()
        kept.sendall(b"x")
        assert other.recv(1) == b"x"


@pytest.mark.parametrize("may_end", [False, True])
def test_what_is_opened_is_returned_or_raised_and_hung_up(may_end: bool) -> None:  # noqa: FBT001
    connections = Connections(may_end=may_end)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with connections.open(lambda: socket.create_connection(address)) as opened:
            with pytest.raises(ZeroDivisionError):
                connections.open(lambda: 1 // 0)
            with socket.create_connection(address) as other:
                end = server.accept()[0]
                end.settimeout(10.0)
                connections.close()
                assert opened.recv(1) == end.recv(1) == b""
                end.close()
                other.send(b"goes on")
