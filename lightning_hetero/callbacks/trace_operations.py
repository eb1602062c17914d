"""`TraceOperations`: record each rank's operations, for `lightning-hetero stragglers explain`."""

import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
import yaml
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hetero.core.actions import ActionKind
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.places import RankPlace
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.models.batches import AssignedBatch, cut_batch, sample_lengths
from lightning_hetero.runtime.clock import ActionTime, IterationTimes
from lightning_hetero.strategy.run import run_of

_NAMES = {
    ActionKind.FORWARD: "forward-compute",
    ActionKind.BACKWARD: "backward-compute",
    ActionKind.INPUT: "backward-input",
    ActionKind.WEIGHT: "backward-weight",
}
Row = dict[str, Any]
_log = logging.getLogger(__name__)
_MOST_BYTES = 2**28
"""Size of a rank's file in bytes at which writing stops."""


@dataclass(frozen=True, kw_only=True)
class _Iteration:
    """What is known about an iteration before its times arrive."""

    step: int
    plan: ParallelPlan
    place: RankPlace
    lengths: list[list[int]]
    """Tokens of each sample of each micro-batch."""


class TraceOperations(Callback):
    """Write the operations of every n-th iteration: one line of JSON each, compressed.

    ::

        Trainer(strategy=HeteroStrategy(), callbacks=[TraceOperations(every_n_steps=100)])
        $ lightning-hetero stragglers explain operations/

    Of each stage the first rank writes `operations-rank<global rank>.jsonl.gz`: forwards, backwards
    (whole, or their two parts), sends, receives, pull, push and the optimizer's step, each with
    step, rank, pipeline (`dp_rank`), stage, start and duration in seconds, micro-batch (`mb_id`),
    its tokens and the sum of its squared lengths. Rank 0 writes the layout to the same folder.
    Times are those of the engine's clock, which runs in any case. The ranks' clocks are
    synchronised when training starts, as precisely as a barrier allows; a message counts as sent
    when its action ends. If the disk is full, or once a file has 256 MiB, nothing more is written.

    Args:
        every_n_steps: Number of iterations from one that is written to the next, 1 or more.
        folder: Where to write; a relative path is in the Trainer's `default_root_dir`.

    Raises:
        ConfigurationError: `every_n_steps` is less than 1.
    """

    def __init__(self, every_n_steps: int = 100, folder: str | Path = "operations") -> None:
        if every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}; give 1 or more.")
        self.every_n_steps = every_n_steps
        self.folder = Path(folder)
        self._num_asked = 0
        self._anchor_s = 0.0
        self._now: _Iteration | None = None
        self._ended: _Iteration | None = None
        self._step_s: float | None = None

    def trace_next(self, num_steps: int = 1) -> None:
        """Also write the next iterations; call it on every rank at the same step."""
        self._num_asked = num_steps

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, comms = run_of(trainer).strategy, run_of(trainer).comms
        self._now = self._ended = None
        folder = Path(trainer.default_root_dir) / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        hosts = comms.gather_objects(socket.gethostname())
        if trainer.is_global_zero:
            layout = yaml.safe_dump(_layout(strategy.plan, hosts), sort_keys=False)
            (folder / "layout.yaml").write_text(layout)
        if comms.control is not None:
            dist.barrier(comms.control)
        self._anchor_s = time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        self._now, self._step_s = None, None
        step = trainer.fit_loop.total_batch_idx
        is_due = self._num_asked > 0 or step % self.every_n_steps == 0
        self._num_asked = max(0, self._num_asked - 1)
        strategy = run_of(trainer).strategy
        plan = batch.plan if isinstance(batch, AssignedBatch) else strategy.plan
        place = plan.place(trainer.global_rank)
        if not is_due or place is None:
            return
        stage = plan.pipelines[place.pipeline_index].stages[place.stage_index]
        if stage.ranks[0] != trainer.global_rank:
            return
        if isinstance(batch, AssignedBatch):
            parts: Sequence[Any] = batch.microbatches
        else:
            counts = strategy.engine.num_microbatches
            parts = cut_batch(batch, counts[place.pipeline_index])
        lengths = [sample_lengths(part) for part in parts]
        self._now = _Iteration(step=step, plan=plan, place=place, lengths=lengths)

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._now is not None:
            self._step_s = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = run_of(trainer).strategy
        clock, ended = strategy.engine.clock, self._now
        if clock.is_late:  # The clock's times are those of the previous iteration.
            ended, self._ended = self._ended, ended
        if ended is None or (times := clock.last) is None:
            return
        rows = list(_rows(ended, times, trainer.global_rank))
        if self._step_s is not None and not clock.is_late:
            start_s = self._step_s
            row = {"optype": "optimizer", "start_ts": start_s, "mb_id": -1}
            rows.append({**rows[0], **row, "duration": time.perf_counter() - start_s})
        lines = "".join(
            json.dumps({**row, "start_ts": row["start_ts"] - self._anchor_s}) + "\n" for row in rows
        )
        name = f"operations-rank{trainer.global_rank}.jsonl.gz"
        _append(Path(trainer.default_root_dir) / self.folder / name, lines)


