"""Operation traces with planted causes, as the columns of a recording."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_hetero.core.actions import ActionKind, schedule_1f1b

COLUMNS = ["step", "rank", "dp_rank", "stage", "optype", "start_ts", "duration", "mb_id", "mc"]
FORWARD_S, TRANSFER_S, GATHER_S, REDUCE_S = 0.2, 0.002, 0.05, 0.1


@dataclass
class Planted:
    """A run of 1F1B pipelines, and what slows it."""

    num_pipelines: int = 4
    num_stages: int = 4
    num_microbatches: int = 8
    num_steps: int = 6
    seed: int = 0
    noise: float = 0.01
    heavy_last: float = 1.0
    lengths: float = 0.0
    """Standard deviation of the logarithm of micro-batches' costs."""
    slow_rank: tuple[int, float] | None = None
    slow_from: int = 0
    """The step from which it is slow."""
    slow_link: tuple[int, int, float] | None = None
    """Pipeline, lower stage, factor."""
    pause_s: float = 0.0
    pause_rate: float = 0.01
    are_pauses_rows: bool = False
    """Whether pauses are operations of their own."""
    num_chunks: int = 1
    """Chunks of an interleaved schedule."""
    in_background: bool = False
    """Whether receives are posted long before they are needed."""
    speed_sd: float = 0.0
    """How much devices differ by nature."""

    def columns(self) -> dict[str, Any]:
        """Return the trace's columns."""
        self.rng = np.random.default_rng(self.seed)
        # However unequal the lengths are, the work of all together is the same.
        shape = self.num_steps, self.num_pipelines, self.num_microbatches
        costs = np.exp(self.lengths * self.rng.standard_normal(shape))
        self.costs = costs / costs.mean()
        self.speeds = np.exp(self.speed_sd * self.rng.standard_normal(self._shape))
        self.rows: list[tuple[Any, ...]] = []
        for step in range(self.num_steps):
            self._run(step)
        return {n: np.array(v) for n, v in zip(COLUMNS, zip(*self.rows, strict=True), strict=True)}

    def _run(self, step: int) -> None:
        free = self._together(step, "params-all-gather", np.zeros(self._shape), GATHER_S)
        for pipeline in range(self.num_pipelines):
            free[pipeline] = self._pipeline(step, pipeline, free[pipeline].tolist())
        free = self._together(step, "grads-reduce-scatter", free, REDUCE_S)
        for pipeline, stage in np.ndindex(*self._shape):
            self._add(step, pipeline, stage, "optimizer", -1, free[pipeline, stage], 0.02)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.num_pipelines, self.num_stages

    def _order(self, stage: int) -> list[tuple[bool, int, int]]:
        """Return a stage's passes in order, as (is forward, micro-batch, chunk)."""
        stages, count = self.num_stages, self.num_microbatches
        if self.num_chunks == 1:
            actions = schedule_1f1b(stage_index=stage, num_stages=stages, num_microbatches=count)
            return [(a.kind is ActionKind.FORWARD, a.microbatch_index, 0) for a in actions]
        # Megatron's interleaved 1F1B: chunks of `stages` micro-batches take turns.
        total, turn = count * self.num_chunks, stages * self.num_chunks

        def at(index: int, *, forward: bool) -> tuple[bool, int, int]:
            turns, rest = divmod(index, turn)
            chunk = rest // stages if forward else self.num_chunks - 1 - rest // stages
            return forward, turns * stages + rest % stages, chunk

        warmup = min((stages - stage - 1) * 2 + (self.num_chunks - 1) * stages, total)
        steady = [
            at(index + shift, forward=forward)
            for index in range(total - warmup)
            for shift, forward in ((warmup, True), (0, False))
        ]
        first = [at(index, forward=True) for index in range(warmup)]
        return [*first, *steady, *(at(i, forward=False) for i in range(total - warmup, total))]

    def _pipeline(self, step: int, pipeline: int, free: list[float]) -> list[float]:
        lists = [self._order(stage) for stage in range(self.num_stages)]
        arrived: dict[tuple[int, tuple[bool, int, int]], float] = {}
        posted: dict[tuple[int, bool], float] = {}
        last = self.num_stages - 1
        while any(lists):
            for stage in range(self.num_stages):
                while lists[stage]:
                    forward, number, chunk = action = lists[stage][0]
                    ends = (0, 0) if forward else (last, self.num_chunks - 1)
                    from_peer, name = (stage, chunk) != ends, "forward" if forward else "backward"
                    if from_peer and (stage, action) not in arrived:
                        break
                    lists[stage].pop(0)
                    if from_peer:
                        # Posted as soon as the stage is idle; in background, as the last ended.
                        end = max(free[stage], arrived[stage, action])
                        start = free[stage]
                        if self.in_background:
                            end = arrived[stage, action]
                            start = min(posted.get((stage, forward), free[stage]), end)
                        row = step, pipeline, stage, f"{name}-recv", -1
                        self._add(*row, start, end - start)
                        free[stage] = max(free[stage], end)
                        posted[stage, forward] = end
                    self._compute(step, pipeline, stage, action, free)
                    hop = 1 if forward else -1
                    target = (stage + hop) % self.num_stages
                    after = chunk + hop * (stage == (last if forward else 0))
                    if 0 <= after < self.num_chunks:
                        seconds = TRANSFER_S * self._noise()
                        if self.slow_link and self.slow_link[:2] == (pipeline, min(stage, target)):
                            seconds *= self.slow_link[2]
                        row = step, pipeline, stage, f"{name}-send", -1
                        self._add(*row, free[stage], seconds)
                        arrived[target, (forward, number, after)] = free[stage] + seconds
        return free

    def _compute(
        self,
        step: int,
        pipeline: int,
        stage: int,
        action: tuple[bool, int, int],
        free: list[float],
    ) -> None:
        forward, number, chunk = action
        seconds = FORWARD_S * self.costs[step, pipeline, number] * (1 if forward else 2)
        seconds *= self._noise() * self.speeds[pipeline, stage] / self.num_chunks
        last = (stage, chunk) == (self.num_stages - 1, self.num_chunks - 1)
        # The work of all stages together stays the same.
        parts = self.num_stages * self.num_chunks
        seconds *= (self.heavy_last if last else 1.0) * parts / (parts - 1 + self.heavy_last)
        is_slow = self.slow_rank and step >= self.slow_from
        if is_slow and self.slow_rank[0] == pipeline * self.num_stages + stage:
            seconds *= self.slow_rank[1]
        pause_s = self.pause_s if self.rng.random() < self.pause_rate else 0.0
        if not self.are_pauses_rows:
            seconds += pause_s
        name = "forward-compute" if forward else "backward-compute"
        self._add(step, pipeline, stage, name, number, free[stage], seconds, chunk)
        free[stage] += seconds
        if self.are_pauses_rows and pause_s:
            self._add(step, pipeline, stage, "gc", -1, free[stage], pause_s)
            free[stage] += pause_s

    def _noise(self) -> float:
        return float(np.exp(self.noise * self.rng.standard_normal()))

    def _together(self, step: int, name: str, free: np.ndarray, seconds: float) -> np.ndarray:
        """Run a collective of each stage's ranks; return when each rank is through."""
        end = np.broadcast_to(free.max(axis=0) + seconds, self._shape).copy()
        for pipeline, stage in np.ndindex(*self._shape):
            start = free[pipeline, stage]
            self._add(step, pipeline, stage, name, -1, start, end[pipeline, stage] - start)
        return end

    def _add(
        self,
        step: int,
        pipeline: int,
        stage: int,
        kind: str,
        number: int,
        start: float,
        seconds: float,
        chunk: int = 0,
    ) -> None:
        rank = pipeline * self.num_stages + stage
        self.rows.append((step, rank, pipeline, stage, kind, start, seconds, number, chunk))
