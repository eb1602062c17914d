"""Record any job in the background: one line in its script, no Lightning, no plan.

Greyhound hooks NCCL from outside; this module wraps the public functions of `torch.distributed`, so
it needs no preloaded library and works with any backend. FSDP, tensor and pipeline parallelism call
these. DistributedDataParallel reduces its gradients in C++, invisible from Python; but optimizer
steps are recorded, too, and a profiler trace (`any_job`) has its buckets. A thread appends the
operations to a file once a second.
"""

import atexit
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.any_job import OPTIMIZER_STEP, as_line
from lightning_hetero.straggler.period import CommunicationOp

__all__ = ["CommunicationRecorder", "Recording", "record"]

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)

_MOST_KEPT = 100_000


class CommunicationRecorder:
    """Notes name, size and time of each operation while the `with` block lasts.

    The newest 100,000 operations are kept. One recorder at a time per process; operations that
    an operation issues itself are not noted again. Overhead: a Python call and a clock per
    operation, no synchronisation.
    """

    def __init__(self) -> None:
        self._ops: deque[CommunicationOp] = deque(maxlen=_MOST_KEPT)
        self._originals: list[tuple[Any, str, Any]] = []
        self._local = threading.local()

    def note(self, op: CommunicationOp) -> None:
        """Add an operation that was observed in another way."""
        self._ops.append(op)

    def take(self) -> list[CommunicationOp]:
        """Return the operations noted so far, oldest first, and forget them."""
        taken = []
        while self._ops:
            taken.append(self._ops.popleft())
        return taken

    def __enter__(self) -> Self:
        if self._originals or hasattr(dist.all_reduce, "_lightning_hetero_recorder"):
            raise ConfigurationError(
                "Another CommunicationRecorder is active in this process. Leave its block first."
            )
        for module in (dist, distributed_c10d):
            for name in _NAMES:
                if not hasattr(module, name):  # Some are of newer versions.
                    continue
                original = getattr(module, name)
                self._originals.append((module, name, original))
                setattr(module, name, self._stand_in(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _stand_in(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            is_inner = getattr(self._local, "is_inner", False)
            if not is_inner:
                self._note(name, args, kwargs)
            self._local.is_inner = True
            try:
                return original(*args, **kwargs)
            finally:
                self._local.is_inner = is_inner

        recorded._lightning_hetero_recorder = True  # type: ignore[attr-defined]
        return recorded

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        group = next((v for v in values if isinstance(v, dist.ProcessGroup)), None)
        op = CommunicationOp(
            name=name,
            num_bytes=_count_bytes(values),
            start_s=time.perf_counter(),
            group="" if group is None else group.group_name,
        )
        self._ops.append(op)


def _count_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of all tensors among the arguments, one level of lists deep."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, dist.P2POp):
            total += value.tensor.nbytes
        elif isinstance(value, list | tuple):
            total += _count_bytes(value)
    return total


_EVERY_S = 1.0


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
        self._path: Path | None = None
        self._rank = os.environ.get("RANK")
        self._recorder = CommunicationRecorder()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._recorder.__enter__()
        self._hook = register_optimizer_step_post_hook(self._note_step)
        self._thread = threading.Thread(target=self._write_on, name="recording", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def path(self) -> Path:
        """The file of this rank: `rank<global rank>.jsonl`, begun anew by each recording."""
        if self._path is None:
            self._find_rank()
            self._path = self._folder / f"rank{self._rank or 0}.jsonl"
            self._path.write_text("", encoding="utf-8")
        return self._path

    def stop(self) -> None:
        """Write the operations that are left and unhook from the job; later calls do nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        self._hook.remove()
        self._recorder.__exit__()
        self._write()
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _find_rank(self) -> None:
        """Remember the rank while there is a process group; it may be gone at the end."""
        if dist.is_available() and dist.is_initialized():
            self._rank = str(dist.get_rank())

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._rank is None:
            self._find_rank()
        size = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        now_s = time.perf_counter()
        self._recorder.note(CommunicationOp(name=OPTIMIZER_STEP, num_bytes=size, start_s=now_s))

    def _write_on(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            try:
                self._write()
            except OSError:
                # A full disk ends the recording, not the job.
                return

    def _write(self) -> None:
        with self._lock:
            lines = [as_line(op) + "\n" for op in self._recorder.take()]
            if lines:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(lines))


def record(folder: str | Path = "stragglers") -> Recording:
    """Record this process's communication and steps in the background, from now on.

    Call it once in each process, after or before `init_process_group`; then look at the files:

    ```
    lightning_hetero.straggler.record()
    $ lightning-hetero stragglers stragglers/rank*.jsonl --plot run.svg
    ```

    It communicates with nobody and waits for no device: a Python call and a clock for each
    operation, and a thread that writes once a second. If kernels run asynchronously, times are
    those of the host, whose differences are still the times of iterations.

    Args:
        folder: Where each rank writes `rank<global rank>.jsonl`.

    Raises:
        ConfigurationError: This process is being recorded already, or the folder can't be made.
    """
    return Recording(folder)
