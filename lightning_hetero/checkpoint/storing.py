"""Write one rank's part to the tiers, and measure for how long no lasting tier has taken any.

If one of the node's own tiers fails, the other tiers and ranks go on. What was already written of
the part is deleted, so that a full disk isn't filled with useless files.

After that the part is uploaded to the remote tier, from the fastest own tier that has it. While an
upload runs on any rank, later checkpoints stay local, and only the newest of them is uploaded
afterwards; from everyone's `status` all ranks decide the same. If no own tier accepts a part, it is
written to the remote tier directly.

One failed save doesn't end training, since the next one may succeed. But if neither a disk nor a
store accepts a checkpoint for long, the next fault would lose everything that was trained
meanwhile; so that is an error.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_hetero.checkpoint.content import is_sound
from lightning_hetero.checkpoint.deadlines import BackgroundThread, Followed
from lightning_hetero.checkpoint.encoding import FileBody, encode_part, make_manifest
from lightning_hetero.checkpoint.manifest import (
    WEIGHT,
    CheckpointId,
    PartManifest,
    manifest_name,
)
from lightning_hetero.checkpoint.snapshot import Snapshot
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import (
    Tier,
    TierKind,
    confirm,
    copy_part,
    remove_files,
    write_manifest,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["LastingCopies", "OwnPart", "Uploads", "write_part"]

_log = logging.getLogger(__name__)
_NUM_REMEMBERED = 8


@dataclass(frozen=True)
class OwnPart:
    """The result of `write_part` for this rank's part."""

    bodies: Sequence[FileBody]
    """Its files, readable until the snapshot is released."""
    manifest: PartManifest
    stores: Mapping[TierKind, Store]
    """The stores that have the part, by kind of tier, fastest first; the remote one only if no own
    tier has it."""
    errors: Sequence[str]
    """For each tier that doesn't have the part, the reason."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each of its files, by name in a store."""
        folder = self.manifest.id.folder
        return {f"{folder}/{entry.name}": entry.size_bytes for entry in self.manifest.files}


def write_part(
    snapshot: Snapshot,
    metadata: Mapping[str, bytes],
    own: Sequence[Tier],
    remote: Tier | None,
    progress: Progress,
) -> OwnPart:
    """Write a part to all own tiers that accept it; if none does, to the remote tier.

    Args:
        snapshot: The state.
        metadata: See `encode_part`.
        own: The node's own tiers, fastest first.
        remote: The remote tier, None if there is none.
        progress: Notified of each chunk.

    Raises:
        CheckpointError: The state isn't finite or can't be encoded.
    """
    snapshot.wait()
    _check_finite(snapshot)
    content = snapshot.content
    bodies, slices = encode_part(content, snapshot.tensors, metadata)
    stores: dict[TierKind, Store] = {}
    errors: list[str] = []
    manifest: PartManifest | None = None
    for tier in (*own, remote):
        if tier is None or (stores and tier is remote):
            continue
        try:
            _write_files(tier.store, content.id, bodies, progress)
            manifest = manifest or make_manifest(content, bodies, slices)
            write_manifest(tier.store, manifest)
            stores[tier.kind] = tier.store
        except Exception as error:
            # # Stores raise many kinds of errors, and the next tier may still accept the part.
            text = f"Rank {content.global_rank} couldn't write {content.id} to {tier}: {error}."
            _log.warning("%s", text)
            errors.append(text)
            # After a tier that has hung, the next one gets the full time again.
            progress.tick()
            names = [f"{content.id.folder}/{body.name}" for body in bodies]
            with contextlib.suppress(Exception):
                remove_files(tier.store, [manifest_name(content.id, content.global_rank), *names])
    manifest = manifest or make_manifest(content, bodies, slices)
    return OwnPart(bodies, manifest, stores, errors)


def _write_files(
    store: Store, checkpoint: CheckpointId, bodies: Sequence[FileBody], progress: Progress
) -> None:
    for body in bodies:
        store.write(f"{checkpoint.folder}/{body.name}", Followed(body, progress))


def _check_finite(snapshot: Snapshot) -> None:
    for (index, key), tensor in snapshot.tensors.items():
        item = snapshot.content.slices[index]
        if not is_sound(tensor, is_trained=key == WEIGHT and bool(item.state or item.whole_state)):
            raise CheckpointError(
                f"{item.parameter}'s {key} isn't finite at {snapshot.content.id}, which is "
                "therefore not saved. Find the step that made it so: a loss or a gradient was NaN "
                "or infinite."
            )


