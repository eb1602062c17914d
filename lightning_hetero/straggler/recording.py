"""Record any job in the background with one line in its script, without Lightning or plans."""

import atexit
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_hetero.core.errors import ConfigurationError

_EVERY_S = 1.0
"""Seconds between two writes."""
_LAST_S = 10.0
"""Seconds that the job waits at its end for the last write, in case the disk hangs."""


class Recording:
    """A recording in progress; it ends with `stop`, its `with` block or the process."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"Can't make the folder {folder} for recordings: {error.strerror}."
            ) from error
        self._path: Path | None = None
        self._rank = os.environ.get("RANK")
        self._num_bytes = 0
        self._last_s: float | None = None
        self._times_s: deque[float] = deque()
        self._stopped = threading.Event()
        self._hook = register_optimizer_step_post_hook(self._note_step)
        self._thread = threading.Thread(target=self._write_on, name="recording", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def path(self) -> Path:
        """The file of this rank: `rank<global rank>.jsonl`, overwritten by each recording."""
        return self._path or self._folder / f"rank{self._rank or 0}.jsonl"

    def stop(self) -> None:
        """Write the remaining iterations and remove the hook; later calls do nothing."""
        if not self._stopped.is_set():
            self._hook.remove()
            self._stopped.set()
            self._thread.join(_LAST_S)
            atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._rank is None and dist.is_available() and dist.is_initialized():
            self._rank = str(dist.get_rank())
        size = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        if size < self._num_bytes:
            return
        now_s = time.perf_counter()
        if size == self._num_bytes and self._last_s is not None:
            self._times_s.append(now_s - self._last_s)
        self._num_bytes, self._last_s = size, now_s

    def _write_on(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        taken = [self._times_s.popleft() for _ in range(len(self._times_s))]
        if not taken:
            return
        mode, self._path = "a" if self._path else "w", self.path
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.writelines(f"{time_s:.6f}\n" for time_s in taken)
        except OSError:
            self._hook.remove()  # A full disk ends the recording, not the job.


def record(folder: str | Path = "stragglers") -> Recording:
    """Record this process's iterations in the background, from now on: optimizer step to step.

    Call it once in each process, before or after `init_process_group`; then look at the files:

    ```
    lightning_hetero.straggler.record()
    $ lightning-hetero stragglers stragglers/rank*.jsonl
    ```

    It doesn't communicate and waits for no device. It reads a clock at each step of a torch
    optimizer (of several, the one with the most bytes of parameters), and a thread writes once a
    second. If kernels run asynchronously, the times are those of the host; their differences are
    still the iteration times.

    Args:
        folder: Where each rank writes `rank<global rank>.jsonl`, with a line of seconds per
            iteration.

    Raises:
        ConfigurationError: The folder can't be made.
    """
    return Recording(folder)
