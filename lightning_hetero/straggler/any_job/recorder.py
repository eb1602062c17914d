"""Record the communication operations of this process by standing in for `torch.distributed`.

Greyhound hooks NCCL from outside; this hooks the public functions of `torch.distributed` from
inside, so it needs no preloaded library and works with any backend. FSDP, tensor and pipeline
parallelism call these functions. DistributedDataParallel's gradient buckets are reduced in C++ and
pass by unseen: `recording` watches its optimizer instead, a profiler trace (`traces`) has them.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.any_job.period import CommunicationOp

__all__ = ["CommunicationRecorder"]

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

    @property
    def ops(self) -> tuple[CommunicationOp, ...]:
        """The operations noted so far, oldest first."""
        return tuple(self._ops)

    def note(self, op: CommunicationOp) -> None:
        """Add an operation that was seen in another way."""
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
            for name in filter(
                functools.partial(hasattr, module), _NAMES
            ):  # Some are of newer versions.
                original = getattr(module, name)
                self._originals.append((module, name, original))
                setattr(module, name, self._stand_in(name, original))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
