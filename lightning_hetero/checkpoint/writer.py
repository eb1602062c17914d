"""How a checkpoint is written while training goes on.

`save` copies the rank's state to host memory (`snapshot`) and returns. Behind it, in order:

1. A thread writes the part into the node's own tiers: files first, manifest last.
2. All ranks' threads tell each other whether that went well, send each other's nodes their copies
   (`replicas`), and once all parts are safe note the checkpoint as confirmed and prune.
3. The host memory is free for the next snapshot.
4. A second thread uploads the part to the remote tier, from the fastest own tier, so a slow remote
   delays no later checkpoint. While one upload runs anywhere, later checkpoints stay local: all
   ranks skip the same ones. Only the newest is uploaded in any case, when training ends or leaves.

Memory: one copy of the rank's slices and a few chunks, whatever the tiers' speed. What fails shows
at the next call, if the tier is `required`.
"""

import json
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lightning_hetero.checkpoint.background import BackgroundThread
from lightning_hetero.checkpoint.blocks import BLOCK_BYTES
from lightning_hetero.checkpoint.content import CheckpointContent
from lightning_hetero.checkpoint.encoding import (
    SHARED_METADATA,
    FileBody,
    encode_metadata,
    encode_part,
    make_manifest,
    rank_metadata_name,
)
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.parts import (
    copy_part,
    exchange_parts,
    write_files,
    write_manifest,
)
from lightning_hetero.checkpoint.replicas import place_replicas
from lightning_hetero.checkpoint.snapshot import HostBuffer, Snapshot
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import Tier, TierKind, confirm, prune
from lightning_hetero.checkpoint.transport import SoloTransport, Transport
from lightning_hetero.core.errors import CheckpointError, ConfigurationError

