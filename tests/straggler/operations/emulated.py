"""Operation traces with planted causes, as the columns of a recording."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_hetero.core.actions import ActionKind, schedule_1f1b

FORWARD_S, TRANSFER_S, GATHER_S, REDUCE_S = 0.2, 0.002, 0.05, 0.1


@dataclass
class Planted:
    """A run of 1F1B pipelines with blocking transfers, and what slows it."""

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
    slow_link: tuple[int, int, float] | None = None
    """Pipeline, lower stage, factor."""
    pause_s: float = 0.0
    pause_rate: float = 0.01
    rows: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def columns(self) -> dict[str, Any]:
        """Return the trace's columns."""
        self.rng = np.random.default_rng(self.seed)
        # However unequal the lengths are, the work of all together is the same.
        shape = self.num_steps, self.num_pipelines, self.num_microbatches
        costs = np.exp(self.lengths * self.rng.standard_normal(shape))
        self.costs = costs / costs.mean()
        for step in range(self.num_steps):
            self._run(step)
        return {name: np.array(values) for name, values in self.rows.items()}

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

    def _pipeline(self, step: int, pipeline: int, free: list[float]) -> list[float]:
        costs = self.costs[step, pipeline]
        lists = [
            list(
                schedule_1f1b(
                    stage_index=s,
                    num_stages=self.num_stages,
                    num_microbatches=self.num_microbatches,
                )
            )
            for s in range(self.num_stages)
        ]
        arrived: dict[tuple[int, ActionKind, int], float] = {}
        while any(lists):
            for stage in range(self.num_stages):
                while lists[stage]:
                    action = lists[stage][0]
                    kind, number = action.kind, action.microbatch_index
                    forward = kind is ActionKind.FORWARD
                    source = stage - 1 if forward else stage + 1
                    from_peer = 0 <= source < self.num_stages
                    key = (stage, kind, number)
                    if from_peer and key not in arrived:
                        break
                    lists[stage].pop(0)
                    name = "forward" if forward else "backward"
                    if from_peer:
                        # The receive is posted as soon as the stage is idle.
                        end = max(free[stage], arrived[key])
                        self._add(
                            step,
                            pipeline,
                            stage,
                            f"{name}-recv",
                            -1,
                            free[stage],
                            end - free[stage],
                        )
                        free[stage] = end
                    seconds = self._seconds(pipeline, stage, costs[number] * (1 if forward else 2))
                    self._add(
                        step, pipeline, stage, f"{name}-compute", number, free[stage], seconds
                    )
                    free[stage] += seconds
                    target = stage + 1 if forward else stage - 1
                    if 0 <= target < self.num_stages:
                        hop = TRANSFER_S * self._noise()
                        if self.slow_link and self.slow_link[:2] == (pipeline, min(stage, target)):
                            hop *= self.slow_link[2]
                        self._add(step, pipeline, stage, f"{name}-send", -1, free[stage], hop)
                        arrived[target, kind, number] = free[stage] + hop
        return free

    def _seconds(self, pipeline: int, stage: int, units: float) -> float:
        seconds = FORWARD_S * units * self._noise()
        last = stage == self.num_stages - 1
        # The stages' work together stays the same.
        seconds *= (self.heavy_last if last else 1.0) * self.num_stages
        seconds /= self.num_stages - 1 + self.heavy_last
        if self.slow_rank and self.slow_rank[0] == pipeline * self.num_stages + stage:
            seconds *= self.slow_rank[1]
        if self.rng.random() < self.pause_rate:
            seconds += self.pause_s
        return seconds

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
        self, step: int, pipeline: int, stage: int, kind: str, number: int, start: float, s: float
    ) -> None:
        row = {
            "step": step,
            "rank": pipeline * self.num_stages + stage,
            "dp_rank": pipeline,
            "stage": stage,
            "optype": kind,
            "start_ts": start,
            "duration": s,
            "mb_id": number,
            "mc": 0,
        }
        for column, value in row.items():
            self.rows[column].append(value)
