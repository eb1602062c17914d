"""Say where a recovered state was found, what was lost, and how long each part of a start took."""

import time
from collections import Counter
from dataclasses import dataclass, replace

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetero.callbacks.checkpointing.places import FinishedStep, Places
from lightning_hetero.callbacks.run import note
from lightning_hetero.checkpoint import Peers, Recovered, Source
from lightning_hetero.core.process import machine_id

__all__ = ["Found", "StartTimes", "report_recovery"]


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """When a start had reached each stage, in seconds since the epoch."""

    made_s: float
    """The callback was made."""
    set_up_s: float
    """The processes had met."""
    planned_s: float
    """There was a plan, and the module had slices."""
    fetched_s: float
    """The state had been read."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The state that a fit goes on from."""

    recovered: Recovered
    times: StartTimes
    is_live: bool
    """Whether it comes from the ranks' memory, not from a checkpoint."""
    why_not_live: str | None
    """Why ranks didn't go on from memory after one was lost; None if none was lost."""
    peers: Peers
    """All ranks."""


def report_recovery(trainer: pl.Trainer, found: Found, places: Places) -> None:
    """Print and log a recovery on rank 0, once the state is loaded; collective."""
    recovered, times = found.recovered, found.times
    seconds = {
        "meet": times.set_up_s - times.made_s,
        "plan and set up": times.planned_s - times.set_up_s,
        "fetch": times.fetched_s - times.planned_s,
        "load": time.time() - times.fetched_s,
    }
    own, noted = recovered.report.bytes_by_source, places.last_finished()
    rows = found.peers.gather(
        {
            "bytes": [[int(source), count] for source, count in own.items()],
            "finished": noted,
            # Identifies the node; names of nodes may not have been agreed on yet.
            "node": f"{machine_id()} {places.local_dir}",
        },
    )
    sources: Counter[Source] = Counter()
    for row in rows:
        sources.update({Source(source): count for source, count in row["bytes"]})
    # What any remaining node has noted.
    known = [FinishedStep(*row["finished"]) for row in rows if row["finished"] is not None]
    ours = [item for item in known if item.run == recovered.id.run]
    finished = max(ours, key=lambda item: item.at_s, default=None)
    lost, lost_steps = "", None
    if finished is not None:
        # Not below 0: the rank that notes steps may have been lost before it noted its last one.
        lost_steps = max(0, finished.step - recovered.id.step)
        seconds["restart"] = times.made_s - finished.at_s
        lost = f" {lost_steps} steps lost, {seconds['restart']:.2f} s to restart,"
    rank_zero_info(
        f"LayerwiseCheckpoint: {replace(recovered.report, bytes_by_source=sources)}, load "
        f"{seconds['load']:.2f} s;{lost} {seconds['meet']:.2f} s to meet, "
        f"{seconds['plan and set up']:.2f} s to plan and set up; {trainer.world_size} ranks "
        f"on {len({row['node'] for row in rows})} nodes, {recovered.world_size} had saved it."
    )
    note(
        trainer,
        "recovered",
        bytes_by_source={source.name.lower(): count for source, count in sources.items()},
        seconds=seconds,
        lost_steps=lost_steps,
        world_size=trainer.world_size,
        saved_by=recovered.world_size,
        is_live=found.is_live,
        why_not_live=found.why_not_live,
    )