def _append(path: Path, lines: str) -> None:
    data = gzip.compress(lines.encode(), compresslevel=1)
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            if size < _MOST_BYTES and file.write(data) < len(data):
                file.truncate(size)  # The disk is full: half a record would spoil the next ones.
    except OSError as error:
        _log.warning("%s lacks an iteration that couldn't be written: %s", path, error)


def _layout(plan: ParallelPlan, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the layout of a run, as `stragglers explain --layout` reads it."""
    layers = {tuple(len(stage.layers) for stage in p.stages) for p in plan.pipelines}
    degrees = {stage.tp_degree for _, _, stage in plan.iter_stages()}
    return {
        "dp_size": plan.num_pipelines,
        "pp_size": max(pipeline.num_stages for pipeline in plan.pipelines),
        "tp_size": degrees.pop() if len(degrees) == 1 else 1,
        "layers": list(layers.pop()) if len(layers) == 1 else [],
        "nodes": dict(enumerate(hosts)),
    }


def _rows(known: _Iteration, times: IterationTimes, global_rank: int) -> Iterator[Row]:
    """Yield the operations of one iteration on one rank."""
    place, plan = known.place, known.plan
    stages = plan.pipelines[place.pipeline_index].stages
    common = {
        "step": known.step,
        "rank": global_rank,
        "dp_rank": place.pipeline_index,
    }

    def row(
        kind: str,
        start_s: float,
        seconds: float,
        microbatch: int = -1,
        stage: int = place.stage_index,
    ) -> Row:
        found = {"optype": kind, "start_ts": times.began_s + start_s, "duration": seconds}
        return {**common, **found, "mb_id": microbatch, "stage": stage}

    for number, action in enumerate(times.actions):
        index, is_forward = action.microbatch_index, action.kind is ActionKind.FORWARD
        stage = action.stage_index
        is_first, is_last = stage == 0, stage == len(stages) - 1
        within = [m for m in times.messages if action.start_s <= m.start_s < _end_s(action)]
        exchange_s = sum(m.wait_s / m.num_together for m in within if m.is_exchange)
        wait_s = sum(m.wait_s for m in within if not m.is_exchange)
        if not number:
            yield row("pull", 0.0, action.start_s + exchange_s)
        start_s = action.start_s + exchange_s
        if action.kind is not ActionKind.WEIGHT and not (is_first if is_forward else is_last):
            name = "forward-recv" if is_forward else "backward-recv"
            yield row(name, start_s, wait_s, index, stage)
        lengths = known.lengths[index] if index < len(known.lengths) else []
        size = {"tokens": sum(lengths), "squares": sum(length**2 for length in lengths)}
        compute = row(_NAMES[action.kind], start_s + wait_s, action.compute_s, index, stage)
        yield {**compute, **size}
        if action.kind is not ActionKind.WEIGHT and not (is_last if is_forward else is_first):
            name = "forward-send" if is_forward else "backward-send"
            yield row(name, start_s + wait_s + action.compute_s, 0.0, index, stage)
    ended_s = max((_end_s(action) for action in times.actions), default=0.0)
    exchanged = [m.start_s + m.wait_s for m in times.messages if m.is_exchange]
    yield row("push", ended_s, max(0.0, max(exchanged, default=0.0) - ended_s))


def _end_s(action: ActionTime) -> float:
    return action.start_s + action.wait_s + action.compute_s