class Uploads:
    """One rank's uploads; called by one thread of the writer.

    Args:
        tier: The remote tier, None if there is none.
        thread: The thread that copies.
    """

    def __init__(self, tier: Tier | None, thread: BackgroundThread) -> None:
        self.tier = tier
        self._thread = thread
        self._running: list[CheckpointId] = []
        self._deferred: tuple[OwnPart, Future[bool]] | None = None
        self._done: deque[CheckpointId] = deque(maxlen=_NUM_REMEMBERED)
        self._confirmed: CheckpointId | None = None
        self._error = ""

    def note(self, part: OwnPart) -> None:
        """Note whether a part is in the remote tier already."""
        if TierKind.REMOTE in part.stores:
            self._done.append(part.manifest.id)

    def status(self) -> dict[str, Any]:
        """Return what the other ranks need to know."""
        deferred = [] if self._deferred is None else [self._deferred[0].manifest.id]
        return {
            "uploading": [item.folder for item in list(self._running)],
            "deferred": [item.folder for item in deferred],
            "uploaded": [item.folder for item in list(self._done)],
            "upload_error": self._error,
        }

    @staticmethod
    def newest_everywhere(statuses: Sequence[Mapping[str, Any]]) -> CheckpointId | None:
        """Return the newest checkpoint that all ranks have uploaded, by their statuses."""
        common = set.intersection(*(set(status["uploaded"]) for status in statuses))
        return max((id_ for id_ in map(CheckpointId.parse, common) if id_), default=None)

    def offer(
        self, part: OwnPart | None, uploaded: "Future[bool]", statuses: Sequence[Mapping[str, Any]]
    ) -> None:
        """Upload a part, keep it for later, or skip it; all ranks decide the same."""
        if self.tier is None or part is None or any("error" in status for status in statuses):
            uploaded.set_result(False)
            return
        if self._deferred is not None:
            self._deferred[1].set_result(False)
            self._deferred = None
        if TierKind.REMOTE in part.stores:
            uploaded.set_result(True)
        elif not part.stores:
            uploaded.set_exception(CheckpointError(" ".join(part.errors)))
        else:
            self._deferred = part, uploaded
            if not any(status["uploading"] for status in statuses):
                self.start_deferred()

    def start_deferred(self) -> None:
        """Upload the part that was kept for later, if any."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._running.append(deferred[0].manifest.id)
            self._thread.submit(self._upload, *deferred)

    def _upload(self, part: OwnPart, uploaded: "Future[bool]") -> None:
        assert self.tier is not None
        source, id_ = next(iter(part.stores.values())), part.manifest.id
        self._error = ""
        try:
            copy_part(source, self.tier.store, part.manifest, self._thread.progress)
            self._done.append(id_)
        except Exception as error:
            # The client libraries of remote stores raise their own types.
            self._error = (
                f"Rank {part.manifest.part} couldn't upload {id_} to {self.tier}: {error}."
            )
            _log.warning("%s", self._error)
        # First, because others that wait for the result look at which upload runs.
        self._running.remove(id_)
        if self._error:
            uploaded.set_exception(CheckpointError(self._error))
        else:
            uploaded.set_result(True)

    def confirm_later(self, uploaded: CheckpointId) -> None:
        """Confirm a checkpoint that all ranks have uploaded; one rank calls it, once."""
        if uploaded != self._confirmed:
            self._confirmed = uploaded
            self._thread.submit(self._confirm, uploaded)

    def _confirm(self, uploaded: CheckpointId) -> None:
        assert self.tier is not None
        try:
            confirm(self.tier, uploaded)
        except Exception as error:
            # The client libraries of remote stores raise their own types.
            _log.warning("Couldn't tidy up %s: %s", self.tier, error)


@dataclass
class LastingCopies:
    """Measures for how long no lasting tier has taken a checkpoint that was begun."""

    begun: CheckpointId | None = None
    """The newest checkpoint that was begun."""
    newest: CheckpointId | None = None
    """The newest checkpoint of which a lasting tier has all ranks' parts."""
    _reached_s: float = 0.0
    _missing: list[tuple[CheckpointId, float]] = field(default_factory=list)
    _reasons: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))

    def begin(self, checkpoint: CheckpointId) -> None:
        """Note that a checkpoint was begun."""
        self.begun = checkpoint
        self._missing.append((checkpoint, time.monotonic()))

    def reach(self, checkpoint: CheckpointId) -> None:
        """Note that a lasting tier has all ranks' parts of a checkpoint."""
        if self.newest is None or checkpoint > self.newest:
            self.newest, self._reached_s = checkpoint, time.monotonic()
            self._missing = [item for item in self._missing if item[0] > checkpoint]
            self._reasons.clear()

    def note(self, reason: str) -> None:
        """Note a failure."""
        if reason not in self._reasons:
            self._reasons.append(reason)

    @property
    def reasons(self) -> str:
        """The last few failures since a lasting tier took a checkpoint."""
        return " ".join(self._reasons)

    @property
    def waited_s(self) -> float:
        """Seconds for which a checkpoint has been missing in lasting tiers; 0 if none is."""
        if not self._missing:
            return 0.0
        return time.monotonic() - max(self._reached_s, self._missing[0][1])

    def error(self, missing: CheckpointId) -> CheckpointError:
        """Return the error that says what is missing, since when, and why."""
        since = "at all" if self.newest is None else f"since {self.newest}"
        return CheckpointError(
            f"No lasting place, disk or store, has {missing} from all ranks, nor any other "
            f"checkpoint {since}, for {self.waited_s:.0f} s. {self.reasons} Make room "
            "or mend the connection; if storage is only slow, allow more time (lasting_within)."
        )
