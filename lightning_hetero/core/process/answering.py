"""Processes that answer questions, so that solving takes nothing from who asks.

A thread that solves would take Python's lock from the one that launches the training's kernels. A
process doesn't, and it may die without harm. It imports neither torch nor Lightning, so it starts
quickly and is small.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["AnsweringProcess", "answer_questions"]

_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from {module} import serve; serve()"


class AnsweringProcess:
    """A process that runs `serve()` of a module, which calls `answer_questions`.

    Args:
        module: The module's whole name.
        is_silent: Whether what it prints is lost; else it is written to standard error.
    """

    def __init__(self, module: str, *, is_silent: bool = False) -> None:
        self._module = module
        self._is_silent = is_silent
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The process that runs."""
        return self._process.pid

    def ask(self, question: Any) -> Any:
        """Return the answer; OSError, EOFError or UnpicklingError if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def restart(self) -> None:
        """Put a new process in its place."""
        self.stop()
        self._process = self._start()

    def kill(self) -> None:
        """End the process; any thread may, also while another waits for an answer."""
        self._process.kill()

    def stop(self) -> None:
        """End the process and close its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # A question that the process didn't live to read.

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[3])
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(root=root, module=self._module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._is_silent else None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # A Ctrl-C is for the trainer, who may still want to save.
            start_new_session=True,
        )


def answer_questions(answer: Callable[[Any], Any]) -> None:
    """Answer until standard input ends, as it does when the process that asks dies."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Whatever prints must not come between the answers.
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(answer(question), answers)
        answers.flush()
