"""How many connections a rank opens, and how many it may."""

import os
import resource
import socket
import threading
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.generation import entering, joiners
from lightning_hetero.runtime.ranks.connections import LAZY, Connections
from tests.processes import ProcessPool
from tests.runtime.ranks.control_traffic import (
    connect_stages,
    count_sockets,
    talk_until_hung_up,
    wait_for_frozen,
)


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


@pytest.mark.parametrize("is_lazy", [True, False])
def test_ranks_tell_where_they_listen_only_if_they_connect_later(
    monkeypatch: pytest.MonkeyPatch, *, is_lazy: bool
) -> None:
    monkeypatch.setenv(LAZY, str(int(is_lazy)))
    told: list[object] = []
    Connections().share(lambda own: told.append(own) or [])  # type: ignore[func-returns-value]
    assert bool(told) is is_lazy


@pytest.mark.parametrize(("num_first", "lazy"), [(64, None), (65, "1")])
def test_who_joins_a_run_of_many_connects_as_they_do(
    monkeypatch: pytest.MonkeyPatch, num_first: int, lazy: str | None
) -> None:
    monkeypatch.delenv(LAZY, raising=False)
    store = dist.HashStore()
    joiners.begin_numbers(store, num_first)
    monkeypatch.setenv(entering.JOIN, "127.0.0.1:1")
    monkeypatch.setattr(entering, "_connect", lambda *_: (store, "run"))
    monkeypatch.setattr(entering, "PrefixStore", lambda _, store: store)
    monkeypatch.setattr(entering, "Joiner", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        entering.join_membership({}, start_timeout=timedelta(seconds=1), silence_s=2.0)
    assert os.environ.get(LAZY) == lazy
    monkeypatch.delenv(LAZY, raising=False)


def test_what_was_there_before_is_never_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a membership's own connection, though a group has listened where it comes from."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as kept,
        server.accept()[0] as other,
    ):
        monkeypatch.setenv(LAZY, "1")
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


def test_all_is_hung_up_where_few_more_files_may_be_open() -> None:
    """While connections end, each is held by another descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        address = server.getsockname()
        opened = connections.open(
            lambda: [stack.enter_context(socket.create_connection(address, 5)) for _ in range(20)]
        )
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        most = [number for number in range(10_000) if number not in taken][4]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        try:
            connections.hang_up()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, limits[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert [end.recv(1) for end in opened] == [b""] * 20
