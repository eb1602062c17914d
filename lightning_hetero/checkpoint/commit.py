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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_hetero.checkpoint.deadlines import MARGIN, BackgroundThread
from lightning_hetero.checkpoint.lasting import Lasting
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.serving import PeerFiles
from lightning_hetero.checkpoint.snapshot import Snapshot
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


@dataclass(frozen=True)
class SaveTask:
    """This rank's work for one checkpoint."""

    id: CheckpointId
    snapshot: Snapshot | None
    """The copy in host memory; None if storage still reads the memory of an earlier one."""
    metadata: Mapping[str, bytes]
    leaving: frozenset[str]
    uploaded: "Future[bool]" = field(default_factory=Future)


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
        self._newest: StoredPart | None = None
        self._deferred: tuple[StoredPart, Future[bool]] | None = None
        self._uploading: list[CheckpointId] = []
        self._lost_peer: Exception | None = None
        self._lasting = Lasting()
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

    def write(self, task: SaveTask) -> None:
        """Write one checkpoint; communicates.

        Raises:
            CheckpointError: On all ranks, if the nodes' own tiers don't have all parts (or the
                remote tier, if there are no own tiers).
            PeerError: Another rank is gone.
        """
        self._lasting.begin(task.id)
        try:
            if self._lost_peer is not None:
                if task.snapshot is not None:
                    task.snapshot.release()
                raise self._lost_peer
            self._write(task)
        except CheckpointError:
            raise
        except Exception as error:
            self._lost_peer = error
            self._lasting.note(f"Rank {self._rank}: {error}")
            self._judge(self._lasting.waited_s)
            with suppress(InvalidStateError):  # The other lane may have found the loss, too.
                task.uploaded.set_exception(error)
            raise

    def _write(self, task: SaveTask) -> None:
        """Write the part, copy it to other nodes, start its upload, confirm the checkpoint."""
        writing, statuses = self._peers.do(
            partial(self._write_part, task), self._describe, may_fail=True
        )
        self._lasting.note(*_errors_in(statuses))
        has_failed = any("error" in status for status in statuses)
        part = self._newest = None if has_failed else writing.result()
        is_copied = part is not None and self._copy_to_peers(part, task.leaving, statuses)
        is_whole = is_copied and all(status["written"] for status in statuses)
        if is_whole:
            self._whole = task.id
        for kind in () if has_failed else _sound_kinds(statuses):
            # Copies go to the last tier.
            if is_copied or kind is not self._own[-1].kind:
                self._sound[kind] = task.id
        if self._sound.get(TierKind.DISK) == task.id:
            self._lasting.reach(task.id)
        why = " ".join(self._lasting.reasons)
        self._offer(part, task.uploaded, statuses)
        tidy = partial(self._tidy, task.id)
        _, statuses = self._peers.do(tidy, self._waited_status, may_fail=True)
        # By the clock of rank 0, so that all ranks judge alike.
        self._judge(statuses[0].get("waited_s", 0.0))
        if not is_whole:
            error = CheckpointError(f"Not all parts of {task.id} were stored. {why}")
            if self._rank == 0:
                _log.warning("%s", error)
            raise error

    def _write_part(self, task: SaveTask, progress: Progress) -> StoredPart:
        if task.snapshot is None:
            raise CheckpointError(f"storage hadn't let go of what was saved before {task.id}.")
        try:
            task.snapshot.wait()
            content = task.snapshot.content
            return write_part(content, task.metadata, self._own, self._remote, progress)
        finally:
            # A write that hangs uses the memory until it ends.
            task.snapshot.release()

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
        self._lasting.note(*(f"Copies: {text}" for text in errors))
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

    def _waited_status(self, _: None) -> dict[str, Any]:
        return {"waited_s": self._lasting.waited_s}

    def _judge(self, waited_s: float) -> None:
        """Set `overdue` if all lasting tiers have failed for too long."""
        if waited_s > self._options.lasting_within_s:
            self.overdue = self.error()

    def error(self, *more: str) -> CheckpointError:
        """Return the error that says what lasting tiers lack, since when, and why."""
        since = "at all" if self._lasting.newest is None else f"since {self._lasting.newest}"
        reasons = " ".join((*self._lasting.reasons, *more))
        return CheckpointError(
            f"No lasting place, disk or store, has {self._lasting.begun} from all ranks, nor any "
            f"other checkpoint {since}, for {self._lasting.waited_s:.0f} s. {reasons} Make room or "
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
            self._lasting.reach(id_)
            self._sound[TierKind.REMOTE] = id_
            self._uploaders.do(partial(self._confirm_remote, id_), may_fail=True)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                self._lost_peer = error
            text = f"{id_} wasn't uploaded to {self._remote}: {error}"
            self._lasting.note(text)
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
        if self._lasting.begun is None:
            return True
        if self._lost_peer is not None:
            return False
        self.upload_deferred()
        self._uploads.submit(self.progress.tick).result()
        _, statuses = self._peers.do(self._check_again, dict, may_fail=True)
        return not any("error" in status for status in statuses) and bool(_sound_kinds(statuses))

    def end(self) -> None:
        """Stop the threads after the work that they have been given; doesn't wait for them."""
        self._uploads.finish()
        if self._deferred is not None:
            with suppress(InvalidStateError):  # A rank was lost after it was offered.
                self._deferred[1].set_result(False)

    def _check_again(self, _: Progress) -> dict[str, Any]:
        """Return this rank's lasting tiers, and which of them still have its newest part."""
        tiers = [*self._own, *([] if self._remote is None else [self._remote])]
        lasting = [tier for tier in tiers if tier.kind is not TierKind.MEMORY]
        sizes = {} if self._newest is None else self._newest.sizes
        written = []
        for tier in lasting if sizes else ():
            try:
                files = tier.store.list()
            except Exception as error:
                # Stores raise their client library's own types; another tier may have it all.
                _log.warning("Couldn't look into %s again: %s", tier, error)
                continue
            if all(files.get(name) == size for name, size in sizes.items()):
                written.append(tier.kind)
        return {"has": [tier.kind for tier in lasting], "written": written}


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
