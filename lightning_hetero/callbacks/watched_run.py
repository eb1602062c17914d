"""What can be done about a straggler in a run: another plan in a hetero one, a restart in any."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_hetero.callbacks.elastic import ElasticRestart
from lightning_hetero.core.errors import ConfigurationError, PlanError
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.straggler import (
    Act,
    DecisionKind,
    Finding,
    Measure,
    MeasuredRun,
    PlaceTimes,
    Probes,
    RankReport,
    RunModel,
    Slowness,
    assigning_measure,
    find_measures,
    restart_measure,
)
from lightning_hetero.strategy import HeteroStrategy

__all__ = ["HeteroRun", "PlainRun"]

_BUCKET_BYTES = 25 * 2**20
_EQUAL_DEVICES = 1.15
"""Devices whose probes differ by no more are taken to be equal: probes are rough."""


class PlainRun:
    """A run under any strategy."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.device = trainer.strategy.root_device
        self._world_size = trainer.world_size
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._restarter = next((c for c in callbacks if isinstance(c, ElasticRestart)), None)

    @property
    def message_bytes(self) -> int:
        """DDP's usual bucket; how other strategies send isn't known."""
        return _BUCKET_BYTES

    @property
    def clock(self) -> ComputeClock | None:
        """None: nothing tells this run's computing from its waiting."""
        return None

    def where(self, findings: Sequence[Finding]) -> str:
        """Return whose slowness it is."""
        return "the run"

    def find_measures(
        self,
        reports: Sequence[RankReport],
        findings: Sequence[Finding],
        *,
        healthy_s: float,
        probes: Probes,
    ) -> Sequence[Measure]:
        """Return S4 if a callback can restart the run."""
        if self._restarter is None:
            return ()
        measure = restart_measure(
            findings,
            healthy_s=healthy_s,
            world_size=self._world_size,
            num_left=self._restarter.num_left,
        )
        return () if measure is None else (measure,)

    def act(self, act: Act) -> str | None:
        """Ask for a restart."""
        if self._restarter is not None:
            self._restarter.request_restart(act.measure.effect, exclude=act.measure.exclude)
        return None

    def is_changing(self) -> bool:
        """Return False: a restart is another run."""
        return False


class HeteroRun(PlainRun):
    """A run under `HeteroStrategy`, whose plan may change."""

    def __init__(self, trainer: pl.Trainer, strategy: HeteroStrategy) -> None:
        super().__init__(trainer)
        self._trainer = trainer
        self._strategy = strategy
        self._wanted = strategy.plan
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._datamodule = datamodule if hasattr(datamodule, "set_slowdowns") else None
        self._num_run_before = trainer.fit_loop.total_batch_idx + 1
        self._num_before = 0
        self._measured: MeasuredRun | None = None

    @property
    def message_bytes(self) -> int:
        """Bytes of the largest message of weights or gradients, 1 KiB at least."""
        engine = self._strategy.engine
        table = engine.transfer_table(self._strategy.plan)
        largest = max(map(table.numel, table.push(engine.comms.global_rank)), default=0)
        return max(2**10, largest * engine.config.propagation_dtype.itemsize)

    @property
    def clock(self) -> ComputeClock:
        """The engine's."""
        return self._strategy.engine.clock

    def where(self, findings: Sequence[Finding]) -> str:
        """Return the pipeline that all findings have in common, else the run."""
        places = [self._strategy.plan.place(rank) for f in findings for rank in f.ranks]
        indices = {place.pipeline_index for place in places if place is not None}
        return f"pipeline {indices.pop()}" if len(indices) == 1 else "the run"

    def find_measures(
        self,
        reports: Sequence[RankReport],
        findings: Sequence[Finding],
        *,
        healthy_s: float,
        probes: Probes,
    ) -> Sequence[Measure]:
        """Return S2 and S3 where what was measured tells what they would give; and S4."""
        restarts = super().find_measures(reports, findings, healthy_s=healthy_s, probes=probes)
        slowness = Slowness.of(findings, self._world_size)
        if self._datamodule is not None:
            measure = assigning_measure(
                self._strategy.plan, slowness, healthy_s=healthy_s, world_size=self._world_size
            )
            return restarts if measure is None else (measure, *restarts)
        measured = self._measure(reports, healthy_s, probes)
        if measured is None:
            return restarts
        model = RunModel(measured, slowness)
        return (*find_measures(model, measured.plan, slowness), *restarts)

    def _measure(
        self, reports: Sequence[RankReport], healthy_s: float, probes: Probes
    ) -> MeasuredRun | None:
        """Return what the run showed while nothing was slow; None if that isn't known."""
        engine = self._strategy.engine
        # Baselines are of the plan that ran before the fault, whatever was done since.
        plan = self._strategy.plan if self._measured is None else self._measured.plan
        ranks = [rank for rank in plan.ranks if plan.place(rank) is not None]
        if not math.isfinite(healthy_s) or not all(reports[r].pace > 0.0 for r in ranks):
            return None
        places = {}
        for rank in ranks:
            total_s, share = reports[rank].pace * reports[rank].work, reports[rank].forward_share
            places[rank] = PlaceTimes(forward_s=total_s * share, backward_s=total_s * (1 - share))
        device_s = probes.device_s
        equal = not device_s or max(device_s.values()) < _EQUAL_DEVICES * min(device_s.values())
        link_s = statistics.median(probes.link_s.values()) if probes.link_s else 0.0
        self._measured = MeasuredRun(
            plan=plan,
            counts=engine.num_microbatches if self._measured is None else self._measured.counts,
            iteration_s=healthy_s,
            places=places,
            probe_s={} if equal else device_s,
            link_s_per_byte=link_s / (2 * probes.link_bytes) if probes.link_bytes else 0.0,
            hidden_bytes=max(report.hidden_bytes for report in reports),
            value_bytes=engine.config.propagation_dtype.itemsize,
            table_of=engine.transfer_table,
        )
        return self._measured

    def act(self, act: Act) -> str | None:
        """Run the plan, or assign by the slowdowns, from now on; or ask for a restart."""
        measure, undoes = act.measure, act.kind is DecisionKind.UNDO
        if measure.slowdowns and self._datamodule is not None:
            slowdowns = [1.0] * len(measure.slowdowns) if undoes else measure.slowdowns
            self._num_before = self._datamodule.set_slowdowns(slowdowns)
            return None
        if measure.plan is None or measure.first_plan is None:
            return super().act(act)
        plan = measure.first_plan if undoes else measure.plan
        try:
            self._strategy.change_plan(plan)
        except (PlanError, ConfigurationError) as error:
            return str(error)
        self._wanted = plan
        return None

    def is_changing(self) -> bool:
        """Return whether batches of before the last act are still being run."""
        if self._datamodule is not None:
            # What was planned before the act still runs.
            num_run = self._trainer.fit_loop.total_batch_idx + 1 - self._num_run_before
            return num_run <= self._num_before
        return self._strategy.plan != self._wanted
