"""Choose the order of a rank's passes: 1F1B, or one that is solved for the times of this run.

A plan's first iterations run 1F1B. Then ranks share the seconds that a forward, a backward and a
message to the next stage took. Each rank solves the same problem (see
`lightning_hetero.schedules`), so all ranks have the same orders without another message. A problem
is solved once for each plan and number of micro-batches; if iterations are long, also for each mix
of sizes of micro-batches.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import torch

from lightning_hetero.core.actions import (
    MAX_KEPT_SENDS,
    Action,
    ActionKind,
    most_held,
    schedule_forward,
)
from lightning_hetero.core.places import usual_held
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.clock import ActionTime, ComputeClock
from lightning_hetero.runtime.iteration.running_plan import MAX_KNOWN_PLANS, RunningPlan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.stage.activations import measure_edges
from lightning_hetero.schedules import (
    Edge,
    Schedule,
    StageTimes,
    solve_actions,
    usual_actions,
)

_MEASURED_ITERATIONS = 3
"""Training iterations under 1F1B that are measured; the first is slow and isn't used."""

_GRAIN = 8
"""Sizes of micro-batches are rounded to 1/8 of their mean, so that solved orders are used again."""
_LONG_S = 2.0
"""In iterations of this many seconds or more, the order is solved for the actual sizes of the
micro-batches; in shorter ones for equal sizes."""
_USED_MEMORY = 0.9
"""Share of a device's memory that micro-batches may fill."""


class StageSchedule(NamedTuple):
    """What a rank runs in an iteration."""

    actions: tuple[Action, ...] = ()
    """The rank's actions, in the order in which they run."""
    held: Mapping[int, int] = MappingProxyType({})
    """For each of this rank's stages, and each stage before one of them, the largest number of
    micro-batches between forward and backward at once."""

    def held_by(self, stage_index: int) -> int:
        """Return how many micro-batches a stage may be ahead of the next one.

        Without backward passes that is `MAX_KEPT_SENDS`.
        """
        return self.held.get(stage_index, MAX_KEPT_SENDS)

    @property
    def is_split(self) -> bool:
        """Whether backward passes are split."""
        return any(action.kind is ActionKind.WEIGHT for action in self.actions)


class _Times(NamedTuple):
    """Seconds of a micro-batch on one rank."""

    forward_s: dict[int, float]
    """Seconds of a forward, by stage."""
    backward_s: dict[int, float]
    edges: dict[int, Edge]
    """The link from each stage to the next, if that is another rank's."""
    room: float
    """Micro-batches that its memory has room for, those that 1F1B holds included. A micro-batch
    that is held in all chunks of the rank counts once."""


