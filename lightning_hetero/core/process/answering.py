"""Helper processes that answer questions, so that solving doesn't slow down the trainer.

A solving thread would hold Python's global lock, which the thread that launches kernels needs. A
process doesn't, and it may die without harm. It imports neither torch nor Lightning, so it starts
quickly and takes little memory.
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
        module: The module's full name.
        is_silent: Whether its output is discarded; else it goes to standard error.
    """

    def __init__(self, module: str, *, is_silent: bool = False) -> None:
        self._module = module
        self._is_silent = is_silent
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Id of the process that runs."""
        return self._process.pid

    def ask(self, question: Any) -> Any:
        """Wait for the answer; OSError, EOFError or UnpicklingError if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def restart(self) -> None:
        """End the process and start a new one."""
        self.stop()
        self._process = self._start()

    def kill(self) -> None:
        """Kill the process, from any thread, even while another one waits for an answer."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process, wait for its end and close its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # The process died before it read the last question.

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[3])
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(root=root, module=self._module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._is_silent else None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Ctrl-C must reach only the trainer, which may still want to save.
            start_new_session=True,
        )


def answer_questions(answer: Callable[[Any], Any]) -> None:
    """Answer until standard input ends, as it does when the process that asks dies."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Printed text goes to standard error, not between the answers.
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(answer(question), answers)
        answers.flush()
