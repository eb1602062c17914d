"""Estimate one pipeline: layers by Eq. 4, then `fill + slope·K` seconds for K micro-batches.

Pipelines of one class (same devices in the same order) are balanced and timed once, also for plans
with different numbers of pipelines if these need the same recomputation.
"""

import itertools
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.planner.arrangement import PipelineNodes
from lightning_hetero.planner.estimating.memory_fit import owned_capacity
from lightning_hetero.planner.estimating.recompute_tables import MemoryUse, StageTable
from lightning_hetero.planner.estimating.stage_times import PipelineKey, StageTimes
from lightning_hetero.planner.estimating.steady_rounds import circle_s, steady_round_s
from lightning_hetero.planner.solvers.balancing import split_layers
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel
from lightning_hetero.simulator.propagate import EqualTimes, propagate

__all__ = ["PipelineEstimate", "PipelineEstimator", "StageRoom"]

_LINKS_SET_THE_PACE = 1.02
"""Links set the pace if a micro-batch takes longer than on the slowest stage by this factor."""
_MANY_ROUNDS = 5
"""Micro-batches per stage from which filling a pipeline matters little."""
_MOST_STAGES_MOVED = 8
"""Most stages for which layers are moved: longer pipelines have many moves of little gain."""
_WORTH_MOVING = 1e-6
_NEVER_S = 1e12
"""Stands for the seconds of layers that don't fit."""
_STEADY_ROUNDS = 2
"""Micro-batches per stage after which a pipeline's end grows evenly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineEstimate:
    """One pipeline with its layers placed."""

    tables: tuple[StageTable, ...]
    """Seconds and memory of any number of layers on each stage."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    slope_s: float
    """Seconds that one more micro-batch takes."""
    times: EqualTimes
    """Seconds of every action and message of one micro-batch."""
    is_memory_bound: bool
    """Whether more memory would make it faster."""
    is_recomputing: bool
    """Whether a stage recomputes a layer."""

    @property
    def slowest_s(self) -> float:
        """Seconds of a micro-batch on its slowest stage."""
        slowest_s: float = max(map(add, self.times.forward_s, self.times.backward_s))
        return slowest_s

    def least_s(self, num_microbatches: int) -> tuple[float, float]:
        """Return (fill, slope) so that K micro-batches take `fill + slope·K` at least.

        A stage begins when the first micro-batch has passed the stages before it, and its last
        gradient passes back through them. With w_s seconds of stage s for a micro-batch, that takes
        K·w_s + w_1 + ... + w_{s-1}. The stage with the largest bound for this K is taken.
        """
        best, before = (0.0, self.slope_s), 0.0
        for work in map(add, self.times.forward_s, self.times.backward_s):
            if before + num_microbatches * work > best[0] + num_microbatches * best[1]:
                best = before, work
            before += work
        return best


class StageRoom(NamedTuple):
    """Parameters that ranks of a stage may own, if room decides who owns what."""

    num_ranks: int
    """Ranks of the stage."""
    claimed: float
    """Parameters that each would own if holders shared alike."""
    capacity: float
    """Parameters that each has room to own."""

    @property
    def owned(self) -> float:
        """Parameters that each owns of those it holds."""
        return max(0.0, min(self.claimed, self.capacity))


_NO_ROOM = StageRoom(0, 0.0, 0.0)


