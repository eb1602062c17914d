"""How a rank's parts reach the remote tier, behind what the own tiers do.

Ranks decide alike, from what all have said (`status`): while one upload runs anywhere, later
checkpoints stay local, and only the newest of them is uploaded afterwards. A part goes from the
fastest own tier that has it, or from the snapshot where none has.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hetero.checkpoint.background import BackgroundThread, Progress
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.own_tiers import Part
from lightning_hetero.checkpoint.parts import copy_part, write_files, write_manifest
from lightning_hetero.checkpoint.tiers import Tier, confirm, prune
from lightning_hetero.core.errors import CheckpointError

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Uploads"]

_log = logging.getLogger(__name__)

_NUM_REMEMBERED = 8


class Uploads:
    """One rank's uploads; all but the copying itself is done by one thread of the writer.

    Args:
        tier: The remote tier, None if there is none.
        thread: Copies.
    """

    def __init__(self, tier: Tier | None, thread: BackgroundThread) -> None:
        self.tier = tier
        self._thread = thread
        self._running: list[CheckpointId] = []
        self._deferred: tuple[Part, Future[bool]] | None = None
        self._done: deque[CheckpointId] = deque(maxlen=_NUM_REMEMBERED)
        self._error = ""

    @property
    def num_running(self) -> int:
        """Uploads that run or wait for the thread."""
        return len(self._running)

    def status(self) -> dict[str, Any]:
        """Return what the other ranks must know."""
        deferred = [] if self._deferred is None else [self._deferred[0].manifest.id]
        return {
            "uploading": [item.folder for item in list(self._running)],
            "deferred": [item.folder for item in deferred],
            "uploaded": [item.folder for item in list(self._done)],
            "upload_error": self._error,
        }

    @staticmethod
    def newest_everywhere(statuses: Sequence[Mapping[str, Any]]) -> CheckpointId | None:
        """Return the newest checkpoint that all ranks have uploaded, as their statuses say."""
        common = set.intersection(*(set(status["uploaded"]) for status in statuses))
        return max((id_ for id_ in map(CheckpointId.parse, common) if id_), default=None)

    def offer(
        self, part: Part | None, uploaded: "Future[bool]", statuses: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Start the upload of a part, keep it for later, or skip it: all ranks the same.

        Returns:
            Whether the caller must upload the part itself, from memory (`upload`).
        """
        is_free = not any(status["uploading"] for status in statuses)
        is_everywhere = not any("error" in status for status in statuses)
        can_wait = all(status["written"] for status in statuses)
        if self.tier is None or part is None or not is_everywhere or not (is_free or can_wait):
            uploaded.set_result(False)
            return False
        self._drop_deferred()
        if is_free and part.source is None:
            return True
        self._deferred = part, uploaded
        if is_free:
            self.start_deferred()
        return False

    def _drop_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred[1].set_result(False)

    def start_deferred(self) -> None:
        """Upload what was kept for later, if anything was."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._running.append(deferred[0].manifest.id)
            self._thread.submit(self._upload_stored, *deferred)

    def _upload_stored(self, part: Part, uploaded: "Future[bool]") -> None:
        self._copy(part, self._thread.progress)
        # First, because whoever waits for the result may look for what runs.
        self._running.remove(part.manifest.id)
        self._resolve(uploaded)

    def upload(self, part: Part, uploaded: "Future[bool]", progress: Progress) -> None:
        """Copy a part to the remote tier; `uploaded` says how that went."""
        self._copy(part, progress)
        self._resolve(uploaded)

    def _copy(self, part: Part, progress: Progress) -> None:
        assert self.tier is not None
        tier, id_ = self.tier, part.manifest.id
        try:
            if part.source is not None:
                copy_part(part.source, tier.store, part.manifest, progress)
            else:
                write_files(tier.store, id_, part.bodies, progress)
                write_manifest(tier.store, part.manifest)
        except Exception as error:
            # The client libraries of remote stores raise their own types.
            self._error = f"Rank {part.manifest.part} couldn't upload {id_} to {tier}: {error}."
            _log.warning("%s", self._error)
        else:
            self._error = ""
            self._done.append(id_)

    def _resolve(self, uploaded: "Future[bool]") -> None:
        if self._error:
            uploaded.set_exception(CheckpointError(self._error))
        else:
            uploaded.set_result(True)

    def settle_behind(self, uploaded: CheckpointId) -> None:
        """Note what all ranks have uploaded, behind the uploads; one rank does it for all."""
        self._thread.submit(self.settle, uploaded)

    def settle(self, uploaded: CheckpointId | None = None) -> None:
        """Note in the remote tier what is complete there, and delete what is old."""
        if self.tier is None:
            return
        try:
            if uploaded is not None:
                confirm(self.tier.store, uploaded)
            prune(self.tier.store, keep=self.tier.keep, shared=True)
        except Exception as error:
            # What isn't deleted now is deleted another time.
            _log.warning("Couldn't tidy up %s: %s", self.tier, error)
