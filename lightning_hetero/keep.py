"""Keep a script's process: `torchrun ... -m lightning_hetero.keep script.py`.

With `ElasticRestart(in_place=True)` each worker has a keeper, a process that outlives it (see
`runtime.generation.keeper`). Without this command the script begins in the process that becomes the
keeper, and begins again in the worker when it first calls `fit`. With it the script begins once:
the launcher starts the keeper, and the keeper starts the script.

Start it as the process of each rank, with `MASTER_ADDR`, `MASTER_PORT` and `RANK` in the
environment as torchrun sets them; or with `LIGHTNING_HETERO_JOIN=host:port`, to join a run. Linux
only.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NoReturn

from lightning_hetero.runtime.generation.keeper import (
    BLOCKED,
    JOIN,
    Keeper,
    Worker,
    joiner_variables,
)

_TASK = "LIGHTNING_HETERO_KEEPER"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_NEEDED = "MASTER_ADDR", "MASTER_PORT", "RANK"


@dataclass(frozen=True, kw_only=True)
class KeeperTask:
    """The task of a keeper."""

    command: list[str]
    """The command that starts a worker."""
    workers: list[dict[str, str]]
    """For each worker, environment variables in addition to this process's."""
    address: str
    """Host that serves the store."""
    port: int
    serves: bool
    """Whether this keeper serves it."""
    replaces: bool
    """Whether to start joiners on the devices of lost workers."""
    path: list[str] = field(default_factory=lambda: list(sys.path))
    """The folders in which Python looks for modules."""


def become_keeper(task: KeeperTask) -> NoReturn:
    """Replace this process by a keeper; nothing but the process id remains."""
    sys.stdout.flush()
    sys.stderr.flush()
    begin = "from lightning_hetero.keep import keep_by_task; keep_by_task()"
    code = f"import sys; sys.path[:] = {task.path!r}; {begin}"
    environment = os.environ | {_TASK: json.dumps(asdict(task))}
    os.execve(sys.executable, [sys.executable, "-c", code], environment)


def block_signals() -> None:
    """Leave a keeper's signals to its loop; called before there are threads to receive them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)


def be_kept() -> None:
    """Make this worker die with its keeper, and unblock the signals that the keeper blocks."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def keep_by_task() -> None:
    """Run as a keeper, with the task from the environment."""
    block_signals()
    os._exit(keep(KeeperTask(**json.loads(os.environ.pop(_TASK)))))


def keep(task: KeeperTask) -> int:
    """Start the workers of a task, and keep them; return the exit code of this process.

    Called by the main thread, before there are others, once signals are blocked.
    """

    def start(own: dict[str, str], environment: dict[str, str], descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            be_kept()
            os.set_inheritable(descriptor, True)
            os.execve(task.command[0], task.command, os.environ | own | environment)
        return pid

    workers = [Worker(partial(start, own)) for own in task.workers]
    keeper = Keeper(
        workers, address=task.address, port=task.port, serves=task.serves, replaces=task.replaces
    )
    return keeper.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_hetero.keep",
        description="Keep a process that runs a script with ElasticRestart(in_place=True).",
    )
    parser.add_argument(
        "--no-replace",
        action="store_true",
        help="start no process on the device of one that was lost",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module")
    parser.add_argument("script", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def task_of(arguments: Sequence[str]) -> KeeperTask:
    """Return the keeper's task for a command line, in the environment of a launched process.

    Raises:
        SystemExit: The command line or the environment can't be used; says what to give.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    joined = os.environ.get(JOIN)
    if joined is not None:
        address, _, port = joined.rpartition(":")
    else:
        lacking = [name for name in _NEEDED if name not in os.environ]
        if lacking:
            parser.error(
                f"{', '.join(lacking)} must be in the environment, as torchrun sets it: start it "
                f"with torchrun, or set {JOIN}=host:port to join a run."
            )
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not address or not port.isdecimal():
        parser.error(f"the run's store is at {address!r}, port {port!r}; give a host and a number.")
    own = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    script = ["-m", given.script] if given.is_module else [given.script]
    return KeeperTask(
        command=[sys.executable, "-u", *script, *given.arguments],
        workers=[own if joined is None else own | joiner_variables(joined)],
        address=address,
        port=int(port),
        serves=joined is None and not agent_serves and os.environ["RANK"] == "0",
        replaces=not given.no_replace,
    )


def keep_script() -> None:
    """Run as a keeper."""
    if not sys.platform.startswith("linux"):
        sys.exit(f"lightning_hetero.keep needs Linux; this is {sys.platform}.")
    task = task_of(sys.argv[1:])
    block_signals()
    os._exit(keep(task))


if __name__ == "__main__":
    keep_script()
