"""`StragglerMonitor`: watch a run for stragglers and work around them, from Lightning's hooks.

A thin adapter; `lightning_hetero.straggler` makes all decisions. After every optimizer step:

1. Each rank notes how long the step took, and whether its own pace has changed (`RankHistory`).
2. Rank 0 gets the notes of all ranks and decides what to do (`RunWatch`): two small messages on
   CPU.
3. If it decides to diagnose, all ranks report and probe, and rank 0 finds the cause.
4. If it decides on a mitigation, all ranks carry it out: another plan, or a restart.

The clock of `HeteroStrategy` distinguishes computing from waiting. `straggler.record` logs the runs
of other strategies.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hetero.callbacks.watching.session import StragglerSession
from lightning_hetero.callbacks.watching.step_times import StepTimes
from lightning_hetero.callbacks.watching.watched_run import WatchedRun
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.event_log import append_event
from lightning_hetero.straggler import Event, IterationEvent, Mitigation, PolicyConfig
from lightning_hetero.straggler.events import to_entry
from lightning_hetero.straggler.watch import WatchConfig
from lightning_hetero.strategy.run import note, run_of


class StragglerMonitor(Callback):
    """Find stragglers within a few steps and work around them without a restart.

    ::

        Trainer(strategy=HeteroStrategy(), callbacks=[StragglerMonitor()])

    It saves no state in checkpoints: after a restart, machines, ranks and plan may have changed, so
    it learns the usual times again. An excluded machine doesn't come back, because its torchrun
    agent has ended.

    Args:
        dry_run: Whether to report mitigations without carrying them out.
        events: File for findings and actions, as JSON lines, for `lightning-hetero stragglers`; a
            relative path is in the Trainer's `default_root_dir`. The default is the file of
            `RunLog`, so that a run has one log. None writes no file.
        policy: Which mitigations are allowed, and first estimates of their costs.
        recheck_share: Share of the time that may be spent on probing a known slow link again.
        admission: If given, devices and links are measured before training. A device is reported if
            it is slower than others of its type by this factor, at matrix products or at copies in
            its memory; 1.3 is sensible. A link is reported from a factor of 1.5 on. With an
            `ElasticRestart` the run restarts without them. The measurements take well below two
            seconds, and run whenever training begins, also with new ranks.
        replaces_given_plan: Whether to replace a plan that you gave, permanently, if another plan
            would take a tenth less time although there is no fault. By default that is only
            reported; automatic plans are always replaced.
    """

    def __init__(
        self,
        *,
        dry_run: bool = False,
        events: str | Path | None = "events.jsonl",
        policy: PolicyConfig | None = None,
        recheck_share: float = 0.002,
        admission: float | None = None,
        replaces_given_plan: bool = False,
    ) -> None:
        if admission is not None and not admission > 1.0:
            raise ConfigurationError(
                f"admission is {admission}; give a ratio above 1, such as 1.3."
            )
        self.config = WatchConfig(
            policy=policy or PolicyConfig(), dry_run=dry_run, recheck_share=recheck_share
        )
        self.events = events
        self.admission = admission
        self.replaces_given_plan = replaces_given_plan
        self._session: StragglerSession | None = None
        self._path: Path | None = None
        self._shares_log = False
        self._step = StepTimes(0)
        self._predicted_s: float | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = run_of(trainer)
        planned = known.strategy.auto_planned
        self._predicted_s = None if planned is None else planned.predicted_s
        may_replace = planned is not None or self.replaces_given_plan
        if self.events is not None and trainer.is_global_zero:
            path = (Path(trainer.default_root_dir) / self.events).absolute()
            self._shares_log = any(
                log.file(trainer).resolve() == path.resolve() for log in known.logs
            )
            self._path = None if self._shares_log else path
        self._session = StragglerSession(
            WatchedRun(trainer, known.strategy),
            known.comms,
            replace(self.config, replaces_plan=may_replace),
            report=partial(self._report, trainer),
            say=rank_zero_info,
            admission=self.admission,
        )
        self._step = StepTimes(trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        self._step.begin_batch(batch)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = run_of(trainer).strategy
        share, clock = strategy.plan.share(trainer.global_rank), strategy.engine.clock
        self._step.end_batch(clock.last, share=share, is_late=clock.is_late)
        # Batches that only accumulate gradients belong to the step that uses them.
        if trainer.global_step == self._step.index or self._session is None:
            return
        observation, iteration_s = self._step.finish(trainer.global_step)
        if iteration_s == 0:  # The first step: on an accelerator its times come one step later.
            return
        self._session.after_step(
            observation, iteration_s=iteration_s, predicted_s=self._predicted_s
        )
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step % every == 0:
            scalars = {
                "straggler/iteration_s": iteration_s,
                "straggler/waiting_s": sum(observation.waits_s.values()),
                "straggler/mitigation": float(list(Mitigation).index(self._session.mitigation)),
            }
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=trainer.global_step)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._session = None
        self._path = None

    def _report(self, trainer: pl.Trainer, event: Event) -> None:
        if self._path is not None:
            append_event(self._path, **to_entry(event))
        if self._shares_log or not isinstance(event, IterationEvent):
            note(trainer, **to_entry(event))
