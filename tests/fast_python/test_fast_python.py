"""Whoever starts the command sees what they would see of `python`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fast_python import fast_python

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv, __name__); sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'at its end')",
        "import os; print(os.getcwd(), os.environ['NAME'], len(os.listdir('/proc/self/fd')))",
    ],
)
def test_a_fork_prints_and_ends_as_an_interpreter_does(code: str, tmp_path: Path) -> None:
    fast, real = (
        subprocess.run(
            [python, "-c", code, "an argument"],
            cwd=tmp_path,
            env={**os.environ, "NAME": "value"},
            capture_output=True,
            text=True,
            check=False,
        )
        for python in (fast_python(), sys.executable)
    )
    assert fast.stdout == real.stdout
    assert (fast.returncode, fast.stderr) == (real.returncode, real.stderr)


def test_signals_reach_the_fork_and_its_end_is_the_commands() -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); {SLEEPS}"
    with subprocess.Popen([fast_python(), "-c", code], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        command.stdout.readline()
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 7


def test_a_command_that_is_killed_takes_its_fork_along() -> None:
    with subprocess.Popen([fast_python(), "-c", SLEEPS], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        fork = int(command.stdout.readline())
        assert fork != command.pid
        command.kill()
        assert command.wait(60) == -signal.SIGKILL
    wait_until_gone(fork)


def wait_until_gone(process: int) -> None:
    end_s = time.monotonic() + 60
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
