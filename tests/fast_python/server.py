"""The process that is forked: see `tests/fast_python/__init__.py`."""

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.spawn
import os
import selectors
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fast_python.program import run_and_exit

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torchdata.stateful_dataloader",
    "lightning.pytorch.cli",
    "lightning_hetero",
    "lightning_hetero.callbacks",
    "lightning_hetero.data",
    "lightning_hetero.strategy",
    "lightning_hetero.testing",
]
_PRELOADED_IF_THERE = [
    "s3fs",  # Imported by any Trainer that writes something.
    "transformers.models.llama.modeling_llama",
    "peft",
]
_MOST_DESCRIPTORS = 250
_FIRST_FREE = 400  # Above all descriptors of this process and of those who ask.
_LONGEST = 2**20


@dataclass(frozen=True)
class Request:
    """What a fork is to be."""

    arguments: list[str]
    is_unbuffered: bool
    folder: str
    environment: dict[str, str]
    descriptors: list[int]


class Server:
    """Forks this process for whoever asks, and tells how the forks end.

    Args:
        session: The process whose end is this one's end.
        folder: Where it listens.
    """

    def __init__(self, session: int, folder: Path) -> None:
        self._selector = selectors.PollSelector()
        self._folder = folder
        self._session = os.pidfd_open(session)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(100)
        self._selector.register(self._session, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._forks: dict[int, tuple[int, socket.socket]] = {}

    def run(self) -> Request:
        """Return in forks only, with descriptors as they shall be."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._session:
                    self._end()
                elif key.fileobj is self._listener:
                    if (request := self._accept()) is not None:
                        return request
                elif key.data is None:
                    self._collect(key.fd)
                else:
                    self._pass_on(key.fileobj, key.data)

    def _accept(self) -> Request | None:
        connection, _ = self._listener.accept()
        data, received, _, _ = socket.recv_fds(connection, _LONGEST, _MOST_DESCRIPTORS)
        if not data:  # It was killed before it could ask.
            connection.close()
            return None
        request = Request(**json.loads(data))
        if (process := os.fork()) == 0:
            for known in (
                connection,
                self._listener,
                *(known for _, known in self._forks.values()),
            ):
                known.detach()
            take_descriptors(received, request.descriptors)
            return request
        for descriptor in received:
            os.close(descriptor)
        end = os.pidfd_open(process)
        self._forks[end] = process, connection
        self._selector.register(end, selectors.EVENT_READ)
        self._selector.register(connection, selectors.EVENT_READ, data=process)
        return None

    def _pass_on(self, connection: Any, process: int) -> None:
        """Pass a signal on; whoever asked for the fork may also have been killed."""
        data = connection.recv(1)
        os.kill(process, data[0] if data else signal.SIGKILL)
        if not data:
            self._selector.unregister(connection)

    def _collect(self, end: int) -> None:
        process, connection = self._forks.pop(end)
        _, status = os.waitpid(process, 0)
        self._selector.unregister(end)
        os.close(end)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
            connection.send(str(status).encode())
        connection.close()

    def _end(self) -> None:
        for process, _ in self._forks.values():
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(self._folder)
        os._exit(0)


def take_descriptors(received: list[int], numbers: list[int]) -> None:
    """Have what was received under its numbers, and nothing else."""
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE) for descriptor in received]
    os.closerange(0, _FIRST_FREE)
    for descriptor, number in zip(kept, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def become(request: Request) -> None:
    """Be in the place of whoever asked: its folder, its variables, its paths."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    paths = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    if request.is_unbuffered:
        sys.stdout.reconfigure(write_through=True)
    if "OMP_NUM_THREADS" in request.environment:
        import torch

        torch.set_num_threads(int(request.environment["OMP_NUM_THREADS"]))


def main() -> None:
    """Import, listen, and be whatever is asked for."""
    session, folder = int(sys.argv[1]), Path(sys.argv[2])
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in _PRELOADED_IF_THERE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # For its own records a torchrun asks all modules who called it; this process has thousands.
    dynamic_rendezvous = importlib.import_module(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    )
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    # Each Trainer looks for callbacks in the metadata of all packages, a third of what it costs.
    registry = importlib.import_module("lightning.fabric.utilities.registry")
    registry.entry_points = functools.cache(registry.entry_points)
    # Without its device, each seed is kept for it, with the stack of who called.
    for name in ("cuda", "xpu", "mtia"):
        if not (module := importlib.import_module(f"torch.{name}")).is_available():
            module.manual_seed_all = lambda seed: None
    # Plugins of pytest, which wants to be the first to import them; and this module's own package.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("anyio", "tests")]:
        del sys.modules[name]
    root = os.getcwd()
    sys.path[:] = [path for path in sys.path if path != root]  # Forks have paths of their own.
    sys.executable = str(folder / "python")
    multiprocessing.spawn.set_executable(sys.executable)
    server = Server(session, folder)
    os.write(1, b"ready\n")
    os.dup2(0, 1)
    gc.collect()
    gc.freeze()
    request = server.run()
    become(request)
    run_and_exit(request.arguments)


if __name__ == "__main__":
    main()
