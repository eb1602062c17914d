"""Record any job in the background: one line in its script, no Lightning, no plan."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["Recording", "record"]


class Recording:
    """A recording that is under way; it ends with `stop`, its `with` block or the process."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"Can't make the folder {folder} for recordings: {error.strerror}."
            ) from error
        self._file: TextIO | None = None
        self._is_full = False
        """Whether the disk has no room for more."""
        self._num_bytes = 0
        self._last_s: float | None = None
        self._hook = register_optimizer_step_post_hook(self._note_step)

    @property
    def path(self) -> Path:
        """The file of this rank: `rank<global rank>.jsonl`, begun anew by each recording."""
        if self._file is not None:
            return Path(self._file.name)
        grouped = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if grouped else os.environ.get("RANK", "0")
        return self._folder / f"rank{rank}.jsonl"

    def stop(self) -> None:
        """Unhook from the job; later calls do nothing."""
        self._hook.remove()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        size = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        if size < self._num_bytes or self._is_full:
            return
        now_s = time.perf_counter()
        try:
            if self._file is None:
                self._file = self.path.open("w", buffering=1, encoding="utf-8")
            if size == self._num_bytes and self._last_s is not None:
                self._file.write(f"{now_s - self._last_s:.6f}\n")
        except OSError:
            self._is_full = True  # That ends the recording, not the job.
        self._num_bytes, self._last_s = size, now_s


def record(folder: str | Path = "stragglers") -> Recording:
    """Record this process's iterations in the background, from now on: optimizer step to step.

    Call it once in each process, before or after `init_process_group`; then look at the files:

    ```
    lightning_hetero.straggler.record()
    $ lightning-hetero stragglers stragglers/rank*.jsonl
    ```

    It communicates with nobody and waits for no device: each step of a torch optimizer (of several,
    the one with the most bytes of parameters) writes one line. If kernels run asynchronously, times
    are those of the host, whose differences are still the times of iterations.

    Args:
        folder: Where each rank writes `rank<global rank>.jsonl`, a line of seconds an iteration.

    Raises:
        ConfigurationError: The folder can't be made.
    """
    return Recording(folder)
