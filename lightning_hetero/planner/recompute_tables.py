"""How many layers a stage must recompute to fit, for every number of layers at once.

Memory is linear in layers (`CostModel`), so a stage of n layers follows from stages of one and two.
With K and R the bytes of a kept and of a recomputed layer of all tokens in flight, a stage that is
over its device's room by `over` bytes recomputes r = ⌈over / (K - R)⌉ layers. Where even r = n
doesn't do, or states and the buffers of a push alone are too large, n layers don't fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, StageShape
from lightning_hetero.simulator.memory import push_buffer_bytes

__all__ = ["MemoryUse", "RecomputeTables", "StageTable"]


class MemoryUse(NamedTuple):
    """All that a stage's memory depends on beside its layers."""

    num_pipelines: int
    """Pipelines of the plan."""
    num_in_flight: int
    """Micro-batches that it holds at once."""
    owned_params: float | None = None
    """Parameters that each rank owns, whatever it holds; None if holders share them alike."""


@dataclass(frozen=True, eq=False)
class StageTable:
    """A stage with 0, 1, ... layers, recomputed as far as memory asks for it.

    Stages of one shape whose memory asks for the same are one object.
    """

    shape: StageShape
    """Where it runs and what stands at its ends."""
    forward_s: FloatArray
    """Seconds of a micro-batch's forward."""
    unlimited_s: FloatArray
    """Seconds of a micro-batch, as if everything fitted."""
    total_s: FloatArray
    """Seconds of a micro-batch; infinite where the layers don't fit."""
    recomputed: IntArray
    """Layers that are recomputed."""

    @property
    def is_unlimited(self) -> bool:
        """Whether any number of layers fits without recomputation."""
        return not self.recomputed[1:].any()

    def pair_s(self, num_layers: int) -> tuple[float, float]:
        """Return the seconds of forward and backward with this number of layers."""
        forward = float(self.forward_s[num_layers])
        return forward, float(self.total_s[num_layers]) - forward

    def sized(self, num_layers: int) -> StageShape:
        """Return the shape of the stage with this number of layers."""
        again = int(self.recomputed[num_layers])
        return self.shape._replace(num_layers=num_layers, recomputed_layers=again)


class RecomputeTables:
    """Least recomputation of stages of 0, 1, ... layers; cached by what it depends on.

    Args:
        cost: Times and bytes.
        workload: Its micro-batches.
        may_recompute: Whether stages that would have to recompute fit.
    """

    def __init__(self, cost: CostModel, workload: Workload, *, may_recompute: bool = True) -> None:
        self._cost = cost
        self._may_recompute = may_recompute
        self._tokens = sum(workload.microbatch)
        self._num_microbatches = workload.num_microbatches
        self._num_layers = cost.model.num_layers
        self._known: dict[tuple[StageShape, int, float | None], IntArray] = {}
        self._tables: dict[tuple[StageShape, bytes], StageTable] = {}
        self._linear: dict[tuple[StageShape, bytes], tuple[FloatArray, FloatArray]] = {}

    def table(
        self,
        shape: StageShape,
        use: MemoryUse,
        times_s: tuple[FloatArray, FloatArray],
        inner_s: FloatArray,
    ) -> StageTable:
        """Return what stages of 0, 1, ... layers take.

        Args:
            shape: Where they run and what stands at their ends; its layers don't matter.
            use: What else their memory depends on.
            times_s: Their forward and backward seconds, nothing recomputed.
            inner_s: Forward seconds of their layers alone.
        """
        again = self._least(shape, use)
        key = shape, again.tobytes()
        if key not in self._tables:
            sizes = np.maximum(np.arange(len(again)), 1)
            unlimited = times_s[0] + times_s[1]
            total = unlimited + inner_s * np.maximum(again, 0) / sizes
            total = np.where(again < 0, np.inf, total)
            self._tables[key] = StageTable(shape, times_s[0], unlimited, total, again)
        return self._tables[key]

    def _least(self, shape: StageShape, use: MemoryUse) -> IntArray:
        """Return `least` of one use, of a stage of a pipeline."""
        num_pipelines, num_in_flight, owned_params = use
        key = shape, num_pipelines, owned_params
        if key not in self._known:
            # Stages of a pipeline differ in micro-batches in flight; the last one has one.
            most = 1 if shape.has_head else min(self._num_layers, self._num_microbatches)
            uses = [MemoryUse(num_pipelines, n, owned_params) for n in range(1, most + 1)]
            self._known[key] = self.least(shape, uses)
        row: IntArray = self._known[key][num_in_flight - 1]
        return row

    def least(self, shape: StageShape, uses: Sequence[MemoryUse]) -> IntArray:
        """Return the recomputed layers of stages of 0, 1, ... layers; -1 where they don't fit.

        Args:
            shape: Where the stage runs and what stands at its ends; its layers don't matter.
            uses: What else its memory depends on.

        Returns:
            [uses, layers].
        """
        cost, layout = self._cost, self._cost.layout
        sizes = np.arange(self._num_layers + 1)
        every, flying, shares = zip(*uses, strict=True)
        num_pipelines = np.array(every, dtype=np.float64)[:, None]
        in_flight = np.array(flying)
        held, passing = self._by_layers(shape._replace(num_layers=1), in_flight)
        owned = held / num_pipelines if layout.sharded else held
        if shares[0] is not None:
            owned = np.array(shares)[:, None]
        states = held * (layout.weight_bytes + layout.summed_bytes)
        states = states + owned * layout.device_kept_bytes
        room = cost.usable_bytes(shape.device) - states
        kept, of_input = cost.layer_bytes(shape)
        saved = (kept - of_input) * self._tokens
        over = passing - room
        of_layer = saved * in_flight[:, None]
        needed = np.ceil(np.maximum(over, 0.0) / of_layer * (1 - 1e-12)) if saved else over
        # Where all layers are recomputed, the one that is has no room that another left.
        all_of_them = over - sizes * of_layer + saved <= 0
        fits = (needed < sizes) | ((needed <= sizes) & all_of_them) | (over <= 0)
        if layout.sharded:
            fits &= push_buffer_bytes(held, owned, num_pipelines, layout.pushed_bytes) <= room
        if not self._may_recompute:
            fits &= over <= 0
        least = np.where(fits, np.minimum(np.maximum(needed, 0), sizes), -1)
        least[:, 0] = -1
        return least.astype(np.int64)

    def _by_layers(self, shape: StageShape, in_flight: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return parameters, by layers, and bytes of micro-batches, nothing recomputed.

        The bytes are [numbers in flight, layers], linear in both.
        """
        key = shape, in_flight.tobytes()
        if key not in self._linear:
            cost, sizes = self._cost, np.arange(self._num_layers + 1, dtype=np.float64)
            params, passing = [], []
            for count in (1, 2):
                sized = shape._replace(num_layers=count)
                one, two = (
                    cost.passing_memory(sized, held * self._tokens, self._tokens).total
                    for held in (1, 2)
                )
                params.append(cost.num_stage_params(sized))
                passing.append(one + (in_flight[:, None] - 1) * (two - one))
            self._linear[key] = (
                params[0] + (sizes - 1) * (params[1] - params[0]),
                passing[0] + (sizes - 1) * (passing[1] - passing[0]),
            )
        return self._linear[key]
