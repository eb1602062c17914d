"""Run scripts as the command `python` does, in processes that needn't import torch and Lightning.

Whatever such a process starts is a real `python`.
"""

import atexit
import fcntl
import gc
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.multiprocessing as mp

from tests.processes import (
    clean_environment,
    fork_server,
    free_port,
    use_default_start_method,
)

TIMEOUT_S = 550.0
"""For a script that should end by itself."""


def start_python(
    arguments: Sequence[str | Path], *, output: Path, folder: Path, **variables: str
) -> mp.Process:
    """Start a script, `-m` and a module, or `-c` and code, with its arguments.

    Args:
        arguments: What would follow `python`.
        output: File to which both outputs are appended.
        folder: Where it runs.
        variables: Its environment, besides `clean_environment()`.
    """
    words = [str(argument) for argument in arguments]
    environment = clean_environment(**variables)
    process = fork_server().Process(target=run_as_main, args=(words, output, folder, environment))
    process.start()
    return process


def run_python(
    arguments: Sequence[str | Path], *, folder: Path, num_processes: int = 1, **variables: str
) -> tuple[int, str]:
    """Run a script to its end; return its exit code and what it wrote to both outputs.

    Several processes get the environment of a launcher, one process none.
    """
    output = folder / "output"
    output.unlink(missing_ok=True)
    processes = [
        start_python(arguments, output=output, folder=folder, **variables, **launched)
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
    arguments: list[str], output: Path, folder: Path, environment: dict[str, str]
) -> None:
    """Be the process `python` with these arguments; called in a fork."""
    import torch

    with output.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # Held by all who inherit the output.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    use_default_start_method()
    gc.freeze()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # A forked process ends without them.
