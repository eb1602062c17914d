"""Find and apply mitigations for stragglers: another plan, or a restart."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import lightning.pytorch as pl

from lightning_hetero.core.errors import ConfigurationError, PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.straggler import DecisionKind, Finding
from lightning_hetero.straggler.locate import Probes
from lightning_hetero.straggler.mitigation import (
    Decision,
    PossibleMitigation,
    find_mitigations,
    restart_mitigation,
)
from lightning_hetero.straggler.paces import Observation, RankReport
from lightning_hetero.straggler.prediction import MeasuredRun, RunPrediction
from lightning_hetero.strategy.hetero import HeteroStrategy

_EQUAL_DEVICES = 1.15
"""Devices whose probes differ by at most this factor count as equal, since probes are rough."""


class WatchedRun:
    """The run that a session watches, whose plan may change.

    Args:
        trainer: The run's Trainer.
        strategy: Its strategy.
    """

    def __init__(self, trainer: pl.Trainer, strategy: HeteroStrategy) -> None:
        self.device = strategy.root_device
        self._world_size = trainer.world_size
        self._restarter = next(iter(strategy.run.restarters), None)
        self._trainer = trainer
        self._strategy = strategy
        self._wanted = strategy.plan
        self._datamodule = strategy.datamodule
        self._last_before = -1
        self._first_plans: tuple[ParallelPlan, ...] = ()

    @property
    def message_bytes(self) -> int:
        """Bytes of the largest message of weights or gradients, 1 KiB at least."""
        engine = self._strategy.engine
        table = engine.plans.table_of(self._strategy.plan)
        largest = table.largest_push(engine.comms.global_rank)
        return max(2**10, largest * engine.config.compute_dtype.itemsize)

    @property
    def clock(self) -> ComputeClock:
        """The engine's clock."""
        return self._strategy.engine.clock

    def where(self, findings: Sequence[Finding]) -> str:
        """Return the pipeline that all findings concern, else "the run"."""
        places = [self._strategy.plan.place(rank) for f in findings for rank in f.ranks]
        indices = {place.pipeline_index for place in places if place is not None}
        return f"pipeline {indices.pop()}" if len(indices) == 1 else "the run"

    def find_mitigations(
        self, findings: Sequence[Finding], measured: MeasuredRun | None, *, healthy_s: float
    ) -> Sequence[PossibleMitigation]:
        """Return S2 and S3, if measurements allow a prediction, and S4; on rank 0 only."""
        restarts: tuple[PossibleMitigation, ...] = ()
        if self._restarter is not None:
            restart = restart_mitigation(
                findings,
                healthy_s=healthy_s,
                world_size=self._world_size,
                num_left=self._restarter.num_left,
            )
            restarts = () if restart is None else (restart,)
        if measured is None:
            return restarts
        memory = self._strategy.memory
        assert memory is not None, "the strategy has not been set up"
        model = RunPrediction(measured, findings)
        found = find_mitigations(model, self._plans_without_fault(), memory.has_room)
        return (*found, *restarts)

    def _plans_without_fault(self) -> tuple[ParallelPlan, ...]:
        """Return the plans from before the fault, even if they were changed since."""
        if self._first_plans:
            return self._first_plans
        return (self._strategy.plan,) if self._datamodule is None else self._datamodule.plans

    def measure(
        self, reports: Sequence[RankReport], healthy_s: float, probes: Probes
    ) -> MeasuredRun | None:
        """Return measurements of the plan that ran most often; None if there are too few."""
        plans, engine = self._plans_without_fault(), self._strategy.engine
        plan, device_s = plans[0], probes.device_s
        if self._datamodule is not None:
            plan = max(plans, key=self._datamodule.num_dealt.__getitem__)
        if not math.isfinite(healthy_s) or not all(reports[r].pace > 0.0 for r in plan.ranks):
            return None
        equal = not device_s or max(device_s.values()) < _EQUAL_DEVICES * min(device_s.values())
        link_s = statistics.median(probes.link_s.values()) if probes.link_s else 0.0
        return MeasuredRun(
            plan=plan,
            counts=self._counts(plan, reports),
            iteration_s=healthy_s,
            places={r: _place_times(reports[r], plan.share(r)) for r in plan.ranks},
            probe_s={} if equal else device_s,
            link_s_per_byte=link_s / (2 * probes.link_bytes) if probes.link_bytes else 0.0,
            hidden_bytes=max(r.before.hidden_bytes for r in reports if r.before),
            value_bytes=engine.config.compute_dtype.itemsize,
            table_of=engine.plans.table_of,
            is_assigned=self._datamodule is not None,
        )

    def _counts(self, plan: ParallelPlan, reports: Sequence[RankReport]) -> tuple[int, ...]:
        """Return the micro-batches of a plan's pipelines in an iteration."""
        if self._datamodule is None:
            return plan.count_microbatches(self._strategy.engine.config.num_microbatches)
        return tuple(
            max(1, *(b.num_microbatches for rank in pipeline.ranks if (b := reports[rank].before)))
            for pipeline in plan.pipelines
        )

    def act(self, decision: Decision) -> str | None:
        """Run other plans, or assign by other slowdowns, from now on; or ask for a restart.

        Called by all ranks. Returns the reason if it isn't possible.
        """
        choice, undoes = decision.choice, decision.kind is DecisionKind.UNDO
        if not choice.plans:
            if self._restarter is not None:
                self._restarter.request_restart(choice.effect, exclude=choice.exclude)
            return None
        plans = choice.first_plans if undoes else choice.plans
        slowdowns = {} if undoes else choice.slowdowns
        try:
            if self._datamodule is None:
                self._strategy.change_plan(plans[0])
            else:
                self._datamodule.set_slowdowns(
                    [slowdowns.get(rank, 1.0) for rank in range(self._world_size)]
                )
                num_left = self._strategy.set_candidate_plans(plans, self._strategy.candidate_costs)
                self._last_before = self._trainer.fit_loop.total_batch_idx + num_left
        except (PlanError, ConfigurationError) as error:
            return str(error)
        self._first_plans = () if undoes or choice.is_lasting else choice.first_plans
        self._wanted = plans[0]
        return None

    def is_changing(self) -> bool:
        """Whether batches that were dealt before the last `act` are still being run."""
        if self._datamodule is not None:
            return self._trainer.fit_loop.total_batch_idx <= self._last_before
        return self._strategy.plan != self._wanted


def _place_times(report: RankReport, share: float) -> Observation:
    """Return a rank's times of a micro-batch; its pace is independent of the plans that ran."""
    before = report.before
    assert before is not None
    scale = report.pace * before.work * share / (before.forward_s + before.backward_s)
    return replace(before, forward_s=scale * before.forward_s, backward_s=scale * before.backward_s)
