"""Run a function on several gloo processes that are started once and used again and again.

Processes are forks of one that has imported torch and Lightning (`tests.fast_python`), and tests
share a pool: `pool.run(function, world_size, *arguments)` calls `function(global_rank, *arguments)`
in each of the first `world_size` processes, with the environment of a launcher, and returns the
results by rank. Results travel by value: tensors in shared memory would be fetched from a process
that already hangs up its sockets.
"""

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import pickle
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fast_python import fast_python

LAUNCHER_VARIABLES = {
    "GROUP_RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "RANK",
    "WORLD_SIZE",
}

_FIRST_PORT, _NUM_PORTS = 12_000, 18_000
_last_port = _FIRST_PORT + os.getpid() * 997 % _NUM_PORTS
_DIED = "the process died"
_PR_SET_PDEATHSIG = 1
SILENT = "no answer in time"
MOST_TRAVEL_ALONE = 3_000
"""Elements of layers that travel as one: most of the tests' layers are by themselves with it, as
large ones are, and the smallest are not."""

ONE_CHECK = frozenset({0})
"""Iterations that begin with a check of how losses count: in a pool the first one alone."""


class ProcessFailed(Exception):
    """A process raised; holds the tracebacks by rank."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items()))
        self.failures = failures


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what a launcher, or a Trainer here, has set."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def free_port() -> int:
    """Return a port for a server on loopback.

    It lies below the ports that the system gives to connections, which could take it before it is
    used; test processes that run side by side begin to look at different places.
    """
    global _last_port
    while True:
        _last_port = _FIRST_PORT + (_last_port + 1 - _FIRST_PORT) % _NUM_PORTS
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", _last_port))
            return _last_port


def fork_server() -> Any:
    """Return what starts processes that have imported the slow modules already."""
    context = mp.get_context("forkserver")
    context.set_executable(fast_python())
    return context


def die_with_parent() -> None:
    """End when what forked this process does: a session that is cut off leaves nobody running."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def use_default_start_method() -> None:
    """Start children as any other process does; what a fork server started would use another."""
    mp.set_start_method(None, force=True)


class ProcessPool:
    """Processes that run functions together, started on first use.

    Args:
        merged_numel: Elements of small layers that travel as one unit; None leaves it as it is.
    """

    def __init__(self, merged_numel: int | None = None) -> None:
        self._merged_numel = merged_numel
        self._processes: list[mp.Process] = []
        self._connections: list[Connection] = []
        self._known: dict[bytes, bytes] = {}

    def run_alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what one process makes of arguments, as oracles do: each call is run once."""
        call = pickle.dumps((function, arguments))
        if call not in self._known:
            self._known[call] = pickle.dumps(self.run(function, 1, *arguments)[0])
        return pickle.loads(self._known[call])

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *arguments: Any,
        timeout_s: float = 240.0,
        frozen: int | None = None,
    ) -> list[Any]:
        """Return the results by rank; a rank that freezes is not waited for."""
        self._grow(world_size)
        port = free_port()
        for rank in range(world_size):
            self._connections[rank].send((function, rank, world_size, port, arguments))
        results, failures = self._collect(set(range(world_size)) - {frozen}, timeout_s)
        if failures or frozen is not None:
            self.close()
        if failures:
            raise ProcessFailed(failures)
        return results

    def _collect(self, ranks: set[int], timeout_s: float) -> tuple[list[Any], dict[int, str]]:
        results: list[Any] = [None] * (max(ranks) + 1)
        failures: dict[int, str] = {}
        open_ranks = {self._connections[rank]: rank for rank in ranks}
        while open_ranks:
            ready = wait(list(open_ranks), timeout=timeout_s)
            if not ready:
                failures |= dict.fromkeys(open_ranks.values(), SILENT)
                break
            for connection in ready:
                rank = open_ranks.pop(connection)
                try:
                    good, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    good, value = False, _DIED
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
        return results, failures

    def _grow(self, world_size: int) -> None:
        context = fork_server()
        while len(self._processes) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._merged_numel), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._connections.clear()


def _sockets() -> set[tuple[str, str]]:
    """Return this process's sockets: file descriptor and what it stands for."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return {item for item in found if item[1].startswith("socket:")}


def _hang_up(sockets: set[tuple[str, str]]) -> None:
    """End connections as the end of a process does, whoever still refers to them."""
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as end:
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                end.shutdown(socket.SHUT_RDWR)


def _serve(connection: Connection, merged_numel: int | None) -> None:
    import torch
    import torch.distributed as dist

    from lightning_hetero.runtime.iteration import running_plan
    from lightning_hetero.runtime.results import split_check

    split_check._DUE = ONE_CHECK
    if merged_numel is not None:
        running_plan.MERGED_NUMEL = merged_numel

    die_with_parent()
    torch.set_num_threads(1)
    use_default_start_method()
    warnings.simplefilter("ignore")
    gc.set_threshold(100_000)  # What a call leaves is collected behind it.
    gc.freeze()
    while True:
        try:
            function, rank, world_size, port, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            LOCAL_RANK=str(rank),
            NODE_RANK="0",
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
        )
        before = _sockets()
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                value = function(rank, *arguments)
            connection.send_bytes(pickle.dumps((True, value)))
        except BaseException:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
            os._exit(1)  # As an uncaught exception does: connections close.
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
            _hang_up(_sockets() - before)
            gc.freeze()  # What is left stays: looking at all modules again would take half a run.
