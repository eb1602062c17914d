"""Run scripts as the command `python` does, in processes that needn't import torch and Lightning.

Nor need what they start by `sys.executable`: it is `tests.fast_python`.
"""

import atexit
import fcntl
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.multiprocessing as mp

from tests.fast_python.program import run
from tests.processes import (
    clean_environment,
    die_with_parent,
    fork_server,
    free_port,
    use_default_start_method,
)

TIMEOUT_S = 550.0
"""For a script that should end by itself."""


def start_python(
    arguments: Sequence[str | Path],
    *,
    output: Path,
    folder: Path,
    executable: str | None = None,
    **variables: str,
) -> mp.Process:
    """Start a script, `-m` and a module, or `-c` and code, with its arguments.

    Args:
        arguments: What would follow `python`.
        output: File to which both outputs are appended.
        folder: Where it runs.
        executable: What it starts others by, by default the fast one.
        variables: Its environment, besides `clean_environment()`.
    """
    words = [str(argument) for argument in arguments]
    environment = clean_environment(**variables)
    process = fork_server().Process(
        target=run_as_main, args=(words, output, folder, environment, executable)
    )
    process.start()
    return process


def run_python(
    arguments: Sequence[str | Path],
    *,
    folder: Path,
    num_processes: int = 1,
    executable: str | None = None,
    **variables: str,
) -> tuple[int, str]:
    """Run a script to its end; return its exit code and what it wrote to both outputs.

    See `start_python`. Several processes get the environment of a launcher, one process none.
    """
    output = folder / "output"
    output.unlink(missing_ok=True)
    processes = [
        start_python(
            arguments,
            output=output,
            folder=folder,
            executable=executable,
            **variables,
            **launched,
        )
        for launched in launcher_environments(num_processes)
    ]
    code = next((code for code in wait_for_end(processes, output) if code != 0), 0)
    return code, output.read_text("utf-8", errors="replace")


def wait_for_end(processes: Sequence[mp.Process], output: Path) -> list[int]:
    """Return the exit codes when what the processes have started has ended, too.

    Processes that take too long are killed.
    """
    deadline = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    with output.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    return [process.exitcode for process in processes]


def launcher_environments(num_processes: int) -> list[dict[str, str]]:
    """Return what a launcher tells each of several processes; one process is told nothing."""
    if num_processes == 1:
        return [{}]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**address, "LOCAL_RANK": str(rank), "NODE_RANK": "0"} for rank in range(num_processes)]


def run_as_main(
    arguments: list[str],
    output: Path,
    folder: Path,
    environment: dict[str, str],
    executable: str | None = None,
) -> None:
    """Be the process `python` with these arguments; called in a fork."""
    import torch

    die_with_parent()
    with output.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # Held by all who inherit the output.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    use_default_start_method()
    sys.executable = executable or sys.executable
    gc.freeze()
    try:
        run(arguments)
    finally:
        atexit._run_exitfuncs()  # A forked process ends without them.
