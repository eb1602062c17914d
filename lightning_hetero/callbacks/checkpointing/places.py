"""The places where a node keeps its checkpoints, who may write there, and what was found in them.

A *lease* of a place is a file there that keeps other jobs from writing to it. Ranks take the leases
of their places before they recover or save.

Shared memory holds the newest checkpoint, for the run's own restart, and is freed when the run
ends. If a run fails and never restarts, what it left there is freed by this user's next run, once
it is a week old.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetero.checkpoint import (
    LocalStore,
    Peers,
    Recovered,
    Source,
    Tier,
    TierKind,
    open_store,
)
from lightning_hetero.checkpoint.claims import Lease
from lightning_hetero.checkpoint.serving import own_host
from lightning_hetero.checkpoint.store import check_store, local_folder
from lightning_hetero.checkpoint.tiers import checkpoints_in
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.process import Progress, machine_namespace, write_whole
from lightning_hetero.strategy.run import note, run_of

_log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has its shared memory."""
_KEPT_IN_MEMORY_S = 7 * 24 * 3600.0


class FinishedStep(NamedTuple):
    """The last step that finished."""

    step: int
    """Optimizer steps taken."""
    at_s: float
    """When, in seconds since the epoch."""
    run: str
    """Identity of the run."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The tiers of one node.

    Raises:
        ConfigurationError: There is no place that outlives the machine's memory.
    """

    path_or_url: str | None
    """A folder or URL that all nodes reach."""
    local_dir: str | None
    """A folder on this node's own disk."""
    shared_memory: bool
    """Whether to keep the newest checkpoint in shared memory, too."""
    keep: int
    """Complete checkpoints to keep on disk and in the remote store."""
    storage_options: Mapping[str, Any]
    """Options for fsspec's filesystem."""
    stall_s: float = 300.0
    """Seconds after which a hanging operation is given up."""

    def __post_init__(self) -> None:
        if self.path_or_url is None and self.local_dir is None:
            raise ConfigurationError(
                "A checkpoint needs a place that outlives the process and the machine's memory. "
                "Give a path or URL that all nodes reach, or local_dir, or both."
            )

    @property
    def node(self) -> str:
        """Name of this node: the same in processes that share its memory and local folder."""
        text = f"{machine_namespace()} {self.local_dir}"
        return f"{socket.gethostname()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def memory_dir(self) -> Path | None:
        """Folder in shared memory, separate for each user and set of places; None without one."""
        if not self.shared_memory or not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            return None
        endpoint = self.storage_options.get("endpoint_url")
        places = [
            item and str(local_folder(item) or item) for item in (self.path_or_url, self.local_dir)
        ]
        digest = hashlib.sha256(repr((places, endpoint)).encode()).hexdigest()[:16]
        return _own_folder() / digest

    def tiers(self) -> list[Tier]:
        """Return the tiers, fastest first.

        Raises:
            ConfigurationError: Another user has made this user's folder in shared memory.
        """
        tiers = []
        memory = self.memory_dir
        if memory is not None:
            _make_own_folder()
            memory.mkdir(mode=0o700, exist_ok=True)
            store = LocalStore(memory, stall_s=self.stall_s)
            tiers.append(Tier(kind=TierKind.MEMORY, store=store, keep=1))
        if self.local_dir is not None:
            disk = LocalStore(self.local_dir, stall_s=self.stall_s)
            tiers.append(Tier(kind=TierKind.DISK, store=disk, keep=self.keep))
        if self.path_or_url is not None:
            remote = open_store(self.path_or_url, stall_s=self.stall_s, **self.storage_options)
            tiers.append(Tier(kind=TierKind.REMOTE, store=remote, keep=self.keep))
        return tiers

    def note(self, finished: FinishedStep) -> None:
        """Record a finished step in shared memory; takes about 0.1 ms."""
        memory = self.memory_dir
        if memory is not None:
            text = json.dumps(finished)
            # Only a log message depends on it, so full memory mustn't stop training. Written as a
            # new file: if this process is killed meanwhile, the previous step stays readable.
            with contextlib.suppress(OSError):
                write_whole(memory / "progress.json", lambda new: new.write_text(text))

    def last_finished(self) -> FinishedStep | None:
        """Return the step that an earlier process noted last; None if there is nothing readable."""
        memory = self.memory_dir
        if memory is None:
            return None
        try:
            return FinishedStep(*json.loads((memory / "progress.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def forget_other_runs(self, run: str) -> None:
        """Free the shared memory that other runs have left here: their lasting places are gone."""
        if self.memory_dir is not None:
            store = LocalStore(self.memory_dir, stall_s=self.stall_s)
            files = store.list()
            others = {item.folder for item in checkpoints_in(files) if item.run != run}
            store.remove([name for name in files if name.partition("/")[0] in others])

    def forget_memory(self) -> None:
        """Free this run's shared memory: it has ended, and other places have all checkpoints."""
        if self.memory_dir is not None:
            shutil.rmtree(self.memory_dir, ignore_errors=True)


def free_memory(older_than_s: float = _KEPT_IN_MEMORY_S, spared: Path | None = None) -> list[Path]:
    """Free the shared memory of this user's runs that have written nothing for that long.

    Runs that are training record every step there, so they aren't affected.

    Args:
        older_than_s: Seconds since the last write.
        spared: A folder that stays in any case.

    Returns:
        The folders that were freed.
    """
    root, freed = _own_folder(), []
    if root.is_dir() and not root.is_symlink():
        for folder in root.iterdir():
            with contextlib.suppress(OSError):
                last_s = max(item.lstat().st_mtime for item in (folder, *folder.iterdir()))
                if time.time() - last_s > older_than_s and folder != spared:
                    shutil.rmtree(folder, ignore_errors=True)
                    freed.append(folder)
    return freed


def _own_folder() -> Path:
    return SHARED_MEMORY / f"lightning_hetero-{os.getuid()}"


def _make_own_folder() -> None:
    """Make this user's folder in shared memory, which no other user can read or replace.

    Raises:
        ConfigurationError: Another user has made it.
    """
    folder = _own_folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigurationError(
            f"{folder} isn't a folder of this user (its owner has the id {status.st_uid}), so what "
            "is in it can't be trusted. Have it deleted, or give LayerwiseCheckpoint "
            "shared_memory=False."
        )
    folder.chmod(0o700)


def take_leases(
    places: Places, peers: Peers, *, is_first_of_node: bool, tidies: bool = True
) -> tuple[list[Tier], list[Lease]]:
    """Take the leases of the places that this rank maintains; return the node's tiers, and those.

    Every rank calls it. Communicates.

    Args:
        places: This node's places.
        peers: All ranks.
        is_first_of_node: Whether this rank maintains its node's places for all ranks of the node.
        tidies: Whether to remove files of earlier runs; once per start, as it may take long.

    Raises:
        CheckpointError: A place can't be used, or another job uses it; all ranks raise it.
    """
    leases: list[Lease] = []

    def take(progress: Progress) -> list[Tier]:
        own_memory = places.memory_dir
        if is_first_of_node and tidies and own_memory is not None:
            for folder in free_memory(spared=own_memory):
                _log.warning("Freed shared memory in %s, which an old run had left.", folder)
        tiers = places.tiers()
        for tier in tiers:
            is_own = tier.is_maintained_by(peers.global_rank, is_first_of_node=is_first_of_node)
            if is_own and tier.kind is not TierKind.MEMORY:
                progress.refuse_if_late()
                leases.append(Lease(tier.store, shared=tier.kind is TierKind.REMOTE))
                leases[-1].take()
        return tiers

    # Other ranks wait while one checks whether the owner of a lease is alive, or while storage is
    # slow.
    try:
        taking, _ = peers.do(take)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return taking.result(), leases


def probe(places: Places, peers: Peers, *, is_first_of_node: bool) -> None:
    """Check that the remote store, if there is one, accepts checkpoints; every rank calls it.

    Communicates.

    Raises:
        CheckpointError: It doesn't; all ranks raise it.
    """

    def ask(_: Progress) -> None:
        if places.path_or_url is not None and is_first_of_node:
            check_store(places.path_or_url, writes=True, **places.storage_options)

    peers.do(ask)


def peers_of(trainer: pl.Trainer, timeout_s: float) -> Peers:
    """Return the ranks of this fit; after losses this rank may be the only one."""
    if trainer.world_size == 1:
        return Peers(timeout_s=timeout_s)
    processes = run_of(trainer).strategy.processes
    store, host = processes.open_store("checkpoints")
    return Peers(
        store,
        global_rank=trainer.global_rank,
        world_size=trainer.world_size,
        timeout_s=timeout_s,
        is_over=processes.comms.is_aborted,
        host=own_host(host),
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """The state from which a fit continues."""

    recovered: Recovered
    is_live: bool
    """Whether it comes from the ranks' memory, not from a checkpoint."""
    why_not_live: str | None
    """Why ranks couldn't continue from memory after one was lost; None if none was lost."""


def report_recovery(
    trainer: pl.Trainer, found: Found, places: Places, peers: Peers, phases: Mapping[str, float]
) -> None:
    """Print and log a recovery on rank 0, once the state is loaded; collective.

    Args:
        trainer: The trainer.
        found: The state.
        places: This node's.
        peers: All ranks.
        phases: When each phase of this start began, in seconds since the epoch; in order.
    """
    recovered, begins = found.recovered, [*phases.values(), time.time()]
    spans = zip(phases, pairwise(begins), strict=True)
    seconds = {name: end - begin for name, (begin, end) in spans}
    own = [[int(source), count] for source, count in recovered.bytes_by_source.items()]
    rows = peers.gather({"bytes": own, "finished": places.last_finished()})
    sources: Counter[Source] = Counter()
    for row in rows:
        sources.update({Source(source): count for source, count in row["bytes"]})
    # What the remaining nodes have recorded.
    known = [FinishedStep(*row["finished"]) for row in rows if row["finished"] is not None]
    ours = [item for item in known if item.run == recovered.id.run]
    finished = max(ours, key=lambda item: item.at_s, default=None)
    lost, lost_steps = "", None
    if finished is not None:
        # At least 0: the rank that records steps may have been lost before it recorded its last
        # one.
        lost_steps = max(0, finished.step - recovered.id.step)
        seconds = {"restart": begins[0] - finished.at_s, **seconds}
        lost = f" {lost_steps} steps lost;"
    took = ", ".join(f"{value:.2f} s to {name}" for name, value in seconds.items())
    rank_zero_info(
        f"LayerwiseCheckpoint: {replace(recovered, bytes_by_source=sources)};{lost} "
        f"{took}; {trainer.world_size} ranks, {recovered.world_size} had saved it."
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
