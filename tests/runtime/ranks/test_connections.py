"""How many connections a rank opens, and how many it may."""

import socket
import threading
from functools import partial

import pytest

from lightning_hetero.runtime.ranks.connections import Connections
from tests.processes import ProcessPool
from tests.runtime.ranks.control_traffic import count_sockets, wait_for_frozen


@pytest.mark.dist
def test_above_some_ranks_only_those_who_talk_are_connected(pool: ProcessPool) -> None:
    lazy, eager = (
        pool.run(partial(count_sockets, is_lazy=is_lazy), 4) for is_lazy in (True, False)
    )
    assert all(few < many for few, many in zip(lazy, eager, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("frozen", [0, 2])
def test_who_waits_over_a_connection_made_when_they_talked_can_hang_up(
    pool: ProcessPool, frozen: int
) -> None:
    # Which end listens follows from the ranks' order, so both ways are tried.
    found = pool.run(partial(wait_for_frozen, frozen=frozen), 3)
    assert found[frozen] == ""
    waited = [text for rank, text in enumerate(found) if rank != frozen]
    assert all("closed by peer" in text for text in waited), waited


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


def test_what_was_there_before_is_never_hung_up() -> None:
    """Such as a membership's own connection, though a group has listened where it comes from."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as kept,
        server.accept()[0] as other,
    ):
        connections = Connections(may_end=True)
        connections.share(lambda _: [[kept.getsockname()]])
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
