"""Where a node keeps its checkpoints, and how far training had come when it was interrupted."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hetero.checkpoint import LocalStore, RetryPolicy, Tier, TierKind, open_store
from lightning_hetero.checkpoint.retry import local_folder
from lightning_hetero.core.errors import ConfigurationError

__all__ = ["FinishedStep", "Places"]

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """The last step that finished."""

    step: int
    """Optimizer steps taken."""
    at_s: float
    """When, in seconds since the epoch."""


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

    def __post_init__(self) -> None:
        if self.path_or_url is None and self.local_dir is None:
            raise ConfigurationError(
                "A checkpoint needs a place that outlives the process and the machine's memory. "
                "Give a path or URL that all nodes reach, or local_dir, or both."
            )

    @property
    def node(self) -> str:
        """Name of this node: the same for processes that share the local folder."""
        return f"{socket.gethostname()}:{self.local_dir or ''}"

    @property
    def memory_dir(self) -> Path | None:
        """Folder in shared memory, None if there is none; another one for other places or users."""
        if not self.shared_memory or not _SHARED_MEMORY.is_dir():
            return None
        endpoint = self.storage_options.get("endpoint_url")
        places = [
            item and str(local_folder(item) or item) for item in (self.path_or_url, self.local_dir)
        ]
        digest = hashlib.sha256(repr((places, endpoint)).encode()).hexdigest()[:16]
        return _SHARED_MEMORY / f"lightning_hetero-{os.getuid()}" / digest

    @property
    def is_new(self) -> bool:
        """Whether no run has begun in the local folder, or somebody has deleted it since."""
        folder = self._lasting_folder
        return folder is not None and not folder.exists()

    def begin_anew(self) -> None:
        """Forget what an earlier run left in shared memory, and make the local folder."""
        assert self._lasting_folder is not None
        self.forget_memory()
        # Where nothing can be written, the first save says so.
        with contextlib.suppress(OSError):
            self._lasting_folder.mkdir(parents=True, exist_ok=True)

    def tiers(self) -> list[Tier]:
        """Return the tiers, fastest first."""
        tiers = []
        if self.memory_dir is not None:
            store = LocalStore(self.memory_dir)
            tiers.append(Tier(kind=TierKind.MEMORY, store=store, keep=1))
        if self.local_dir is not None:
            disk = LocalStore(self.local_dir)
            tiers.append(Tier(kind=TierKind.DISK, store=disk, keep=self.keep))
        if self.path_or_url is not None:
            remote = open_store(self.path_or_url, retry=self.retry, **self.storage_options)
            tiers.append(Tier(kind=TierKind.REMOTE, store=remote, keep=self.keep))
        return tiers

    def note(self, finished: FinishedStep) -> None:
        """Remember a finished step beside the node's checkpoints; costs microseconds."""
        path = self._progress_path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([finished.step, finished.at_s]))

    def last_finished(self) -> FinishedStep | None:
        """Return what an earlier process noted last, None if nothing readable."""
        if self._progress_path is None:
            return None
        try:
            step, at_s = json.loads(self._progress_path.read_text())
        except (OSError, ValueError):
            return None
        return FinishedStep(step=step, at_s=at_s)

    def forget_memory(self) -> None:
        """Free the shared memory: the run has ended, and the other places have all."""
        if self.memory_dir is not None:
            shutil.rmtree(self.memory_dir, ignore_errors=True)

    @property
    def _lasting_folder(self) -> Path | None:
        """The folder on a disk that is nearest to this node, None if all lasts elsewhere."""
        place = self.local_dir or self.path_or_url
        return None if place is None else local_folder(place)

    @property
    def _progress_path(self) -> Path | None:
        folder = self.memory_dir or (None if self.local_dir is None else Path(self.local_dir))
        return None if folder is None else folder / "progress.json"