__all__ = ["CheckpointWriter", "SavedCheckpoint"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on its way; every wait raises what went wrong in a required tier."""

    id: CheckpointId
    snapshot: Snapshot
    stall_s: float
    """Seconds for which `save` held up training, the wait for the last one included."""
    _local: "Future[None]"
    _remote: "Future[bool]"

    def wait_for_snapshot(self) -> None:
        """Return once the tensors may change: before the next optimizer step at the latest."""
        self.snapshot.wait()

    def wait_until_confirmed(self, timeout_s: float | None = None) -> None:
        """Return once all ranks' parts are in their nodes' own tiers, copies included."""
        self._local.result(timeout_s)

    def wait_until_uploaded(self, timeout_s: float | None = None) -> bool:
        """Return True once this rank's part is in the remote tier, False if it was skipped.

        Behind an upload that still runs, that is decided by the next save or `upload_newest`.
        """
        self._local.result(timeout_s)
        return bool(self._remote.result(timeout_s))


@dataclass(frozen=True)
class _Job:
    """One checkpoint of this rank on its way."""

    snapshot: Snapshot
    metadata: Mapping[str, bytes]
    leaving: frozenset[str]
    uploaded: "Future[bool]"


@dataclass(frozen=True)
class _Part:
    """This rank's part once it is encoded, and the own tiers that have it."""

    bodies: Sequence[FileBody]
    manifest: PartManifest
    stores: Sequence[Store]


class CheckpointWriter:
    """Saves one rank's parts into tiers; all ranks make the same calls in the same order.

    Args:
        tiers: This node's own tiers, fastest first, and at most one remote one.
        node_of_rank: Name of each rank's node.
        transport: The other ranks; used by the writing thread only, so it needs a group of its own.
        replicas: Nodes that hold each part, its own included.
        block_bytes: Bytes that one checksum covers: what a partial read is rounded to.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        node_of_rank: Sequence[str] = ("node",),
        transport: Transport | None = None,
        replicas: int = 1,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        remote = [tier for tier in tiers if tier.kind is TierKind.REMOTE]
        if not tiers or len(remote) > 1:
            raise ConfigurationError(
                f"A checkpoint needs one tier or more, at most one of them remote; got "
                f"{len(tiers)} with {len(remote)} remote."
            )
        self._own = [tier for tier in tiers if tier.kind is not TierKind.REMOTE]
        if replicas > 1 and not self._own:
            raise ConfigurationError(
                f"replicas={replicas} needs a local tier to keep copies in. Give local_dir."
            )
        self._remote = remote[0] if remote else None
        self._node_of_rank = tuple(node_of_rank)
        self._transport = transport or SoloTransport()
        self._replicas = replicas
        self._block_bytes = block_bytes
        self._memory = HostBuffer()
        self._writing = BackgroundThread("checkpoint-write")
        self._uploading = BackgroundThread("checkpoint-upload")
        self._uploads: list[CheckpointId] = []
        self._deferred: tuple[_Part, Future[bool]] | None = None
        self._lock = threading.Lock()
        self._errors: list[str] = []

    def save(self, content: CheckpointContent, *, leaving: Collection[str] = ()) -> SavedCheckpoint:
        """Start a checkpoint at a step boundary.

        The caller mustn't change the tensors before `wait_for_snapshot` has returned.

        Args:
            content: The rank's state.
            leaving: Nodes that are about to be lost: their parts go to nodes that stay.

        Raises:
            CheckpointError: An earlier checkpoint failed in a required tier, or the metadata can't
                be kept.
        """
        self.raise_errors()
        start_s = time.perf_counter()
        metadata = {
            rank_metadata_name(content.global_rank): encode_metadata(
                content.rank_metadata, what="rank_metadata"
            )
        }
        if content.global_rank == 0:
            metadata[SHARED_METADATA] = encode_metadata(content.metadata, what="metadata")
        job = _Job(self._memory.take(content), metadata, frozenset(leaving), Future())
        local = self._writing.submit(self._write, job)
        return SavedCheckpoint(
            id=content.id,
            snapshot=job.snapshot,
            stall_s=time.perf_counter() - start_s,
            _local=local,
            _remote=job.uploaded,
        )

    def raise_errors(self) -> None:
        """Raise what failed in required tiers since the last call."""
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            raise CheckpointError(" ".join(errors))

    def upload_newest(self) -> None:
        """Upload the newest checkpoint, even if it must wait for an older one's upload.

        Called by all ranks, where no other save follows soon; the upload goes on behind it.
        """
        self._writing.submit(self._upload_deferred)

    def close(self) -> None:
        """Finish all that was started and upload the newest checkpoint, then raise what failed."""
        self.upload_newest()
        self._writing.finish()
        self._uploading.finish()
        self._memory.close()
        self.raise_errors()

    def _write(self, job: _Job) -> None:
        """Write one checkpoint; runs on the writing thread."""
        try:
            with job.snapshot:
                errors, part, is_free = self._write_locally(job)
                self._upload(part, job.uploaded, is_free=is_free)
        except BaseException as error:
            self._note(f"Checkpoint {job.snapshot.content.id} wasn't written: {error!r}.")
            if not job.uploaded.done():
                job.uploaded.set_exception(error)
            raise
        if errors:
            raise CheckpointError(" ".join(errors))

    def _upload(self, part: _Part, uploaded: "Future[bool]", *, is_free: bool) -> None:
        """Start the upload of a part, or keep it for later where the remote isn't free."""
        self._drop_deferred()
        if self._remote is None or not (is_free or part.stores):
            uploaded.set_result(False)
        elif not part.stores:
            # Nowhere else to upload from: the host memory stays in use until it is done.
            self._upload_part(part, uploaded)
        else:
            self._deferred = part, uploaded
            if is_free:
                self._upload_deferred()

    def _drop_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred[1].set_result(False)

    def _upload_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._uploads.append(deferred[0].manifest.id)
            self._uploading.submit(self._upload_part, *deferred)

    def _write_locally(self, job: _Job) -> tuple[list[str], _Part, bool]:
        """Return what went wrong in required tiers, this part, and whether no rank uploads."""
        content = job.snapshot.content
        part, failed = self._write_own_tiers(job)
        statuses = self._gather(
            {
                "errors": [text for tier, text in failed if tier.required],
                "bytes": part.manifest.size_bytes,
                "uploading": [item.folder for item in list(self._uploads)],
            }
        )
        errors = [text for status in statuses for text in status["errors"]]
        safe = bool(part.stores) or not self._own
        if self._own:
            safe = self._replicate(part, job.leaving, [s["bytes"] for s in statuses]) and safe
            safe = all(self._gather(safe))
        busy = {CheckpointId.parse(name) for status in statuses for name in status["uploading"]}
        if safe:
            in_use = {content.id, *(item for item in busy if item is not None)}
            self._confirm_and_prune(content.id, in_use)
        elif not errors:
            _log.warning("Checkpoint %s isn't complete in the nodes' own tiers.", content.id)
        for text in errors:
            self._note(text)
        return errors, part, not busy

    def _write_own_tiers(self, job: _Job) -> tuple[_Part, list[tuple[Tier, str]]]:
        content = job.snapshot.content
        bodies, slices = encode_part(job.snapshot, job.metadata, block_bytes=self._block_bytes)
        stores: list[Store] = []
        failed: list[tuple[Tier, str]] = []
        manifest: PartManifest | None = None
        for tier in self._own:
            try:
                write_files(tier.store, content.id, bodies)
                manifest = manifest or make_manifest(content, bodies, slices)
                write_manifest(tier.store, manifest)
                stores.append(tier.store)
            except Exception as error:
                # A tier that fails must not keep the others, or the peers, from going on.
                text = f"Rank {content.global_rank} couldn't write {content.id} to {tier}: {error}."
                _log.warning("%s", text)
                failed.append((tier, text))
        manifest = manifest or make_manifest(content, bodies, slices)
        return _Part(bodies, manifest, stores), failed

    def _replicate(self, part: _Part, leaving: Collection[str], sizes: Sequence[int]) -> bool:
        """Exchange copies with other nodes; return whether all that concerns this rank arrived."""
        if self._replicas == 1 and not leaving:
            return True
        targets = place_replicas(
            self._node_of_rank, replicas=self._replicas, part_bytes=sizes, leaving=leaving
        )
        source = part.stores[0] if part.stores else None
        errors = exchange_parts(
            self._transport, targets, part.manifest, source=source, target=self._own[-1].store
        )
        for text in errors:
            _log.warning("%s", text)
        return not errors

    def _confirm_and_prune(self, checkpoint: CheckpointId, busy: Collection[CheckpointId]) -> None:
        rank = self._transport.global_rank
        if self._node_of_rank.index(self._node_of_rank[rank]) != rank:
            return
        for tier in self._own:
            try:
                confirm(tier.store, checkpoint)
                prune(tier.store, keep=tier.keep, shared=False, busy=busy)
            except (OSError, CheckpointError) as error:
                _log.warning("Couldn't tidy up %s: %s", tier, error)

    def _upload_part(self, part: _Part, uploaded: "Future[bool]") -> None:
        """Copy a part to the remote tier; prune it on rank 0."""
        assert self._remote is not None
        tier, id_ = self._remote, part.manifest.id
        try:
            if part.stores:
                copy_part(part.stores[0], tier.store, part.manifest)
            else:
                write_files(tier.store, id_, part.bodies)
                write_manifest(tier.store, part.manifest)
            if self._transport.global_rank == 0:
                prune(tier.store, keep=tier.keep, shared=True)
        except Exception as error:
            # The client libraries of remote stores raise their own types.
            text = f"Couldn't upload {id_} to {tier}: {error}."
            _log.warning("%s", text)
            if tier.required:
                self._note(text)
            uploaded.set_exception(CheckpointError(text))
        else:
            uploaded.set_result(True)
        finally:
            if part.stores:
                self._uploads.remove(id_)

    def _gather(self, status: Any) -> list[Any]:
        return [
            json.loads(data) for data in self._transport.all_gather(json.dumps(status).encode())
        ]

    def _note(self, text: str) -> None:
        with self._lock:
            self._errors.append(text)
