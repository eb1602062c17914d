"""Let a CPU's rank have no more memory than a small device: the allocation over the cap fails."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.strategy.hetero import HeteroStrategy


class CappedMemory(Callback):
    """Hold each rank to its own bytes while it trains; pass it to the Trainer.

    What there is when training starts counts, too: weights, slices, states. Every operation of
    torch is looked at, so small tensors take longer.

    ::

        capped = CappedMemory((2e9, 8e9))
        Trainer(accelerator="cpu", devices=2, strategy=HeteroStrategy(), callbacks=[capped])

    Args:
        limits_bytes: For each global rank the most it may have at once.

    Raises:
        ConfigurationError: The Trainer runs another number of ranks.
        OutOfMemoryError: torch's own, by the operation whose result exceeds the limit.
    """

    def __init__(self, limits_bytes: Sequence[float]) -> None:
        self.limits_bytes = tuple(limits_bytes)
        self._counter: MemoryCounter | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that this rank had at once."""
        return 0 if self._counter is None else self._counter.peak_bytes

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, HeteroStrategy):
            # What its errors of memory say that there was.
            played = trainer.strategy.emulation
            trainer.strategy.emulation = replace(played, live_bytes=self._count)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size != len(self.limits_bytes):
            raise ConfigurationError(
                f"CappedMemory has {len(self.limits_bytes)} limits but {trainer.world_size} ranks "
                "run. Give one a rank."
            )
        counter = self._counter = MemoryCounter(self.limits_bytes[trainer.global_rank])
        counter.__enter__()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _count(self) -> int:
        return 0 if self._counter is None else self._counter.live_bytes

    def _stop(self) -> None:
        if self._counter is not None and self._counter.is_running:
            self._counter.__exit__(None, None, None)


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from when an operation has made them until they go."""

    def __init__(self, limit_bytes: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        """Bytes that there are now, with those that there were when counting started."""
        self.peak_bytes = 0
        self.is_running = False
        self._limit_bytes = limit_bytes
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.is_running = True
        gc.collect()  # What nobody can reach any more doesn't count.
        for item in gc.get_objects():
            if type(item) in (Tensor, torch.nn.Parameter):
                self._add(item)
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_running = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for item in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(item, Tensor):
                self._add(item)
        return output

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return  # A sparse tensor has no storage.
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._drop(key, num_bytes))
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.live_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"Tried to allocate {num_bytes} bytes, which make {self.live_bytes:,}, but this "
                f"device plays one with {self._limit_bytes:,.0f}."
            )

    def _drop(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self.live_bytes -= num_bytes
