"""Measure one optimizer step on one rank, over all its batches: times, waits and work.

Each batch is timed from its start to its end, so loading data, validation and checkpoints between
batches don't count.
"""

import math
import time
from collections import defaultdict
from typing import Any

from lightning_hetero.core.actions import ActionKind
from lightning_hetero.models.batches import work_of
from lightning_hetero.runtime.clock import IterationTimes
from lightning_hetero.straggler.paces import Observation


class StepTimes:
    """Times the batches of a step.

    Args:
        index: The number of optimizer steps before the first one timed.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._start_s = 0.0
        self._untimed: tuple[float, float, float] | None = None
        """Seconds, work and share of a batch whose clock times arrive with the next batch."""
        self._clear()

    def _clear(self) -> None:
        self._iteration_s = self._forward_s = self._backward_s = 0.0
        self._work = self._held_work = self._batch_work = 0.0
        self._num_microbatches = 0
        self._hidden_bytes = 0
        self._waits_s: dict[int, float] = defaultdict(float)

    def begin_batch(self, batch: Any) -> None:
        """Note the start of a batch."""
        self._batch_work = work_of(batch)
        self._start_s = time.perf_counter()

    def end_batch(
        self, times: IterationTimes | None, *, share: float, is_late: bool = False
    ) -> None:
        """Note the end of a batch.

        Args:
            times: The clock's times of it; None as long as there are none.
            share: Share of the model that this rank had under the batch's plan.
            is_late: Whether the times are those of the previous batch, which is counted now.
        """
        ended = time.perf_counter() - self._start_s, self._batch_work, share
        timed, self._untimed = (self._untimed, ended) if is_late else (ended, None)
        if timed is None:
            return
        seconds, work, share = timed
        self._iteration_s += seconds
        self._work += work
        self._held_work += work * share
        if times is None:
            return
        self._num_microbatches += times.num_actions(ActionKind.FORWARD)
        self._forward_s += times.compute_s(ActionKind.FORWARD)
        self._backward_s += times.compute_s(ActionKind.BACKWARD)
        for peer, seconds in times.wait_by_peer_s().items():
            self._waits_s[peer] += seconds
        hidden = (m.num_bytes for m in times.messages if not m.is_exchange)
        self._hidden_bytes = max(self._hidden_bytes, *hidden, 0)

    def finish(self, index: int) -> tuple[Observation, float]:
        """Return this rank's observation of the step, and its seconds; begin the next step."""
        self.index = index
        count = self._num_microbatches
        observation = Observation(
            step=index,
            forward_s=self._forward_s / count if count else math.nan,
            backward_s=self._backward_s / count if count else 0.0,
            work=self._work / count if count else 0.0,
            num_microbatches=count,
            share=self._held_work / self._work if self._work else 0.0,
            waits_s=dict(self._waits_s),
            hidden_bytes=self._hidden_bytes,
        )
        iteration_s = self._iteration_s
        self._clear()
        return observation, iteration_s