class ScheduleChoice:
    """The actions of one rank in each training iteration."""

    def __init__(
        self, kind: Schedule, comms: Communicators, clock: ComputeClock, *, is_split: bool
    ) -> None:
        self.kind = kind
        self._is_split = is_split
        self._comms = comms
        self._clock = clock
        self._ran: ParallelPlan | None = None
        """The plan of the last training iteration."""
        self._own = defaultdict[ParallelPlan, list[tuple[ActionTime, ...]]](list)
        """For each plan the actions of its measured iterations."""
        self._times: dict[ParallelPlan, list[_Times]] = {}
        """For each plan the times of all ranks."""
        self._solve = lru_cache(maxsize=256)(self._solved)

    def of(
        self, running: RunningPlan, tokens: Sequence[int], *, is_training: bool
    ) -> StageSchedule:
        """Return what this rank runs in an iteration, given the tokens of its micro-batches."""
        if running.place is None:
            return StageSchedule()
        index, count = running.place.stage_index, len(tokens)
        pipeline, orders = running.pipeline, None
        if not is_training and not pipeline.has_chunks:
            return StageSchedule(schedule_forward(stage_index=index, num_microbatches=count))
        if is_training and running.plan in self._times and pipeline.num_stages > 1 and count:
            sizes = self._sizes(running, tokens)
            orders = self._solve(running.plan, running.place.pipeline_index, count, sizes)
        # Without its backward passes an order that can't deadlock still can't.
        orders = orders or usual_actions(pipeline.workers, count)
        held: dict[int, int] = {}
        near = {i for chunk in running.chunks for i in (max(chunk.index - 1, 0), chunk.index)}
        for worker in {pipeline.workers[stage] for stage in near}:
            held |= most_held(orders[worker])
        actions = orders[pipeline.workers[index]]
        if not is_training:
            return StageSchedule(tuple(a for a in actions if a.kind is ActionKind.FORWARD), held)
        return StageSchedule(actions, held)

    def _sizes(self, running: RunningPlan, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the sizes of micro-batches relative to their mean, rounded.

        Empty if they hardly differ, and in short iterations, where solving would take too long:
        then the order for equal micro-batches runs.
        """
        mean = sum(tokens) / len(tokens)
        sizes = tuple(round(count / mean * _GRAIN) / _GRAIN for count in tokens) if mean else ()
        times = [self._times[running.plan][rank] for rank in running.pipeline.ranks]
        each_s = (sum((*t.forward_s.values(), *t.backward_s.values())) for t in times)
        busy_s = max(each_s) * len(tokens)
        return sizes if len(set(sizes)) > 1 and min(sizes) and busy_s >= _LONG_S else ()

    def learn(self, running: RunningPlan) -> None:
        """Note the times of a training iteration; called by every rank after each.

        After a plan's last measured iteration ranks share their times, so all must be here.
        """
        plan = running.plan
        if not self.kind.is_solved or plan.max_stages == 1:
            return
        timed, self._ran = self._ran if self._clock.is_late else plan, plan
        if plan in self._times:
            return
        own, last = self._own[plan], self._clock.last
        if len(self._own) > MAX_KNOWN_PLANS:
            self._own.pop(next(iter(self._own)))  # It is measured anew if it runs again.
        own.append(last.actions if own and timed is plan and last is not None else ())
        if len(own) == _MEASURED_ITERATIONS:
            self._share(running, [action for actions in own for action in actions])

    def _share(self, running: RunningPlan, actions: Sequence[ActionTime]) -> None:
        """Share what was measured of a plan with all ranks."""
        seconds = defaultdict[tuple[ActionKind, int], list[float]](list)
        for action in actions:
            seconds[action.kind, action.stage_index].append(action.compute_s)

        def medians_s(kind: ActionKind) -> dict[int, float]:
            return {stage: median(found) for (own, stage), found in seconds.items() if own is kind}

        place = running.place
        is_measured = place is not None and place.tp_rank == 0
        found = _Times(
            medians_s(ActionKind.FORWARD),
            medians_s(ActionKind.BACKWARD),
            measure_edges({c.index: c.link for c in running.chunks}) if is_measured else {},
            _room(running),
        )
        self._times[running.plan] = self._comms.gather_objects(found)
        del self._own[running.plan]
        if len(self._times) > MAX_KNOWN_PLANS:
            self._times.pop(next(iter(self._times)))  # It is measured anew if it runs again.
            # All ranks forget old orders at once, so that none runs an old one beside new ones.
            self._solve.cache_clear()

    def _solved(
        self,
        plan: ParallelPlan,
        pipeline_index: int,
        num_microbatches: int,
        sizes: tuple[float, ...],
    ) -> tuple[tuple[Action, ...], ...] | None:
        times, pipeline = self._times[plan], plan.pipelines[pipeline_index]
        stages = [
            # Ranks of a tensor-parallel group wait for the slowest one; the first measures links.
            StageTimes(
                forward_s=max(times[rank].forward_s.get(index, 0.0) for rank in stage.ranks),
                backward_s=max(times[rank].backward_s.get(index, 0.0) for rank in stage.ranks),
                edge=times[stage.ranks[0]].edges.get(index, Edge()),
            )
            for index, stage in enumerate(pipeline.stages)
        ]
        return solve_actions(
            stages,
            num_microbatches,
            rooms=self.kind.rooms(
                [min(times[rank].room for rank in group) for group in pipeline.groups],
                pipeline.workers,
            ),
            least_gain=self.kind.least_gain,
            is_split=self._is_split,
            sizes=sizes,
            workers=pipeline.workers,
        )


def _room(running: RunningPlan) -> float:
    """Return the micro-batches for which this rank's device has memory; infinity on CPUs.

    All memory that the measured iterations used beyond what stays between iterations is counted as
    that of the micro-batches which 1F1B holds. So the room is estimated too small, never too large.
    """
    device = running.weights.store.device
    if device.type != "cuda" or running.place is None:
        return math.inf
    workers = running.pipeline.workers
    held = usual_held(workers)[workers[running.place.stage_index]]
    most, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    left = _USED_MEMORY * torch.cuda.get_device_properties(device).total_memory - most
    return held * (1 + max(0.0, left) / max(1, most - kept))
