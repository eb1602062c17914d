"""Bring a checkpoint of all ranks to all tiers, on threads beside training.

There are two *lanes*, each a thread on every rank. The local lane writes parts to the nodes' own
tiers, copies them to other nodes, and confirms or deletes checkpoints. The upload lane copies parts
from there to the remote tier. In each lane all ranks do the same work at the same time and exchange
its results (`Peers.do`), so that all decide the same. While an upload runs, later checkpoints stay
local, and only the newest of them is uploaded afterwards.

If a rank's storage fails or hangs, the rank reports it in its status and goes on; the next
checkpoint may succeed. But if neither a disk nor a store accepts a checkpoint for long, the next
fault would lose everything that was trained meanwhile; so that is an error. Only the loss of a rank
ends the lanes; from then on each rank measures by its own clock how long ago a lasting tier took a
checkpoint.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_hetero.checkpoint.deadlines import MARGIN, BackgroundThread
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.serving import PeerFiles
from lightning_hetero.checkpoint.snapshot import SavedCheckpoint
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.tiers import (
    StoredPart,
    Tier,
    TierKind,
    checkpoints_in,
    confirm,
    copy_part,
    own_stores,
    place_replicas,
    pull_part,
    remove_checkpoints,
    write_part,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

_log = logging.getLogger(__name__)
_NUM_REASONS = 8
"""Number of failures that are kept."""
_Statuses = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class WriterOptions:
    """How checkpoints are written."""

    replicas: int = 1
    """Number of nodes that have each part, the node of its rank included."""
    stall_s: float = 300.0
    """Seconds without progress after which a checkpoint no longer waits for storage."""
    lasting_within_s: float = 1800.0
    """Seconds after which it is an error that no lasting tier has taken a checkpoint."""


class Committer:
    """Brings one rank's parts to all tiers; one thread on each rank makes the same calls.

    Args:
        tiers: This node's own tiers, fastest first, and at most one remote one.
        node_of_rank: Name of each rank's node.
        peers: All ranks.
        options: How to write.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        node_of_rank: Sequence[str],
        peers: Peers,
        options: WriterOptions,
    ) -> None:
        self.progress = Progress()
        """Ticks whenever any rank that is waited for makes progress."""
        self.overdue: CheckpointError | None = None
        """The error to raise because no lasting tier has taken any checkpoint for too long; or
        None."""
        self._options = options
        self._node_of_rank = node_of_rank
        self._rank = peers.global_rank
        self._is_first_of_node = node_of_rank.index(node_of_rank[self._rank]) == self._rank
        self._address = peers.serve(own_stores(tiers))
        self._peers, self._uploaders = (
            peers.branch(timeout_s=options.stall_s, progress=self.progress) for _ in range(2)
        )
        self._uploads = BackgroundThread("checkpoint-upload")
        self._own = [tier for tier in tiers if tier.kind is not TierKind.REMOTE]
        self._remote = next((tier for tier in tiers if tier.kind is TierKind.REMOTE), None)
        self._deferred: tuple[StoredPart, Future[bool]] | None = None
        self._uploading: list[CheckpointId] = []
        self._lost_peer: Exception | None = None
        self._begun: CheckpointId | None = None
        """The newest checkpoint that was begun."""
        self._lasting: CheckpointId | None = None
        """The newest checkpoint of which a lasting tier has all ranks' parts."""
        self._missing_since_s: float | None = None
        """Monotonic time since which the newest checkpoint has been missing in lasting tiers. It
        restarts when an older one arrives there. None if the newest one has arrived."""
        self._reasons: deque[str] = deque(maxlen=_NUM_REASONS)
        """The last failures since a lasting tier took a checkpoint."""
        self._whole: CheckpointId | None = None
        """The newest checkpoint whose parts are all in the nodes' own tiers, of any kind: some on
        disks, others in shared memory."""
        self._sound: dict[TierKind, CheckpointId] = {}
        """For each kind of tier, the newest checkpoint whose parts are all in tiers of this
        kind."""

    @property
    def complete_steps(self) -> dict[str, int]:
        """For each tier, by name, the step of the newest checkpoint of which it has all parts."""
        known = self._sound.copy()  # A thread may add to it.
        return {kind.name.lower(): id_.step for kind, id_ in sorted(known.items())}

    def write(self, saved: SavedCheckpoint) -> None:
        """Write one checkpoint; communicates.

        Raises:
            CheckpointError: On all ranks, if the nodes' own tiers don't have all parts (or the
                remote tier, if there are no own tiers).
            PeerError: Another rank is gone.
        """
        self._begun = saved.id
        self._missing_since_s = self._missing_since_s or time.monotonic()
        try:
            if self._lost_peer is not None:
                if saved.snapshot is not None:
                    saved.snapshot.release()
                raise self._lost_peer
            self._write(saved)
        except CheckpointError:
            raise
        except Exception as error:
            self._lost_peer = error
            self._note(f"Rank {self._rank}: {error}")
            self._judge(self._waited_s)
            with suppress(InvalidStateError):  # The other lane may have found the loss, too.
                saved.remote.set_exception(error)
            raise

    def _write(self, saved: SavedCheckpoint) -> None:
        """Write the part, copy it to other nodes, start its upload, confirm the checkpoint."""
        writing, statuses = self._peers.do(
            partial(self._write_part, saved), self._describe, may_fail=True
        )
        self._note(*_errors_in(statuses))
        has_failed = any("error" in status for status in statuses)
        part = None if has_failed else writing.result()
        is_copied = part is not None and self._copy_to_peers(part, saved.leaving, statuses)
        is_whole = is_copied and all(status["written"] for status in statuses)
        if is_whole:
            self._whole = saved.id
        why = " ".join(self._reasons)
        for kind in () if has_failed else _sound_kinds(statuses):
            if kind is TierKind.DISK:
                self._reach(saved.id)
            # Copies go to the last tier.
            if is_copied or kind is not self._own[-1].kind:
                self._sound[kind] = saved.id
        self._offer(part, saved.remote, statuses)
        tidy = partial(self._tidy, saved.id)
        waited_s = self._waited_s
        _, statuses = self._peers.do(tidy, lambda _: {"waited_s": waited_s}, may_fail=True)
        # By the clock of rank 0, so that all ranks judge alike.
        self._judge(statuses[0].get("waited_s", 0.0))
        if not is_whole:
            error = CheckpointError(f"Not all parts of {saved.id} were stored. {why}")
            if self._rank == 0:
                _log.warning("%s", error)
            raise error

    def _write_part(self, saved: SavedCheckpoint, progress: Progress) -> StoredPart:
        if saved.snapshot is None:
            raise CheckpointError(f"storage hadn't let go of what was saved before {saved.id}.")
        try:
            saved.snapshot.wait()
            content = saved.snapshot.content
            return write_part(content, saved.metadata, self._own, self._remote, progress)
        finally:
            # A write that hangs uses the memory until it ends.
            saved.snapshot.release()

    def _describe(self, part: StoredPart) -> dict[str, Any]:
        """Return this rank's status, which the other ranks need."""
        own = [tier.kind for tier in self._own]
        return {
            "has": own,
            "written": [kind for kind in part.stores if kind in own or not own],
            "errors": part.errors,
            "address": self._address,
            "uploading": bool(self._uploading),
        }

    def _copy_to_peers(
        self, part: StoredPart, leaving: Collection[str], statuses: _Statuses
    ) -> bool:
        """Exchange copies with other nodes; return whether all copies have arrived everywhere."""
        replicas = self._options.replicas
        if replicas == 1 and not leaving:
            return True
        if not any(status["has"] for status in statuses):
            return True  # All parts are in the remote tier.
        if not all(status["has"] for status in statuses):
            return False
        targets = place_replicas(self._node_of_rank, replicas=replicas, leaving=leaving)

        def pull(progress: Progress) -> list[str]:
            errors = []
            for sender in (rank for rank, found in enumerate(targets) if self._rank in found):
                try:
                    kind, address = statuses[sender]["written"][0], statuses[sender]["address"]
                    source = PeerFiles(address, TierKind(kind).name, self._options.stall_s / MARGIN)
                    pull_part(source, self._own[-1].store, part.manifest.id, sender, progress)
                except Exception as error:
                    # Stores raise their client library's own types; other copies may succeed.
                    errors.append(f"rank {self._rank} didn't get rank {sender}'s part: {error}")
            return errors

        _, answers = self._peers.do(pull, lambda errors: {"errors": errors}, may_fail=True)
        errors = _errors_in(answers)
        self._note(*(f"Copies: {text}" for text in errors))
        return not errors

    def _tidy(self, newest: CheckpointId, progress: Progress) -> None:
        """Confirm a checkpoint in the node's own tiers, or delete incomplete ones there.

        It is confirmed if tiers of one kind have all parts. Otherwise those checkpoints of this
        start are deleted of which tiers of this kind have only some parts, unless the own tiers of
        all kinds together have all. Failures are logged: the next save deletes what is left.
        """
        deferred = [] if self._deferred is None else [self._deferred[0].manifest.id]
        busy = {newest, *self._uploading, *deferred}
        for tier in self._own if self._is_first_of_node else ():
            sound = self._sound.get(tier.kind)
            try:
                if sound == newest:
                    confirm(tier, newest, busy)
                else:
                    files = tier.store.list()
                    gone = [
                        item
                        for item in checkpoints_in(files)
                        if (item.run, item.attempt) == (newest.run, newest.attempt)
                        and item not in {sound, self._whole, *busy}
                        and (sound is None or item > sound)
                    ]
                    remove_checkpoints(tier.store, files, gone)
            except Exception as error:
                # Stores raise their client library's own types.
                _log.warning("Couldn't tidy up %s: %s", tier, error)
            progress.tick()

    def _reach(self, checkpoint: CheckpointId) -> None:
        """Note that a lasting tier has all of a checkpoint's parts."""
        if self._lasting is None or checkpoint > self._lasting:
            self._lasting = checkpoint
            self._missing_since_s = None if checkpoint == self._begun else time.monotonic()
            self._reasons.clear()

    def _note(self, *reasons: str) -> None:
        """Note why a part wasn't stored."""
        self._reasons.extend(text for text in reasons if text not in self._reasons)

    @property
    def _waited_s(self) -> float:
        """Seconds for which a checkpoint has been missing in lasting tiers; 0 if none is."""
        since_s = self._missing_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _judge(self, waited_s: float) -> None:
        """Set `overdue` if all lasting tiers have failed for too long."""
        if waited_s > self._options.lasting_within_s:
            self.overdue = self.error()

    def error(self, *more: str) -> CheckpointError:
        """Return the error that says what lasting tiers lack, since when, and why."""
        since = "at all" if self._lasting is None else f"since {self._lasting}"
        reasons = " ".join((*self._reasons, *more))
        return CheckpointError(
            f"No lasting place, disk or store, has {self._begun} from all ranks, nor any "
            f"other checkpoint {since}, for {self._waited_s:.0f} s. {reasons} Make room or "
            "mend the connection; if storage is only slow, allow more time (lasting_within)."
        )

    # -- uploads --------------------------------------------------------------------------------

    def _offer(
        self, part: StoredPart | None, uploaded: "Future[bool]", statuses: _Statuses
    ) -> None:
        """Upload a part, keep it for later, or skip it; all ranks decide the same."""
        if self._remote is None or part is None:
            uploaded.set_result(False)
            return
        if self._deferred is not None:
            self._deferred[1].set_result(False)
        self._deferred = part, uploaded
        if not any(status["uploading"] for status in statuses):
            self.upload_deferred()

    def upload_deferred(self) -> None:
        """Upload the part that was kept for later, if any; all ranks call it."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._uploading.append(deferred[0].manifest.id)
            self._uploads.submit(self._upload, *deferred)

    def _upload(self, part: StoredPart, uploaded: "Future[bool]") -> None:
        """Upload one checkpoint; rank 0 confirms it once all ranks have uploaded their parts."""
        id_ = part.manifest.id
        try:
            if self._lost_peer is not None:
                raise self._lost_peer
            self._uploaders.do(partial(self._copy_to_remote, part))
            self._reach(id_)
            self._sound[TierKind.REMOTE] = id_
            self._uploaders.do(partial(self._confirm_remote, id_), may_fail=True)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                self._lost_peer = error
            text = f"{id_} wasn't uploaded to {self._remote}: {error}"
            self._note(text)
            _log.warning("%s", text)
            self._uploading.remove(id_)
            uploaded.set_exception(error)
        else:
            # First, because others that wait for the result look at which upload is running.
            self._uploading.remove(id_)
            uploaded.set_result(True)

    def _copy_to_remote(self, part: StoredPart, progress: Progress) -> None:
        assert self._remote is not None
        if not part.stores:
            raise CheckpointError(" ".join(part.errors))
        if TierKind.REMOTE not in part.stores:
            source = next(iter(part.stores.values()))
            copy_part(source, self._remote.store, part.manifest, progress)

    def _confirm_remote(self, checkpoint: CheckpointId, _: Progress) -> None:
        if self._rank == 0 and self._remote is not None:
            try:
                confirm(self._remote, checkpoint)
            except Exception as error:
                # The client libraries of remote stores raise their own types.
                _log.warning("Couldn't tidy up %s: %s", self._remote, error)

    # -- end ------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait for all uploads; return whether a lasting tier has the newest checkpoint."""
        if self._lost_peer is None:
            self.upload_deferred()
            self._uploads.submit(self.progress.tick).result()
        return self._missing_since_s is None

    def end(self) -> None:
        """Stop the threads after the work that they have been given; doesn't wait for them."""
        self._uploads.finish()
        if self._deferred is not None:
            with suppress(InvalidStateError):  # A rank was lost after it was offered.
                self._deferred[1].set_result(False)


def _errors_in(statuses: _Statuses) -> list[str]:
    own = [text for status in statuses for text in status.get("errors", ())]
    return [*own, *(status["error"] for status in statuses if "error" in status)]


def _sound_kinds(statuses: _Statuses) -> list[TierKind]:
    """Return the kinds of tiers that have the parts of all ranks that have such a tier."""
    kinds = {TierKind(kind) for status in statuses for kind in status["has"]}
    return sorted(
        kind
        for kind in kinds
        if all(kind in status["written"] for status in statuses if kind in status["has"])
    )
