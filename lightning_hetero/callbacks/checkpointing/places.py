"""The places where a node keeps its checkpoints, and a note there of the last finished step.

`join` opens them on all ranks of a job, or fails on all of them.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_hetero.checkpoint import (
    LocalStore,
    Peers,
    RetryPolicy,
    Tier,
    TierKind,
    open_store,
)
from lightning_hetero.checkpoint.peers.deadlines import Operations
from lightning_hetero.checkpoint.places.claims import Lease
from lightning_hetero.checkpoint.places.retry import local_folder, probe_store
from lightning_hetero.checkpoint.places.shared_memory import (
    has_shared_memory,
    make_own_folder,
    memory_places,
    own_folder,
)
from lightning_hetero.checkpoint.places.tiers import checkpoints_in
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.core.process import Progress, machine_id, write_whole

__all__ = ["FinishedStep", "Joined", "Places", "join", "probe", "release"]

_log = logging.getLogger(__name__)
_KEPT_IN_MEMORY_S = 7 * 24 * 3600.0
"""How long after its last step a failed run's data stay in shared memory."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
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
    """For fsspec's filesystem."""
    retry: RetryPolicy | None
    stall_s: float = 300.0
    """Seconds after which an operation that hangs in a local place is given up."""
    _noting: Operations = field(
        default_factory=lambda: Operations(1.0, max_hanging=1),
        repr=False,
        compare=False,
    )

    def __post_init__(self) -> None:
        if self.path_or_url is None and self.local_dir is None:
            raise ConfigurationError(
                "A checkpoint needs a place that outlives the process and the machine's memory. "
                "Give a path or URL that all nodes reach, or local_dir, or both."
            )

    def identify_node(self) -> tuple[str, str]:
        """Return a name for this node and one for its disk; may write files that identify them.

        Processes that share the shared memory and the local folder get the same names; two machines
        never do, even with the same host name.
        """
        host = socket.gethostname()
        memory = _random_name(make_own_folder()) if self.memory_dir is not None else ""
        disk = "" if self.local_dir is None else _random_name(Path(self.local_dir))
        text = f"{machine_id()} {memory} {disk or self.local_dir}"
        return f"{host}-{hashlib.sha256(text.encode()).hexdigest()[:8]}", disk

    @property
    def memory_dir(self) -> Path | None:
        """Folder in shared memory, of its own for each user and set of places; None without one."""
        if not self.shared_memory or not has_shared_memory():
            return None
        endpoint = self.storage_options.get("endpoint_url")
        places = [
            item and str(local_folder(item) or item) for item in (self.path_or_url, self.local_dir)
        ]
        digest = hashlib.sha256(repr((places, endpoint)).encode()).hexdigest()[:16]
        return own_folder() / digest

    def tiers(self) -> list[Tier]:
        """Return the tiers, fastest first.

        Raises:
            ConfigurationError: Another user has made this user's folder in shared memory.
        """
        tiers = []
        if self.memory_dir is not None:
            make_own_folder()
            self.memory_dir.mkdir(mode=0o700, exist_ok=True)
            store = LocalStore(self.memory_dir, private=True, stall_s=self.stall_s)
            tiers.append(Tier(kind=TierKind.MEMORY, store=store, keep=1))
        if self.local_dir is not None:
            disk = LocalStore(self.local_dir, stall_s=self.stall_s)
            tiers.append(Tier(kind=TierKind.DISK, store=disk, keep=self.keep))
        if self.path_or_url is not None:
            remote = open_store(self.path_or_url, retry=self.retry, **self.storage_options)
            tiers.append(Tier(kind=TierKind.REMOTE, store=remote, keep=self.keep))
        return tiers

    def note(self, finished: FinishedStep) -> None:
        """Remember a finished step beside the node's checkpoints; costs about 0.1 ms."""
        path = self._progress_path
        if path is not None:
            text = json.dumps([finished.step, finished.at_s, finished.run])

            def write(_: Progress) -> None:
                # Replaced whole: if this process is killed now, the step before stays known.
                write_whole(path, lambda new: new.write_text(text))

            # Only a log message depends on it: a place that is full or hangs mustn't stop training.
            with contextlib.suppress(OSError):
                if self._noted_in_memory is None:
                    self._noting.run(write)
                else:
                    write(Progress())  # Memory never hangs, so no thread of its own is needed.

    def last_finished(self) -> FinishedStep | None:
        """Return the step that an earlier process noted last; None if there is nothing readable."""
        if self._progress_path is None:
            return None
        try:
            step, at_s, run = json.loads(self._progress_path.read_text())
            return FinishedStep(step=int(step), at_s=float(at_s), run=str(run))
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            return None

    def forget_other_runs(self, run: str) -> None:
        """Free the shared memory that other runs have left here: their lasting places are gone."""
        if self.memory_dir is not None:
            store = LocalStore(self.memory_dir, stall_s=self.stall_s)
            files = store.list()
            others = {item.folder for item in checkpoints_in(files) if item.run != run}
            store.remove([name for name in files if name.partition("/")[0] in others])

    def forget_old_memory(self) -> None:
        """Free the shared memory of this user's runs that have written nothing for a week.

        Runs that still train note every step there, so they aren't affected.
        """
        own = self.memory_dir
        for place in () if own is None else memory_places():
            age_s = time.time() - place.last_write_s
            if place.folder != own and age_s > _KEPT_IN_MEMORY_S:
                _log.warning(
                    "Freeing %.1f MB of shared memory in %s, which a run left %.0f days ago.",
                    place.num_bytes / 1e6,
                    place.folder,
                    age_s / 86400,
                )
                shutil.rmtree(place.folder, ignore_errors=True)

    def forget_memory(self) -> None:
        """Free this run's shared memory: it has ended, and other places have all checkpoints."""
        if self.memory_dir is not None:
            shutil.rmtree(self.memory_dir, ignore_errors=True)

    @cached_property
    def _noted_in_memory(self) -> Path | None:
        """`memory_dir` at the first note; cached, since finding it takes longer than a note."""
        return self.memory_dir

    @property
    def _progress_path(self) -> Path | None:
        folder = self._noted_in_memory or (None if self.local_dir is None else Path(self.local_dir))
        return None if folder is None else folder / "progress.json"


