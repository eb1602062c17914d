"""`RunLog`: log the events of a run, one JSON object per line, over all its restarts.

A line is `{"event": "recovered", "at_s": 1732180000.25, "step": 40, ...}`; `at_s` is in seconds
since 1970. `read_log` reads all events, `lightning-hetero stragglers` those about stragglers.
`RunLog` itself writes

- `started`: training begins, with the ranks' machines and the plans that may run.
- `plan`: an iteration ran under another plan than the previous one. Plans are numbered as in
  `started`; a new plan is written out in the first line that has its number. Only the first 1,000
  changes after a start are logged, because a run may change its plan in every step.
- `validated`: the metrics of a validation.
- `generation`: ranks were lost, have left or joined, and the others go on in place
  (`ElasticRestart(in_place=True)`). `lost` has those that were lost or left, `joined` those that
  joined, each by its number: its rank at the first start, or the next free number for a joiner.
  `ranks` is how many go on, `steps_again` how many steps they repeat, `idle_s` the seconds between
  the last step and the next one.
- `failed`: a rank ends with an error; written by that rank.
- `ended`: training is finished.

Other callbacks add events by `note`. `LayerwiseCheckpoint`: where the state came from (`recovered`,
with `is_live` if ranks went on from their own slices, else `why_not_live`), and at each save the
newest step of which each tier has a checkpoint (`checkpoint`). `ElasticRestart`: which ranks leave
(`leaving`). `StragglerMonitor`: what it has found and done (`change`, `finding`, `action`).
`RunMetrics`: its scalars (`metrics`). `InjectFaults`: its faults (`faults`).
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hetero.core.event_log import append_event, read_entries
from lightning_hetero.runtime.ranks.failure import AgreedExit
from lightning_hetero.strategy.hetero import HeteroStrategy
from lightning_hetero.strategy.run import Run, logs_of, note, run_of

if TYPE_CHECKING:
    from lightning_hetero.core.plan import ParallelPlan
    from lightning_hetero.runtime.generation.log import Generation

_MOST_CHANGES = 1000


class RunLog(Callback):
    """Append a run's events to a file; a restarted run appends to the same file.

    ::

        trainer = Trainer(strategy=HeteroStrategy(), callbacks=[RunLog("events.jsonl")])
        trainer.fit(model, datamodule)
        recovered = [entry for entry in read_log("events.jsonl") if entry["event"] == "recovered"]

    Rank 0 writes, and any rank that fails. If rank 0 may be on another node after a restart, give a
    path that all nodes reach, or merge the nodes' files by time. Under another strategy than
    `HeteroStrategy` the log has no plans and only rank 0's node.

    Args:
        path: The file; a relative path is in the Trainer's `default_root_dir`.
        node: Name for this machine; None takes its host name.
    """

    def __init__(self, path: str | Path = "events.jsonl", *, node: str | None = None) -> None:
        self.path = Path(path)
        self.node = node or socket.gethostname()
        self.nodes: tuple[str, ...] = ()
        """Name of each rank's machine, from the start of training."""
        self._plan: ParallelPlan | None = None
        self._plans: list[ParallelPlan] = []
        self._num_changes = 0
        self._stepped_at_s = time.monotonic()
        self._last_step = 0
        self._changed: dict[str, Any] | None = None
        """The `generation` event to write after the next step; None if ranks haven't changed."""

    def write(self, trainer: pl.Trainer, event: str, **fields: Any) -> None:
        """Append an event, on any rank."""
        append_event(self.file(trainer), event, **{"step": trainer.global_step, **fields})

    def file(self, trainer: pl.Trainer) -> Path:
        """Return the path of the log of a Trainer's run."""
        return Path(trainer.default_root_dir) / self.path

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        Run.join(logs_of(trainer), self)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._plan, self._plans, self._num_changes = None, [], 0
        self.nodes = (self.node,)
        if isinstance(trainer.strategy, HeteroStrategy):
            self._plans += trainer.strategy.candidate_plans
            self.nodes = tuple(run_of(trainer).comms.gather_objects(self.node))
        note(trainer, "started", nodes=self.nodes, plans=[plan.to_dict() for plan in self._plans])

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note_generation(trainer)
        strategy = trainer.strategy
        if isinstance(strategy, HeteroStrategy) and strategy.plan != self._plan:
            self._plan = strategy.plan
            self._num_changes += 1
            if self._num_changes <= _MOST_CHANGES:
                note(trainer, "plan", **self._numbered(strategy.plan))

    def on_generation(self, trainer: pl.Trainer, old: "Generation", new: "Generation") -> None:
        """Remember the ranks that were lost or have joined until the cost is known."""
        before = self._changed or {"lost": [], "joined": []}
        self._changed = {
            "lost": [*before["lost"], *(old.members[rank].number for rank in old.without(new))],
            "joined": [*before["joined"], *new.joiners_since(old)],
            "generation": new.number,
            "ranks": new.world_size,
        }

    def _note_generation(self, trainer: pl.Trainer) -> None:
        """After a generation's first step, log what the change of ranks has cost."""
        now_s, step = time.monotonic(), trainer.global_step
        if self._changed is not None:
            again = max(0, self._last_step + 1 - step)
            note(
                trainer,
                "generation",
                **self._changed,
                idle_s=now_s - self._stepped_at_s,
                steps_again=again,
            )
            self._changed = None
        self._stepped_at_s, self._last_step = now_s, step

    def _numbered(self, plan: "ParallelPlan") -> dict[str, Any]:
        if plan in self._plans:
            return {"number": self._plans.index(plan)}
        self._plans.append(plan)
        return {"number": len(self._plans) - 1, "plan": plan.to_dict()}

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            note(trainer, "validated", metrics=trainer.callback_metrics)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        note(trainer, "ended")

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if not isinstance(exception, AgreedExit):
            error = f"{type(exception).__name__}: {exception}"
            self.write(trainer, "failed", node=self.node, error=error)


def read_log(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the events that a log has so far, oldest first.

    Lines that a crash has left incomplete are skipped, with a warning. ::

        steps = [e["step"] for e in read_log("events.jsonl") if e["event"] == "recovered"]

    Args:
        path: The log, which a run may still be writing.

    Raises:
        OSError: The file can't be read.
    """
    for _, entry in read_entries(path):
        if isinstance(entry, dict):
            yield entry