class PipelineEstimator(StageTimes):
    """Balances and times pipelines on one cluster for one workload; caches everything by class."""

    def __init__(self, cost: CostModel, workload: Workload) -> None:
        super().__init__(cost, workload)
        self._pipelines: dict[tuple[PipelineKey, int, float | None], PipelineEstimate | None] = {}
        self._timed: dict[
            tuple[tuple[StageTable, ...], tuple[int, ...], PipelineKey], PipelineEstimate
        ] = {}
        self._moved: dict[tuple[PipelineEstimate, int], tuple[int, ...]] = {}
        self._roomiest: dict[tuple[PipelineKey, int, float], PipelineEstimate | None] = {}
        self._roomy: dict[tuple[StageTable, MemoryUse, float], tuple[StageTable, FloatArray]] = {}
        self._hops: dict[tuple[int, int, int, int, bool], tuple[float, float]] = {}
        self._ends_of: dict[tuple[PipelineEstimate, int], list[float]] = {}
        self._rooms: dict[tuple[StageTable, int, int, int], StageRoom] = {}
        self._steps: dict[tuple[StageTable, int, int, float | None], float] = {}
        self._work: dict[PipelineKey, tuple[float, float]] = {}

    def pipeline(
        self, pipeline: PipelineNodes, num_pipelines: int, owned_params: float | None = None
    ) -> PipelineEstimate | None:
        """Return a pipeline with its layers balanced, or None if the model doesn't fit.

        Args:
            pipeline: Its stages by node.
            num_pipelines: Pipelines of the plan.
            owned_params: Parameters that each rank owns; None if holders share them alike.
        """
        key = self.key(pipeline), num_pipelines, owned_params
        if key not in self._pipelines:
            self._pipelines[key] = self._estimate_pipeline(pipeline, *key[1:])
        return self._pipelines[key]

    def pipeline_work_s(self, key: PipelineKey) -> tuple[float, float]:
        """Return (fill, slope) of a pipeline's work, about the least, in unlimited memory.

        If stage s alone did P_s micro-batches a second with all layers, and layers had fractions, K
        micro-batches would take T with K = T·Σ P_s·(1 - 1/K)^(s-1) (`bound`): for large K that is
        K/P + Σ (s-1)·P_s/P² with P = Σ P_s. No bound for few micro-batches: whole layers may then
        leave less on slow first stages.
        """
        if key not in self._work:
            degrees, classes, _ = key
            stages = zip(classes, degrees, strict=True)
            powers = [self.most_per_s(self.node_of_class[c], degree) for c, degree in stages]
            power = sum(powers)
            before = sum(stage * rate for stage, rate in enumerate(powers))
            self._work[key] = before / power**2, 1.0 / power
        return self._work[key]

    def _estimate_pipeline(
        self, pipeline: PipelineNodes, num_pipelines: int, owned_params: float | None
    ) -> PipelineEstimate | None:
        if len(pipeline.nodes) > self.num_layers:
            return None
        tables = tuple(self.stage_tables(pipeline, num_pipelines, owned_params))
        balanced = self.balanced(tables)
        if balanced is None:
            return None
        found = self._timed_stages(pipeline, tables, balanced)
        usual = self.usual_share(num_pipelines)
        are_many = usual >= len(balanced) * _MANY_ROUNDS
        is_even = are_many and found.slope_s < found.slowest_s * _LINKS_SET_THE_PACE
        if is_even or not 1 < len(balanced) <= _MOST_STAGES_MOVED:
            return found
        key = found, usual
        if key not in self._moved:
            self._moved[key] = self._moved_layers(*key)
        return self._timed_stages(pipeline, tables, self._moved[key])

    def roomiest(
        self, pipeline: PipelineNodes, num_pipelines: int, limit_s: float
    ) -> PipelineEstimate | None:
        """Return a pipeline whose ranks have the most room to own, or None if it doesn't fit.

        Its stages take `limit_s` for a micro-batch at most.
        """
        key = self.key(pipeline), num_pipelines, limit_s
        if key not in self._roomiest:
            found, rooms = [], []
            for stage, table in enumerate(self.stage_tables(pipeline, num_pipelines, 0.0)):
                held = min(len(pipeline.nodes) - stage, self.workload.num_microbatches)
                kind = table, MemoryUse(num_pipelines, held), limit_s
                if kind not in self._roomy:
                    node, tp_degree = pipeline.stages[stage]
                    inner_s = self.stage_times_s(node, tp_degree, first=False, last=False)[0]
                    self._roomy[kind] = self._recompute.roomiest(*kind[:2], inner_s, limit_s)
                found.append(self._roomy[kind][0])
                rooms.append(-self._roomy[kind][1])
            layers = split_layers(np.array(rooms), self.num_layers, np.add)
            self._roomiest[key] = (
                self._timed_stages(pipeline, tuple(found), layers) if layers else None
            )
        return self._roomiest[key]

    def balance(self, pipeline: PipelineNodes, num_pipelines: int) -> tuple[int, ...] | None:
        """Return the layers of each stage by Eq. 4, or None if they don't fit.

        Args:
            pipeline: Its stages by node.
            num_pipelines: Pipelines among which states are spread.
        """
        return self.balanced(self.stage_tables(pipeline, num_pipelines, None))

    def _timed_stages(
        self, pipeline: PipelineNodes, tables: tuple[StageTable, ...], layers: tuple[int, ...]
    ) -> PipelineEstimate:
        key = tables, layers, self.key(pipeline)
        if key not in self._timed:
            hops = [self.hop_s(a, b) for a, b in itertools.pairwise(pipeline.stages)]
            pairs = [table.pair_s(count) for table, count in zip(tables, layers, strict=True)]
            times = EqualTimes(
                forward_s=tuple([forward for forward, _ in pairs]),
                backward_s=tuple([backward for _, backward in pairs]),
                forward_message_s=tuple([there for there, _ in hops]),
                backward_message_s=tuple([back for _, back in hops]),
                num_microbatches=1,
            )
            self._timed[key] = PipelineEstimate(
                tables=tables,
                layers=layers,
                slope_s=steady_round_s(times, blocking=self.cost.layout.blocking_messages),
                times=times,
                is_memory_bound=self.is_slowed(tables),
                is_recomputing=any(t.levels[n] for t, n in zip(tables, layers, strict=True)),
            )
        return self._timed[key]

    def _moved_layers(self, part: PipelineEstimate, num_microbatches: int) -> tuple[int, ...]:
        """Return the layers of each stage, moved to allow for slow links and few micro-batches.

        Eq. 4 knows only the slowest stage. But two stages with a slow link between them are faster
        with fewer layers on each, and few micro-batches with more on the fastest stage. One layer
        is moved at a time, as long as K micro-batches take less: `circle·(K - 1)` after the first
        has passed all stages and links.
        """
        blocking = self.cost.layout.blocking_messages
        hops_s = np.add(part.times.forward_message_s, part.times.backward_message_s)
        every_s = np.minimum([table.total_s for table in part.tables], _NEVER_S)
        stages = np.arange(len(part.layers))

        def seconds(split: IntArray) -> FloatArray:
            work_s = every_s[stages, split]
            later_s = circle_s(work_s, hops_s, blocking=blocking) * (num_microbatches - 1)
            total_s: FloatArray = later_s + work_s.sum(axis=-1)
            return total_s

        best = np.array(part.layers)
        moves = np.array([*itertools.permutations(np.eye(len(best), dtype=np.int64), 2)])
        moves = moves[:, 0] - moves[:, 1]
        best_s = float(seconds(best))
        while True:
            tried = best + moves
            tried = tried[tried.min(axis=1) > 0]
            tried_s = seconds(tried)
            least = int(np.argmin(tried_s)) if len(tried_s) else 0
            if not len(tried_s) or tried_s[least] >= best_s * (1 - _WORTH_MOVING):
                return tuple(best.tolist())
            best, best_s = tried[least], float(tried_s[least])

    def usual_share(self, num_pipelines: int) -> int:
        """Return the micro-batches of a pipeline if all have equally many."""
        return max(1, self.workload.num_microbatches // num_pipelines)

    def steps_s(
        self, part: PipelineEstimate, num_pipelines: int, owned_params: float | None
    ) -> list[float]:
        """Return the seconds of each stage's optimizer step."""
        steps_s = []
        for table, num_layers in zip(part.tables, part.layers, strict=True):
            key = table, num_layers, num_pipelines, owned_params
            if key not in self._steps:
                owned, shape = owned_params, table.sized(num_layers)
                if owned is None:
                    owned = self.cost.num_owned_params(shape, num_pipelines)
                self._steps[key] = self.cost.update_s(shape, owned)
            steps_s.append(self._steps[key])
        return steps_s

    def rooms(
        self, part: PipelineEstimate, num_pipelines: int, owned_params: float | None
    ) -> list[StageRoom]:
        """Return what ranks of each stage may own; zeros if holders share ownership equally."""
        if owned_params is None:
            return [_NO_ROOM] * len(part.layers)
        tokens, rooms, last = sum(self.workload.microbatch), [], len(part.layers)
        for stage, (table, num_layers) in enumerate(zip(part.tables, part.layers, strict=True)):
            held = min(last - stage, self.workload.num_microbatches)
            key = table, num_layers, num_pipelines, held
            if key not in self._rooms:
                shape = table.sized(num_layers)
                room = owned_capacity(self.cost, shape, num_pipelines, tokens * held, tokens)
                claimed = self.cost.num_owned_params(shape, num_pipelines)
                self._rooms[key] = StageRoom(shape.tp_degree, claimed, room)
            rooms.append(self._rooms[key])
        return rooms

    def hop_s(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
        """Return seconds of a hidden state between two stages, and of its gradient back.

        Stages are (node, devices).
        """
        key = self.classes[one[0]], one[1], self.classes[other[0]], other[1], one[0] == other[0]
        found = self._hops.get(key)
        if found is None:
            stages = []
            for index, (node, tp_degree) in enumerate((one, other)):
                first = self.rank_of_node[node]
                ranks = tuple(range(first, first + tp_degree))
                stages.append(StagePlan(ranks=ranks, layers=range(index, index + 1)))
            tokens = sum(self.workload.microbatch)
            found = self._hops[key] = (
                self.cost.activation_s(stages[0], stages[1], tokens),
                self.cost.activation_s(stages[1], stages[0], tokens),
            )
        return found

    def fill_s(self, part: PipelineEstimate, usual: int) -> float:
        """Return a pipeline's seconds beyond slope times micro-batches: the bubble.

        It holds for about `usual` micro-batches.
        """
        return max(self.ends_s(part, usual, usual)) - part.slope_s * usual

    def ends_s(self, part: PipelineEstimate, num_microbatches: int, usual: int) -> list[float]:
        """Return when each stage ends if the pipeline starts at 0, extrapolated from `usual`."""
        if min(usual, num_microbatches) >= _STEADY_ROUNDS * len(part.layers):
            later_s = (num_microbatches - usual) * part.slope_s
            return [end + later_s for end in self._run_s(part, usual)]
        return self._run_s(part, num_microbatches)

    def _run_s(self, part: PipelineEstimate, num_microbatches: int) -> list[float]:
        key = part, num_microbatches
        found = self._ends_of.get(key)
        if found is None:
            times = replace(part.times, num_microbatches=num_microbatches)
            starts, blocking = (0.0,) * len(part.layers), self.cost.layout.blocking_messages
            found = list(propagate(times, starts, blocking=blocking).end_s)
            self._ends_of[key] = found
        return found
