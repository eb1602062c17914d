"""Bring a checkpoint of all ranks to all tiers, on a thread beside training.

If a rank's storage fails or hangs, the rank reports it in its next status and goes on. Only if a
rank is lost does the exchange of statuses end; from then on each rank measures by its own clock how
long ago a lasting tier took a checkpoint.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from lightning_hetero.checkpoint.content import CheckpointContent
from lightning_hetero.checkpoint.deadlines import MARGIN, BackgroundThread
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.serving import PeerFiles
from lightning_hetero.checkpoint.snapshot import Snapshot
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.storing import LastingCopies, OwnPart, Uploads, write_part
from lightning_hetero.checkpoint.tiers import (
    Tier,
    TierKind,
    checkpoints_in,
    confirm,
    own_stores,
    pull_part,
    remove_checkpoints,
)
from lightning_hetero.core.errors import CheckpointError, ConfigurationError

__all__ = ["Committer", "SaveTask", "WriterOptions", "place_replicas"]

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
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


@dataclass
class SaveTask:
    """This rank's work for one checkpoint."""

    content: CheckpointContent
    snapshot: Snapshot | None
    """The copy in host memory; None if storage still reads the memory of an earlier one."""
    metadata: Mapping[str, bytes]
    leaving: frozenset[str]
    uploaded: "Future[bool]" = field(default_factory=Future)
    is_offered: bool = False
    """Whether the result of `uploaded` is left to the uploading thread."""


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
        self.progress = peers.progress
        self.overdue: CheckpointError | None = None
        """The error to raise because no lasting tier has taken any checkpoint for too long; or
        None."""
        self.lasting = LastingCopies()
        self._options = options
        self._node_of_rank = node_of_rank
        self._peers = peers
        self._rank = peers.global_rank
        self._address = peers.serve(own_stores(tiers))
        self._is_first_of_node = node_of_rank.index(node_of_rank[self._rank]) == self._rank
        self._storing = BackgroundThread("checkpoint-write")
        self._pulling = BackgroundThread("checkpoint-pull")
        self._uploading = BackgroundThread("checkpoint-upload")
        self._own = [tier for tier in tiers if tier.kind is not TierKind.REMOTE]
        remote = (tier for tier in tiers if tier.kind is TierKind.REMOTE)
        self.uploads = Uploads(next(remote, None), self._uploading)
        self._stored: Future[Any] | None = None
        self._newest: OwnPart | None = None
        self._lost_peer: Exception | None = None
        self._whole: CheckpointId | None = None
        """The newest checkpoint of which the nodes' own tiers together have all parts."""
        self._sound: dict[TierKind, CheckpointId] = {}
        """For each kind of tier the newest checkpoint of which tiers of this kind have all
        parts."""

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
        self.lasting.begin(task.content.id)
        try:
            if self._lost_peer is not None:
                raise self._lost_peer
            self._write(task)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                self._lost_peer = error
                self.lasting.note(f"Rank {self._rank}: {error}")
                self._judge(self.lasting.waited_s)
            if self._rank == 0:
                _log.warning("%s", error)
            if not task.is_offered:
                task.uploaded.set_exception(error)
            raise
        finally:
            self._release(task)

    def finish(self) -> bool:
        """Wait for all uploads; return whether a lasting tier has the newest checkpoint."""
        if self.lasting.begun is None:
            return True
        if self._lost_peer is not None:
            return False
        self.uploads.start_deferred()
        # The second round waits for rank 0, which confirms complete uploads after the first.
        for _ in range(2):
            end = self._uploading.submit(self._uploading.progress.tick)
            self._learn(self._finish(end, self._uploading, lambda _: self.uploads.status()))
        looking = self._submit(self._look_again)
        statuses = self._finish(looking, self._storing, lambda seen: seen or {})
        return not any("error" in s for s in statuses) and bool(_sound_kinds(statuses))

    def end(self) -> None:
        """Stop the threads after the work that they have been given; doesn't wait for them."""
        for thread in (self._storing, self._pulling, self._uploading):
            thread.finish()

    def _finish(
        self,
        work: "Future[_T]",
        thread: BackgroundThread,
        describe: Callable[[_T | None], Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        """Wait until all ranks' work is done; return their statuses."""
        return self._peers.finish(work, thread, describe, timeout_s=self._options.stall_s)

    def _write(self, task: SaveTask) -> None:
        id_ = task.content.id
        writing = self._submit(self._write_own, task)
        statuses = self._finish(writing, self._storing, self._describe)
        self._learn(statuses)
        part = None if "error" in statuses[self._rank] else writing.result()
        self._newest = part
        copied = self._copy_to_peers(part, task.leaving, statuses)
        is_complete = copied and all(status["written"] for status in statuses)
        kinds = [tier.kind for tier in self._own]
        sound = [k for k in _sound_kinds(statuses) if copied or k is not kinds[-1]]
        if TierKind.DISK in sound:
            self.lasting.reach(id_)
        why = self.lasting.reasons
        task.is_offered = True
        self.uploads.offer(part, task.uploaded, statuses)
        if is_complete:
            self._whole = id_
        self._sound.update(dict.fromkeys(sound, id_))
        busy = _busy_in(statuses) | {id_}

        def commit() -> None:
            for tier in self._own if self._is_first_of_node else ():
                self._tidy(tier, id_, busy)

        statuses = self._finish(self._submit(commit), self._storing, self._describe)
        self._learn(statuses)
        is_lasting = self.lasting.newest == id_
        if not is_lasting:
            self._judge(statuses[0]["waited_s"])
        if not is_complete and (self._own or not is_lasting):
            raise CheckpointError(f"The nodes' own tiers don't have all parts of {id_}. {why}")

    def _write_own(self, task: SaveTask) -> OwnPart:
        if task.snapshot is None:
            raise CheckpointError(
                f"storage hadn't let go of what was saved before {task.content.id}."
            )
        remote, progress = self.uploads.tier, self._storing.progress
        part = write_part(task.snapshot, task.metadata, self._own, remote, progress)
        self.uploads.note(part)
        return part

    def _describe(self, part: OwnPart | None) -> dict[str, Any]:
        """Return this rank's status, which the other ranks need."""
        return {
            "has": [tier.kind for tier in self._own],
            "written": [k for k in part.stores if k is not TierKind.REMOTE] if part else [],
            "errors": [] if part is None else list(part.errors),
            "address": self._address,
            "waited_s": self.lasting.waited_s,
            **self.uploads.status(),
        }

    def _learn(self, statuses: _Statuses) -> None:
        """Note all ranks' statuses: failures, and checkpoints that all ranks have uploaded."""
        for status in statuses:
            for text in (status.get("error"), status["upload_error"], *status.get("errors", ())):
                if text:
                    self.lasting.note(text)
        uploaded = self.uploads.newest_everywhere(statuses)
        if uploaded is not None:
            self.lasting.reach(uploaded)  # A disk may have had it before.
            self._sound[TierKind.REMOTE] = uploaded
            if self._rank == 0:
                self.uploads.confirm_later(uploaded)

    def _copy_to_peers(
        self, part: OwnPart | None, leaving: Collection[str], statuses: _Statuses
    ) -> bool:
        """Exchange copies with other nodes; return whether all copies have arrived everywhere."""
        if self._options.replicas == 1 and not leaving:
            return True
        if not all(status["has"] for status in statuses) or any("error" in s for s in statuses):
            return False
        assert part is not None
        targets = place_replicas(
            self._node_of_rank, replicas=self._options.replicas, leaving=leaving
        )
        senders = [rank for rank, items in enumerate(targets) if self._rank in items]
        errors: list[str] = []

        def pull() -> list[str]:
            for sender in senders:
                try:
                    kind, address = statuses[sender]["written"][0], statuses[sender]["address"]
                    source = PeerFiles(address, TierKind(kind).name, self._options.stall_s / MARGIN)
                    store = self._own[-1].store
                    pull_part(source, store, part.manifest.id, sender, self._pulling.progress)
                except Exception as error:
                    # Stores raise their client library's own types; other copies may succeed.
                    errors.append(f"Copy of rank {sender}'s part for rank {self._rank}: {error}")
            return errors

        pulling = self._pulling.submit(pull)
        answers = self._finish(pulling, self._pulling, lambda found: {"errors": found or []})
        pulling.cancel()  # It may be queued behind one that hangs.
        texts = [text for answer in answers for text in answer["errors"]]
        texts += [f"Copies for {answer['error']}" for answer in answers if "error" in answer]
        for text in texts:
            self.lasting.note(text)
        return not texts

    def _tidy(self, tier: Tier, newest: CheckpointId, busy: Collection[CheckpointId]) -> None:
        """Confirm a checkpoint in a tier, or delete incomplete ones there.

        It is confirmed if tiers of this kind have all parts. Otherwise those checkpoints of this
        start are deleted of which tiers of this kind have only some parts, unless the own tiers of
        all kinds together have all. Failures are logged: the next save deletes what is left.
        """
        sound = self._sound.get(tier.kind)
        try:
            if sound == newest:
                confirm(tier, newest, busy)
            else:
                files, kept = tier.store.list(), {sound, self._whole, *busy}
                gone = [
                    item
                    for item in checkpoints_in(files)
                    if (item.run, item.attempt) == (newest.run, newest.attempt)
                    and item not in kept
                    and (sound is None or item > sound)
                ]
                remove_checkpoints(tier.store, files, gone)
        except Exception as error:
            # Stores raise their client library's own types.
            _log.warning("Couldn't tidy up %s: %s", tier, error)
        self._storing.progress.tick()

    def _judge(self, waited_s: float) -> None:
        """Set `overdue` if all lasting tiers have failed for too long."""
        if waited_s > self._options.lasting_within_s and self.lasting.begun is not None:
            self.overdue = self.lasting.error(self.lasting.begun)

    def _look_again(self) -> dict[str, Any]:
        """Return this rank's lasting tiers, and which of them still have its newest part."""
        tiers = [tier for tier in (*self._own, self.uploads.tier) if tier is not None]
        lasting = [tier for tier in tiers if tier.kind is not TierKind.MEMORY]
        found = [tier.kind for tier in lasting if _holds(tier.store, self._newest)]
        return {"has": [tier.kind for tier in lasting], "written": found}

    def _submit(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
        """Give work to the storing thread; fail at once if that hangs in earlier work."""
        if self._stored is None or self._stored.done():
            self._stored = self._storing.submit(work, *args, **kwargs)
            return self._stored
        failed: Future[_T] = Future()
        failed.set_exception(CheckpointError("storage hangs."))
        return failed

    def _release(self, task: SaveTask) -> None:
        """Free the snapshot: now, or after a hanging write that still reads it."""
        if task.snapshot is None:
            return
        if self._stored is None or self._stored.done():
            task.snapshot.release()
        else:
            self._storing.submit(task.snapshot.release)


def _sound_kinds(statuses: _Statuses) -> list[TierKind]:
    """Return the kinds of tiers that have the parts of all ranks that have such a tier."""
    kinds = {TierKind(kind) for status in statuses for kind in status["has"]}
    return sorted(
        kind
        for kind in kinds
        if all(kind in status["written"] for status in statuses if kind in status["has"])
    )


def _busy_in(statuses: _Statuses) -> set[CheckpointId]:
    """Return the checkpoints that any rank is uploading, or keeps to upload later."""
    names = {name for s in statuses for name in (*s["uploading"], *s["deferred"])}
    return {checkpoint for name in names if (checkpoint := CheckpointId.parse(name)) is not None}


def _holds(store: Store, part: OwnPart | None) -> bool:
    """Return whether a store has all files of a part."""
    try:
        files = {} if part is None else store.list()
    except Exception as error:
        # Stores raise their client library's own types; another tier may have it all.
        _log.warning("Couldn't look into %s again: %s", store, error)
        return False
    return part is not None and all(files.get(name) == n for name, n in part.sizes.items())


def place_replicas(
    node_of_rank: Sequence[str], *, replicas: int, leaving: Collection[str] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the ranks of other nodes that keep a copy of its part.

    Nodes form a ring, and each node gives its parts to the nodes that follow it. So if two nodes
    are lost at once, parts are lost only if the two are neighbours in the ring; if copies were
    spread over all nodes, the loss of any two nodes would lose some. Nodes that are `leaving` get
    no copies, and their own parts get at least one. There are fewer copies if there are too few
    nodes.

    Args:
        node_of_rank: Name of each rank's node.
        replicas: Nodes that are to hold each part, its own included.
        leaving: Nodes that are about to be lost.
    """
    if replicas < 1:
        raise ConfigurationError(f"replicas is {replicas}; it must be 1 (no copies) or more.")
    nodes = list(dict.fromkeys(node_of_rank))
    targets = []
    for rank, node in enumerate(node_of_rank):
        index = nodes.index(node)
        ring = [other for other in nodes[index + 1 :] + nodes[:index] if other not in leaving]
        chosen = ring[: max(replicas - 1, int(node in leaving))]
        ranks_of = [[r for r, name in enumerate(node_of_rank) if name == n] for n in chosen]
        targets.append(tuple(ranks[rank % len(ranks)] for ranks in ranks_of))
    return tuple(targets)
