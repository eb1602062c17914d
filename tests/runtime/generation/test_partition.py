"""A network that falls apart and heals: one side goes on, and the other one never trains again."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.callbacks.in_place import BATCH, playing, undisturbed

_STUCK_S = 40.0
"""Shorter than ranks wait for a store, and much longer than a step."""


class Proxy:
    """Stands between a server on loopback and its clients, and holds all bytes back while cut."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._flows.clear()

    def heal(self) -> None:
        self._flows.set()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = self._connect()
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._hand_on, args=(source, sink), daemon=True).start()

    def _connect(self) -> socket.socket:
        while True:
            with suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self._server_port))
            time.sleep(0.05)  # The server starts.

    def _hand_on(self, source: socket.socket, sink: socket.socket) -> None:
        with source, sink, suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)  # The thread of the other direction waits in it.


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_processes_of_two_sides_never_both_train(tmp_path: Path) -> None:
    """The side with the store goes on alone; the other one ends once it hears of it."""
    near, far, first, last = 0, "far", 2, 40
    options = {"num_steps": last, "every": 100, "heartbeat_s": 5.0, "redundancy": 1}
    with playing(tmp_path / "run", 1, num_nodes=2, **options) as node:
        node.let_go_on_to(first)
        proxy = Proxy(node.wait_for_store())
        node.add_second(far, proxy.port)
        node.wait_for_all((near, far), first)
        proxy.cut()

        def begun() -> list[float]:
            return [item["at_s"] for item in node.records(near) if item.get("size") == 1]

        alone = node.go_on_until(lambda: bool(begun()), first=first + 1, last=last - 10)
        node.wait_for_all((near,), alone + 3)
        proxy.heal()
        while Path(f"/proc/{node.pid_of(far)}").exists():
            time.sleep(0.05)
        node.let_go_on_to(last)
        assert node.wait_for_end() == 0, node.log()
        losses = {item["step"]: item["loss"] for item in node.records(near) if "step" in item}
        assert list(losses.values()) == pytest.approx(undisturbed(2, last), rel=1e-5)
        rows = [item["rows"] for item in node.records(near) if item.get("step") == last]
        assert [len(set(item)) for item in rows] == [2 * BATCH]
        trained_far = [item["at_s"] for item in node.records(far) if "step" in item]
        assert max(trained_far) < begun()[0]
        text = (node.folder / "log").read_text()
    assert "ranks go on in place, without ranks [1]" in text


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_processes_whose_store_does_not_answer_for_a_while_go_on_together(tmp_path: Path) -> None:
    """Nobody trains meanwhile, no rank is lost, and no step is."""
    options = {"num_steps": 100_000, "every": 100_000, "heartbeat_s": 6.0, "redundancy": 1}
    with playing(tmp_path / "run", 2, **options) as node:
        node.wait_for_all(range(2), 3)
        server = node.process.pid
        assert server is not None
        os.kill(server, signal.SIGSTOP)

        def have_ended() -> bool:
            return all(any("ended" in item for item in node.records(rank)) for rank in range(2))

        def is_stuck() -> bool:
            """Whether they wait for the store within a step, as they do if that breaks it off."""
            newest_s = max(node.records(rank)[-1]["at_s"] for rank in range(2))
            return time.time() - newest_s > _STUCK_S

        # They notice at the next step.
        last = 3 + node.go_on_until(lambda: have_ended() or is_stuck(), first=4, last=1000)
        node.let_go_on_to(last)
        os.kill(server, signal.SIGCONT)
        losses = undisturbed(2, last)
        for rank in range(2):
            node.wait_for_step(rank, last)
        assert "in place, without ranks []" in node.log()
        assert "The run's store has stopped answering" in node.log()
        for rank in range(2):
            items = node.records(rank)
            assert [item["size"] for item in items if "size" in item] == [2, 2]
            trained = [item for item in items if item.get("step", last + 1) <= last]
            assert [item["step"] for item in trained] == list(range(1, last + 1))
            assert [item["loss"] for item in trained] == pytest.approx(losses, rel=1e-5)
