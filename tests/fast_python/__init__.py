"""A command `python` for what tests start: its processes are forks of one that has imported much.

A process that imports torch and Lightning takes seconds of CPU for that, and the tests start some
hundred. `fast_python()` gives the path of a command that takes the same arguments as `python` but
hardly any time: it asks a server, which one session of tests shares, for a fork, hands its open
files over, and stands for the fork: it ends as that ends, and passes signals on. What a fork starts
by `sys.executable` is a fork in the same way.

What forks can't show are starts of interpreters themselves: modules that nobody imports, and orders
of sets, which differ from interpreter to interpreter. For that `tests/test_imports.py` and one run
of three ranks in `tests/runtime/ranks/test_launch.py` start real ones.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["fast_python"]

_ROOT = Path(__file__).resolve().parents[2]
_COMMAND = """#!/bin/sh
exec '{python}' -IS '{here}/command.py' '{folder}' '{python}' '{root}' "$@"
"""


def fast_python() -> str:
    """Return the command's path; the session's first call starts the server."""
    # What this process starts belongs to its session, such as the processes of pytest-xdist.
    session = int(os.environ.setdefault("FAST_PYTHON_SESSION", str(os.getpid())))
    # A process number comes again; together with its start it doesn't.
    start = Path(f"/proc/{session}/stat").read_text().rpartition(")")[2].split()[19]
    folder = Path(tempfile.gettempdir()) / f"fast-python-{session}-{start}"
    folder.mkdir(mode=0o700, exist_ok=True)
    command = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not command.exists():
            _start(session, folder)
            here = Path(__file__).parent
            text = _COMMAND.format(python=sys.executable, here=here, folder=folder, root=_ROOT)
            command.write_text(text)
            command.chmod(0o700)
    return str(command)


def _start(session: int, folder: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fast_python.server", str(session), str(folder)],
        cwd=_ROOT,
        env={**kept, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    with server.stdout as ready:
        assert ready.readline() == b"ready\n"
    server.returncode = 0  # It outlives whoever has started it.
