"""The order of a stage's passes: 1F1B, or one that is solved for the times measured in this run.

A plan's first iterations run 1F1B. Then ranks share the seconds that a forward, a backward and a
message to the next stage took, and each rank solves the same problem (see
`lightning_hetero.schedules`), so all know the same orders without another message. They are solved
once per plan and number of micro-batches, and in long iterations for the micro-batches' own sizes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import torch

from lightning_hetero.core.actions import (
    MAX_KEPT_SENDS,
    Action,
    ActionKind,
    most_held,
    schedule_1f1b,
    schedule_forward,
)
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration.running_plan import MAX_KNOWN_PLANS, RunningPlan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.stage.activations import measure_edge
from lightning_hetero.schedules import Edge, Schedule, StageTimes, solve_actions

__all__ = ["ScheduleChoice", "StageSchedule"]

_MEASURED_ITERATIONS = 3
"""Training iterations under 1F1B that are measured; the first one, which warms up, isn't used."""

_GRAIN = 8
"""Sizes of micro-batches are rounded to this part of their mean, so that solved orders recur."""
_LONG_S = 2.0
"""An iteration of so many seconds is long enough to solve an order for its own micro-batches."""
_USED_MEMORY = 0.9
"""Share of a device's memory that micro-batches may fill."""


class StageSchedule(NamedTuple):
    """What a stage runs in an iteration."""

    actions: tuple[Action, ...] = ()
    """In their order."""
    held: int = MAX_KEPT_SENDS
    """Most micro-batches that it holds between forward and backward."""
    held_before: int = MAX_KEPT_SENDS
    """The same of the stage before."""

    @property
    def is_split(self) -> bool:
        """Whether backward passes are split."""
        return any(action.kind is ActionKind.WEIGHT for action in self.actions)


class _Times(NamedTuple):
    """Seconds of a micro-batch on one rank."""

    forward_s: float
    backward_s: float
    edge: Edge
    """The link to the next stage."""
    room: float
    """Micro-batches that its memory has room for, the ones that 1F1B holds among them."""


@dataclass
class _Own:
    """What this rank has measured of a plan."""

    num_iterations: int = 0
    seconds: dict[ActionKind, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median_s(self, kind: ActionKind) -> float:
        """Return the seconds of a usual action."""
        return median(self.seconds[kind]) if self.seconds[kind] else 0.0


class ScheduleChoice:
    """The actions of one rank's stage in each training iteration.

    Args:
        kind: The user's choice.
        is_split: Whether backward passes can be split.
        comms: Share the measured times.
        clock: Has the times of the last iteration.
    """

    def __init__(
        self, kind: Schedule, comms: Communicators, clock: ComputeClock, *, is_split: bool
    ) -> None:
        self.kind = kind
        self._is_split = is_split
        self._comms = comms
        self._clock = clock
        self._ran: ParallelPlan | None = None
        """The plan of the last training iteration."""
        self._own: dict[ParallelPlan, _Own] = defaultdict(_Own)
        self._times: dict[ParallelPlan, list[_Times]] = {}
        """By plan and rank."""
        self._solve = lru_cache(maxsize=256)(self._solved)

    def of(
        self, running: RunningPlan, tokens: Sequence[int], *, is_training: bool
    ) -> StageSchedule:
        """Return what this rank's stage runs for micro-batches of so many tokens."""
        if running.place is None:
            return StageSchedule()
        index, num_stages, count = running.place.stage_index, len(running.stages), len(tokens)
        if not is_training:
            return StageSchedule(schedule_forward(stage_index=index, num_microbatches=count))
        orders = None
        if running.plan in self._times and num_stages > 1 and count:
            sizes = self._sizes(running, tokens)
            orders = self._solve(running.plan, running.place.pipeline_index, count, sizes)
        if orders is None:
            before, own = (
                schedule_1f1b(stage_index=stage, num_stages=num_stages, num_microbatches=count)
                for stage in (max(index - 1, 0), index)
            )
        else:
            before, own = orders[max(index - 1, 0)], orders[index]
        return StageSchedule(own, most_held(own), most_held(before))

    def _sizes(self, running: RunningPlan, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the micro-batches' sizes beside their mean's; none if they hardly differ.

        None as well in short iterations, for which it would take too long to solve an order in each
        of them; then that for equal micro-batches runs.
        """
        mean = sum(tokens) / len(tokens)
        sizes = tuple(round(count / mean * _GRAIN) / _GRAIN for count in tokens) if mean else ()
        times = [
            self._times[running.plan][rank] for stage in running.stages for rank in stage.ranks
        ]
        busy_s = max(item.forward_s + item.backward_s for item in times) * len(tokens)
        return sizes if len(set(sizes)) > 1 and min(sizes) and busy_s >= _LONG_S else ()

    def learn(self, running: RunningPlan) -> None:
        """Note the times of a training iteration; called by every rank after each.

        Collective over all ranks after a plan's last measured iteration.
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
        own.num_iterations += 1
        if timed is plan and own.num_iterations > 1 and last is not None:
            for action in last.actions:
                own.seconds[action.kind].append(action.compute_s)
        if own.num_iterations == _MEASURED_ITERATIONS:
            self._share(running, own)

    def _share(self, running: RunningPlan, own: "_Own") -> None:
        """Share what was measured of a plan with all ranks; collective."""
        place = running.place
        found = _Times(
            own.median_s(ActionKind.FORWARD),
            own.median_s(ActionKind.BACKWARD),
            Edge() if place is None else measure_edge(running.link, place),
            _room(running),
        )
        self._times[running.plan] = self._comms.gather_objects(found)
        del self._own[running.plan]
        if len(self._times) > MAX_KNOWN_PLANS:
            self._times.pop(next(iter(self._times)))  # It is measured anew if it runs again.

    def _solved(
        self,
        plan: ParallelPlan,
        pipeline_index: int,
        num_microbatches: int,
        sizes: tuple[float, ...],
    ) -> tuple[tuple[Action, ...], ...] | None:
        times = self._times[plan]
        stages = [
            # Ranks of a tensor-parallel group wait for the slowest.
            StageTimes(
                forward_s=max(times[rank].forward_s for rank in stage.ranks),
                backward_s=max(times[rank].backward_s for rank in stage.ranks),
                edge=max((times[rank].edge for rank in stage.ranks), key=lambda edge: edge.whole_s),
            )
            for stage in plan.pipelines[pipeline_index].stages
        ]
        return solve_actions(
            stages,
            num_microbatches,
            rooms=self.kind.rooms(
                [
                    min(times[rank].room for rank in stage.ranks)
                    for stage in plan.pipelines[pipeline_index].stages
                ]
            ),
            least_gain=self.kind.least_gain,
            is_split=self._is_split,
            sizes=sizes,
        )


def _room(running: RunningPlan) -> float:
    """Return the micro-batches for which this rank's device has memory; infinity on CPUs.

    What the measured iterations took beyond what is kept between them counts as all for the
    micro-batches that 1F1B holds, so the room is estimated too small rather than too large.
    """
    device = running.weights.store.device
    if device.type != "cuda" or running.place is None:
        return math.inf
    held = len(running.stages) - running.place.stage_index
    most, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    left = _USED_MEMORY * torch.cuda.get_device_properties(device).total_memory - most
    return held * (1 + max(0.0, left) / max(1, most - kept))
