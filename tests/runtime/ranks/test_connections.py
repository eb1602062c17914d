"""How many connections a rank opens, and how many it may."""

import socket
import threading
from functools import partial

import pytest
import torch.distributed as dist

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.ranks.connections import Connections
from tests.processes import ProcessPool
from tests.runtime.ranks.control_traffic import (
    connect_and_agree,
    connect_stages,
    talk_until_hung_up,
    wait_for_frozen,
)


@pytest.mark.dist
@pytest.mark.parametrize("frozen", [0, 2])
def test_who_waits_for_a_frozen_rank_can_hang_up(pool: ProcessPool, frozen: int) -> None:
    found = pool.run(partial(wait_for_frozen, frozen=frozen), 3)
    assert found[frozen] == ""
    waited = [text for rank, text in enumerate(found) if rank != frozen]
    assert all("closed by peer" in text for text in waited), waited


@pytest.mark.dist
def test_ranks_that_talk_while_both_hang_up_notice_it(pool: ProcessPool) -> None:
    """gloo forgets a send whose write fails, so connections first end for reading only."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    talk = partial(talk_until_hung_up, port=server.port, num_times=40)
    assert pool.run(talk, 2) == [{"ended"}, {"ended"}]


def test_who_waits_for_a_rank_that_never_comes_is_called_back() -> None:
    connections, comes, waits = Connections(may_end=True), threading.Event(), threading.Event()

    def make() -> None:
        waits.set()
        comes.wait()

    def hang_up() -> None:
        waits.wait()
        connections.hang_up()

    threading.Thread(target=hang_up).start()
    with pytest.raises(RuntimeError, match="gloo: connections were hung up before all ranks"):
        connections.open(make)
    comes.set()


@pytest.mark.dist
def test_only_plans_with_stages_connect_them_and_do_it_once(pool: ProcessPool) -> None:
    plans = [ParallelPlan.even(world_size=2, num_layers=2, num_stages=n) for n in (1, 2, 1, 2)]
    for found in pool.run(partial(connect_stages, plans=plans), 2):
        sockets, can_talk = zip(*found, strict=True)
        assert can_talk == (False, True, True, True)
        assert sockets[1] > 0
        assert sockets[0] == sockets[2] == sockets[3] == 0


@pytest.mark.dist
def test_many_ranks_connect_only_with_those_to_whom_they_talk(pool: ProcessPool) -> None:
    eager, lazy = (pool.run(partial(connect_and_agree, most_eager=most), 6) for most in (64, 1))
    assert all(few < many for few, many in zip(lazy, eager, strict=True))


def test_what_was_there_before_is_never_hung_up() -> None:
    """Such as a membership's own connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as kept,
        server.accept()[0] as other,
    ):
        connections = Connections(may_end=True)
        connections.hang_up()
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
                connections.hang_up()
                assert opened.recv(1) == b""
                other.send(b"goes on")
