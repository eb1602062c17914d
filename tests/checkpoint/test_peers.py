"""Ranks tell each other statuses by keys of a store, and read each other's files by HTTP."""

import socket
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_hetero.checkpoint import Peers
from lightning_hetero.checkpoint.serving import FileServer, PeerFiles
from lightning_hetero.core.errors import CheckpointError, PeerError
from lightning_hetero.core.process import Progress
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore
from tests.checkpoint.states import run_ranks


def test_each_rank_learns_what_each_gave_however_often() -> None:
    def action(rank: int, peers: Peers) -> list[list[Any]]:
        other = peers.branch(timeout_s=20.0, progress=Progress())
        found = [peers.gather([rank, round_]) for round_ in range(20)]
        return [*found, other.gather({"rank": rank})]

    for found in run_ranks(4, action):
        assert found[:-1] == [[[rank, round_] for rank in range(4)] for round_ in range(20)]
        assert found[-1] == [{"rank": rank} for rank in range(4)]


def test_work_that_moves_is_waited_for_and_work_that_hangs_is_given_up() -> None:
    let_go = threading.Event()

    def action(rank: int, peers: Peers) -> list[dict[str, Any]]:
        def slow(progress: Progress) -> int:
            for _ in range(20 if rank == 1 else 0):
                time.sleep(0.1)
                progress.tick()
            return rank

        def hangs(_: Progress) -> None:
            assert rank == 0 or let_go.wait(60)

        _, answers = peers.do(slow, lambda found: {"found": found})
        with pytest.raises(CheckpointError, match=r"Rank 1: storage made no progress for 1\.2 s"):
            peers.do(hangs)
        return answers

    assert run_ranks(2, action, timeout_s=1.2) == [[{"found": 0}, {"found": 1}]] * 2
    let_go.set()


def test_what_one_rank_could_not_do_is_raised_on_all() -> None:
    def action(rank: int, peers: Peers) -> str:
        def work(_: Progress) -> None:
            if rank == 1:
                raise OSError("disk full")

        with pytest.raises(CheckpointError) as caught:
            peers.do(work)
        _, answers = peers.do(work, may_fail=True)
        assert "error" in answers[1]
        return str(caught.value)

    assert run_ranks(2, action) == ["Rank 1: disk full"] * 2


def test_a_wait_ends_once_a_rank_is_known_to_be_gone_or_silent_or_the_store_is_gone() -> None:
    class Broken(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer")

    is_gone = threading.Event()
    threading.Timer(0.2, is_gone.set).start()
    with pytest.raises(PeerError, match="lost another rank"):
        Peers(HashStore(), world_size=2, is_over=is_gone.is_set).gather(None)
    with pytest.raises(PeerError, match=r"for ranks \[1\] to answer"):
        Peers(HashStore(), world_size=2, timeout_s=0.2).gather(None)
    with pytest.raises(PeerError, match="lost the store"):
        Peers(Broken(), world_size=2).gather(None)


def test_all_learn_that_a_process_has_ended_and_wait_for_slow_ones() -> None:
    def action(rank: int, peers: Peers) -> str:
        peers.serve({})
        peers.gather(None)
        if rank == 2:
            time.sleep(1.5)  # Longer than others take to look.
        peers.gather(None)
        if rank == 2:
            peers.close()  # As the system does when a process ends.
            return ""
        with pytest.raises(PeerError) as caught:
            peers.gather(None)
        return str(caught.value)

    found = run_ranks(4, action, timeout_s=10_000.0)
    assert all("process of rank 2 has ended" in found[rank] for rank in (0, 1, 3))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", socket.gethostname()])
def test_ranges_of_files_are_served_to_whoever_knows_the_token(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    store = MemoryStore()
    store.files["step 1/a b"] = b"0123456789"
    server = FileServer(host)
    server.stores["DISK"] = store
    name, port, token = server.address
    files = PeerFiles((name, port, token), "DISK", 20.0)
    assert files.read("step 1/a b") == b"0123456789"
    assert files.read("step 1/a b", 2, 5) == b"234"
    assert files.read("step 1/a b", 5, 5) == b""
    with pytest.raises(FileNotFoundError, match="No such file"):
        files.read("step 1/c")
    with pytest.raises(FileNotFoundError, match="MEMORY"):
        PeerFiles((name, port, token), "MEMORY", 20.0).read("step 1/a b")
    with pytest.raises(OSError, match="unknown token"):
        PeerFiles((name, port, "other"), "DISK", 20.0).read("step 1/a b")
    server.close()
    with pytest.raises(ConnectionRefusedError):
        files.read("step 1/a b")


def test_a_peer_whose_storage_fails_or_hangs_says_so() -> None:
    let_go, server = threading.Event(), FileServer("127.0.0.1")

    def before(verb: str, name: str) -> None:
        if name == "bad":
            raise OSError(5, "Input/output error")
        assert let_go.wait(60)

    server.stores["DISK"] = FaultyStore(MemoryStore(), before)
    files = PeerFiles(server.address, "DISK", 0.3)
    with pytest.raises(OSError, match="Input/output error"):
        files.read("bad")
    with pytest.raises(TimeoutError, match=r"made no progress for 0\.3 s"):
        files.read("slow")
    let_go.set()
    server.close()
