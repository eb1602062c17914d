"""Mark to which run a place's checkpoints belong, and which single live job may write there.

A run's identity is made once, and stored beside the checkpoints and in each of them. Places that
outlast a machine decide which run is continued; checkpoints of other runs, such as what an earlier
run has left in shared memory, are ignored.

The job that writes holds a *lease*: a file in that place. If other machines can write to the place,
too, the job rewrites the file regularly. A job that finds another job's lease must find out whether
that job is alive. It knows at once if the other job ran on this machine, or was an earlier start of
the same torchrun job. Otherwise it watches whether the file changes; it never compares the clocks
of two machines.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import (
    is_loopback,
    machine_id,
    machine_namespace,
    membership_name,
)

_log = logging.getLogger(__name__)

RUN_FILE = "run.json"
"""File at the top of every lasting place that names its run."""


def new_run() -> str:
    """Return a new identity; later ones sort after earlier ones."""
    return f"{datetime.now(UTC):%Y%m%dt%H%M%S%f}-{uuid.uuid4().hex[:8]}"


def read_run(store: Store) -> str:
    """Return the run that a place belongs to; the store's own error if it can't be read.

    Raises:
        CheckpointError: The file exists but is incomplete.
    """
    data = store.read(RUN_FILE)
    try:
        run = str(json.loads(data)["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{store}/{RUN_FILE} is torn: {error!r}. Delete it.") from error
    if CheckpointId.parse(CheckpointId(0, 0, run).folder) is None:
        raise CheckpointError(
            f"{store}/{RUN_FILE} is torn: {run!r} isn't a run's identity. Delete it."
        )
    return run


def mark_places(tiers: Sequence[Tier], run: str) -> None:
    """Write into lasting places which run they belong to from now on.

    Raises:
        CheckpointError: The shared place, which decides which run goes on, can't be written. If a
            local disk can't be written, that is only logged.
    """
    for tier in tiers:
        if tier.kind is TierKind.MEMORY:
            continue
        try:
            with contextlib.suppress(FileNotFoundError):
                if read_run(tier.store) == run:
                    continue
            tier.store.write(RUN_FILE, [json.dumps({"run": run}).encode()])
        except Exception as error:
            # Stores raise their client library's own types.
            text = f"Couldn't write {RUN_FILE} to {tier}: {error}"
            if tier.kind is TierKind.REMOTE:
                raise CheckpointError(text) from error
            _log.warning("%s", text)


OWNER_FILE = "owner.json"
"""File at the top of a place that names the job that writes there."""
_BEATS_TO_WAIT = 3
_NO_JOB = {"", "none"}
"""torchrun's run ids if none was given: they don't identify a job."""


class OccupiedError(CheckpointError):
    """Another live job writes to a place."""


class Lease:
    """One job's right to write to one place.

    Args:
        store: The place.
        shared: Whether other machines reach it.
        beat_s: Seconds between two rewrites of the file.
    """

    def __init__(self, store: Store, *, shared: bool, beat_s: float = 10.0) -> None:
        self._store = store
        self._shared = shared
        self._beat_s = beat_s
        self._session = uuid.uuid4().hex
        self._beats = 0
        self._taken_over_by: dict[str, Any] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="checkpoint-lease", daemon=True)

    def take(self) -> None:
        """Take the lease.

        If it is unclear whether the job that holds it is alive, wait until it is clear.

        Raises:
            OccupiedError: Another live job writes here.
        """
        try:
            self._wait_for_end_of(self._read())
            if not self._ended.is_set():
                self._write()
        except OccupiedError:
            raise
        except Exception as error:
            # Stores raise their client library's own types. If the place is broken, the first
            # save to it fails with a better message.
            _log.warning("Can't see whether another job writes to %s: %r", self._store, error)
        if self._ended.is_set():
            self._remove()  # Released meanwhile, since another rank was lost.
        elif self._shared:
            self._thread.start()

    def _wait_for_end_of(self, owner: dict[str, Any] | None) -> None:
        """Return once the job that holds the lease is known to be gone."""
        if owner is None or self._is_gone(owner):
            return
        if not self._shared:
            raise OccupiedError(self._describe(owner))
        wait_s = _BEATS_TO_WAIT * self._beat_s
        _log.warning("%s Watching for %.0f s whether it is alive.", self._describe(owner), wait_s)
        for _ in range(2 * _BEATS_TO_WAIT):
            self._ended.wait(self._beat_s / 2)
            found = self._read()
            if found is None:
                return
            if found != owner:
                raise OccupiedError(self._describe(found))

    def raise_if_lost(self) -> None:
        """Raise OccupiedError if another job has taken the lease over."""
        if self._taken_over_by is not None:
            raise OccupiedError(self._describe(self._taken_over_by))

    def release(self, *, goes_on: bool = False) -> None:
        """Release the lease, so that others may write; give up soon if storage doesn't answer.

        If the run `goes_on`, the file stays: its next generation takes over the lease.
        """
        self._ended.set()
        if self._taken_over_by is None and not goes_on:
            remover = threading.Thread(target=self._remove, daemon=True)
            remover.start()
            remover.join(2.0)

    def _live(self) -> None:
        while not self._ended.wait(self._beat_s):
            # If the place doesn't answer, the next save reports it.
            with contextlib.suppress(Exception):
                found = self._read()
                is_own = found is None or found.get("session") == self._session
                if found is not None and not is_own and not _is_of_own_run(found):
                    self._taken_over_by = found
                    return
                if not self._ended.is_set():
                    self._write()

    def _read(self) -> dict[str, Any] | None:
        """Return the job that holds the lease.

        None if there is none, or its file can't be parsed.
        """
        try:
            found = json.loads(self._store.read(OWNER_FILE))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self) -> None:
        self._beats += 1
        owner = {
            "session": self._session,
            "job": _job(),
            "membership": membership_name(),
            "host": socket.gethostname(),
            "machine": machine_namespace(),
            "process": _process(os.getpid()),
            "beats": self._beats,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._store.write(OWNER_FILE, [json.dumps(owner).encode()])

    def _remove(self) -> None:
        with contextlib.suppress(Exception):
            found = self._read()
            if found is not None and found.get("session") == self._session:
                self._store.remove([OWNER_FILE])

    def _is_gone(self, owner: dict[str, Any]) -> bool:
        process = owner.get("process")
        if _job() is not None and owner.get("job") == _job():
            # torchrun has ended all processes of a start before it begins the next one.
            return True
        if _is_of_own_run(owner):
            return True
        if owner.get("machine") != machine_namespace():
            # No other machine can write to a disk of this machine, so the owner ran here, before
            # the machine was restarted.
            return not self._shared
        own = _process(os.getpid())
        return process == own or not (isinstance(process, list) and _process(process[0]) == process)

    def _describe(self, owner: dict[str, Any]) -> str:
        process = (owner.get("process") or ["?"])[0]
        return (
            f"Another job writes its checkpoints to {self._store}: process {process} on "
            f"{owner.get('host')}, last seen {owner.get('at')} (its clock). End it, or give this "
            f"job another folder."
        )


def _is_of_own_run(owner: dict[str, Any]) -> bool:
    """Whether a lease is held by this run, by this generation of its ranks or an earlier one.

    It may be a lost rank that still runs: by itself it can't complete a checkpoint.
    """
    return membership_name() is not None and owner.get("membership") == membership_name()


def _job() -> list[str] | None:
    """Return what identifies this torchrun job, also over restarts; None without torchrun.

    Two jobs may have the same name (`--rdzv-id`), so the name counts only together with the address
    of the store that agents connect to, and with this machine if that address is a local one.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if job in _NO_JOB or not host:
        return None
    return [job, host, port, machine_id() if is_loopback(host) else ""]


def _process(pid: int) -> list[int] | None:
    """Return a living process's id and when it was started; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else [pid, int(fields[19])]
