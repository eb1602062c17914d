"""`RunMetrics`: log a run's speed and how its time is spent, as scalars for any logger.

Every rank sums its clock's times of the iterations since the last logged row. Then one small gather
on CPU brings the sums to rank 0, which logs:

- `run/iteration_s`: mean seconds of an iteration, without validation and checkpoints,
- `run/tokens_per_s`: tokens of all pipelines per second of iterations,
- `run/mfu`: FLOPs of the model (see `ModelSpec.step_flops`) over the devices' peak; not on CPU,
- `run/bubble_share`: share of the ranks' time in which they compute nothing (AutoHet's bubbles,
  with all other waits),
- `run/imbalance`: (max - min) / max of the ranks' computing (Hydraulis, Figure 12b),
- `run/exchange_wait_s`: longest wait of a rank for weights and gradients, per iteration,
- `run/planning_stall_s`: longest wait for an assignment, per iteration; with a data module that
  assigns samples,
- `run/checkpoint_stall_s`: longest time for which the last checkpoint of `LayerwiseCheckpoint` held
  up a rank.

`StragglerMonitor` logs its own scalars, as `straggler/…`; `RunLog` logs the cost of changes of
ranks.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.models.batches import sample_lengths
from lightning_hetero.runtime.setup.detect import describe_device
from lightning_hetero.runtime.setup.sizes import infer_model_spec
from lightning_hetero.strategy.hetero import HeteroStrategy
from lightning_hetero.strategy.run import note, run_of

if TYPE_CHECKING:
    from lightning_hetero.core.model_spec import ModelSpec


class RunMetrics(Callback):
    """Log throughput, MFU, bubbles, imbalance and stalls every `log_every_n_steps` steps.

    ::

        logger = TensorBoardLogger("logs")
        Trainer(strategy=HeteroStrategy(), callbacks=[RunMetrics()], logger=logger)
    """

    def __init__(self) -> None:
        self._total = _Sums()
        self._step = 0
        self._start_s = 0.0
        self._spec: ModelSpec | None = None
        self._peak_flops_per_s = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = run_of(trainer).strategy
        self._total = _Sums()
        self._step = trainer.global_step
        device = describe_device(strategy.root_device)
        if strategy.root_device.type == "cuda" or device.name in KNOWN_DEVICES:
            self._spec = infer_model_spec(pl_module, strategy.engine.layout)
        self._peak_flops_per_s = 0.0 if self._spec is None else device.peak_flops_per_s

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._start_s = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        strategy = run_of(trainer).strategy
        times, place = strategy.engine.clock.last, strategy.engine.place
        data = strategy.datamodule
        total = self._total
        total.num_iterations += 1
        total.wall_s += time.perf_counter() - self._start_s
        if times is not None:  # On CUDA these are those of the previous iteration.
            total.compute_s += times.compute_s()
            total.exchange_wait_s += times.exchange_wait_s()
        total.planning_stall_s += 0.0 if data is None else data.planning_stall_s
        if place is not None and place.stage_index == place.tp_rank == 0:
            lengths = sample_lengths(batch)
            total.num_tokens += sum(lengths)
            total.flops += 0.0 if self._spec is None else self._spec.step_flops(lengths)
        # Batches that only accumulate gradients end no step.
        ended, self._step = trainer.global_step > self._step, trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if ended and trainer.global_step % every == 0:
            self._log(trainer, strategy)

    def _log(self, trainer: pl.Trainer, strategy: HeteroStrategy) -> None:
        total, self._total = self._total, _Sums()
        total.peak_flops_per_s = self._peak_flops_per_s
        for checkpoint in strategy.run.checkpoints:
            if checkpoint.saved is not None:
                total.checkpoint_stall_s = checkpoint.saved.stall_s
        if strategy.memory is not None:
            total.memory_bytes, total.predicted_bytes = strategy.memory.in_use()
        rows = strategy.run.comms.to_leader(astuple(total))
        if not len(rows):
            return
        sums = [_Sums(*row) for row in rows.tolist()]
        scalars = _scalars(sums)
        if strategy.datamodule is None:
            del scalars["run/planning_stall_s"]
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
        memory = [(row.memory_bytes, row.predicted_bytes) for row in sums]
        note(trainer, "metrics", scalars=scalars, memory=memory)


@dataclass
class _Sums:
    """One rank's sums since the last logged row."""

    num_iterations: float = 0.0
    wall_s: float = 0.0
    compute_s: float = 0.0
    exchange_wait_s: float = 0.0
    planning_stall_s: float = 0.0
    num_tokens: float = 0.0
    flops: float = 0.0
    peak_flops_per_s: float = 0.0
    """The device's peak; 0 if unknown."""
    checkpoint_stall_s: float = math.nan
    """Seconds for which the last checkpoint held up this rank; nan if there was none."""
    memory_bytes: float = 0.0
    predicted_bytes: float = 0.0
    """Its peak as predicted; 0 if unknown."""


def _scalars(rows: Sequence[_Sums]) -> dict[str, float]:
    wall_s = max(row.wall_s for row in rows)
    busy = [row.compute_s for row in rows]
    count = rows[0].num_iterations
    scalars = {
        "run/iteration_s": wall_s / count,
        "run/tokens_per_s": sum(row.num_tokens for row in rows) / wall_s,
        "run/bubble_share": 1.0 - sum(busy) / (len(rows) * wall_s),
        "run/imbalance": (max(busy) - min(busy)) / max(busy) if max(busy) else 0.0,
        "run/exchange_wait_s": max(row.exchange_wait_s for row in rows) / count,
        "run/planning_stall_s": max(row.planning_stall_s for row in rows) / count,
    }
    if not math.isnan(rows[0].checkpoint_stall_s):
        scalars["run/checkpoint_stall_s"] = max(row.checkpoint_stall_s for row in rows)
    peaks = [row.peak_flops_per_s for row in rows]
    if all(peaks):
        scalars["run/mfu"] = sum(row.flops for row in rows) / wall_s / sum(peaks)
    return scalars