def _random_name(folder: Path) -> str:
    """Return the random name in a folder's file, which the first process to ask writes.

    Returns:
        The name; "" if the folder can't be written, which the first save will report.
    """
    path, temporary = folder / "node", folder / f".tmp-{uuid.uuid4().hex}"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(uuid.uuid4().hex)
            # Unlike a rename it fails if another process was first.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
            temporary.unlink()
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """One rank's view of the places."""

    tiers: list[Tier]
    node: str
    """Name of this node."""
    node_of_rank: tuple[str, ...]
    leases: tuple[Lease, ...]
    """The copies that this rank holds for all; to be released in the end."""


def join(places: Places, peers: Peers, *, is_first_of_node: bool, tidies: bool = True) -> Joined:
    """Open the places, tell the nodes apart and take the leases; every rank calls it. Communicates.

    Args:
        places: This node's.
        peers: All ranks.
        is_first_of_node: Whether this rank looks after its node's places.
        tidies: Whether to remove old leftovers: once per start, since there may be many.

    Raises:
        CheckpointError: A place can't be used, another job uses it, or machines share a
            `local_dir`; all ranks raise it.
    """
    leases: list[Lease] = []

    def enter(progress: Progress) -> tuple[list[Tier], str, str]:
        if is_first_of_node and tidies:
            places.forget_old_memory()
        tiers = places.tiers()
        node, disk = places.identify_node()
        for tier in tiers:
            is_own = tier.is_looked_after_by(peers.global_rank, is_first_of_node=is_first_of_node)
            if is_own and tier.kind is not TierKind.MEMORY:
                progress.refuse_if_late()
                leases.append(Lease(tier.store, shared=tier.kind is TierKind.REMOTE))
                leases[-1].take()
        return tiers, node, disk

    with contextlib.ExitStack() as undo:
        undo.callback(lambda: release(leases))
        # Ranks wait for one that checks whether a lease's owner lives, or waits for a slow place.
        entering, answers = peers.do(enter, lambda found: {"names": found[1:]})
        _refuse_shared_disks([(node, disk) for node, disk in (a["names"] for a in answers)])
        undo.pop_all()
    tiers, node, _ = entering.result()
    names = tuple(answer["names"][0] for answer in answers)
    return Joined(tiers=tiers, node=node, node_of_rank=names, leases=tuple(leases))


def release(leases: Iterable[Lease]) -> None:
    """Release leases, so that others may write to the places."""
    for lease in leases:
        lease.release()


def probe(places: Places, peers: Peers, *, is_first_of_node: bool) -> None:
    """Check that the remote store, if there is one, takes checkpoints; every rank calls it.

    Communicates. A store that doesn't answer is waited for if this run has used it before.

    Raises:
        CheckpointError: It takes none; all ranks raise it.
    """

    def ask(_: Progress) -> None:
        if places.path_or_url is not None and is_first_of_node:
            has_served = places.last_finished() is not None
            probe_store(places.path_or_url, has_served=has_served, **places.storage_options)

    peers.do(ask)


def _refuse_shared_disks(nodes: list[tuple[str, str]]) -> None:
    nodes_of_disk: dict[str, set[str]] = defaultdict(set)
    for node, disk in nodes:
        if disk:
            nodes_of_disk[disk].add(node)
    for sharing in nodes_of_disk.values():
        if len(sharing) > 1:
            raise CheckpointError(
                f"Nodes {sorted(sharing)} share their local_dir, so a copy in it would be lost "
                "with them all. Give each a folder on its own disk; what all nodes reach is "
                "path_or_url."
            )
