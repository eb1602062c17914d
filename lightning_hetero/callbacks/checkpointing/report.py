"""Say where a recovered state was found, what was lost, and how long each part of a start took."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetero.callbacks.checkpointing.places import FinishedStep, Places
from lightning_hetero.callbacks.run import note
from lightning_hetero.checkpoint import Recovered, Source, Transport

__all__ = ["StartTimes", "last_finished", "report_recovery"]


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """When a start of a run had come how far, in seconds since the epoch."""

    made_s: float
    """The callback was made."""
    set_up_s: float
    """The processes had met."""
    planned_s: float
    """There was a plan, and the module had slices."""
    fetched_s: float
    """The state had been read."""


def last_finished(places: Places, transport: Transport, *, run: str) -> FinishedStep | None:
    """Return how far any node that is left saw a run's training come; collective."""
    own = places.last_finished()
    text = "" if own is None else json.dumps([own.step, own.at_s, own.run])
    found = [json.loads(data) for data in transport.all_gather(text.encode()) if data]
    known = [FinishedStep(step=step, at_s=at_s, run=name) for step, at_s, name in found]
    return max((item for item in known if item.run == run), key=lambda i: i.at_s, default=None)


def report_recovery(
    trainer: pl.Trainer,
    recovered: Recovered,
    finished: FinishedStep | None,
    times: StartTimes,
    transport: Transport,
    node_of_rank: Sequence[str],
) -> None:
    """Print and note it on rank 0, once the state is loaded; collective."""
    seconds = {
        "meet": times.set_up_s - times.made_s,
        "plan and set up": times.planned_s - times.set_up_s,
        "fetch": times.fetched_s - times.planned_s,
        "load": time.time() - times.fetched_s,
    }
    found: Counter[Source] = Counter()
    own = [[int(source), count] for source, count in recovered.report.bytes_by_source.items()]
    for data in transport.all_gather(json.dumps(own).encode()):
        found.update({Source(source): count for source, count in json.loads(data)})
    lost, lost_steps = "", None
    if finished is not None:
        lost_steps = finished.step - recovered.id.step
        seconds["restart"] = times.made_s - finished.at_s
        lost = f" {lost_steps} steps lost, {seconds['restart']:.2f} s to restart,"
    rank_zero_info(
        f"LayerwiseCheckpoint: {replace(recovered.report, bytes_by_source=found)}, load "
        f"{seconds['load']:.2f} s;{lost} {seconds['meet']:.2f} s to meet, "
        f"{seconds['plan and set up']:.2f} s to plan and set up; {trainer.world_size} ranks "
        f"on {len(set(node_of_rank))} nodes, {recovered.world_size} had saved it."
    )
    note(
        trainer,
        "recovered",
        bytes_by_source={source.name.lower(): count for source, count in found.items()},
        seconds=seconds,
        lost_steps=lost_steps,
        world_size=trainer.world_size,
        saved_by=recovered.world_size,
    )
