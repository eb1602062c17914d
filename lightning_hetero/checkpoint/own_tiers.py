"""One rank's part on its way into the node's own tiers.

A tier that fails keeps neither the others nor the peers from going on, and what it had taken of the
part is deleted, so that a full disk doesn't fill up with what is of no use.
"""

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_hetero.checkpoint.background import Progress
from lightning_hetero.checkpoint.completeness import look_at_parts
from lightning_hetero.checkpoint.encoding import FileBody, encode_part, make_manifest
from lightning_hetero.checkpoint.manifest import (
    WEIGHT,
    CheckpointId,
    PartManifest,
    manifest_name,
)
from lightning_hetero.checkpoint.parts import write_files, write_manifest
from lightning_hetero.checkpoint.snapshot import Snapshot
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import Tier, TierKind, confirm, prune, remove_files
from lightning_hetero.core.errors import CheckpointError

__all__ = ["OwnTiers", "Part", "parts_held"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """This rank's part once it is encoded."""

    bodies: Sequence[FileBody]
    """Its files, readable until the snapshot is released."""
    manifest: PartManifest
    stores: Mapping[TierKind, Store]
    """The own tiers that have it, fastest first."""
    errors: Sequence[str] = field(default_factory=tuple)
    """Why the others don't."""

    @property
    def source(self) -> Store | None:
        """The fastest own tier that has it."""
        return next(iter(self.stores.values()), None)


class OwnTiers:
    """The tiers that only this node's ranks write to.

    Args:
        tiers: They, fastest first.
        block_bytes: Bytes that one checksum covers.
        progress: Is told of every chunk that is written.
    """

    def __init__(self, tiers: Sequence[Tier], *, block_bytes: int, progress: Progress) -> None:
        self.tiers = tuple(tiers)
        self._block_bytes = block_bytes
        self._progress = progress

    @property
    def kinds(self) -> list[TierKind]:
        """What there is, fastest first."""
        return [tier.kind for tier in self.tiers]

    def write(self, snapshot: Snapshot, metadata: Mapping[str, bytes]) -> Part:
        """Write a part into all tiers that take it.

        Raises:
            CheckpointError: The state isn't finite or can't be kept.
        """
        snapshot.wait()
        _check_finite(snapshot)
        content = snapshot.content
        bodies, slices = encode_part(snapshot, metadata, block_bytes=self._block_bytes)
        stores: dict[TierKind, Store] = {}
        errors: list[str] = []
        manifest: PartManifest | None = None
        for tier in self.tiers:
            try:
                write_files(tier.store, content.id, bodies, self._progress)
                manifest = manifest or make_manifest(content, bodies, slices)
                write_manifest(tier.store, manifest)
                stores[tier.kind] = tier.store
            except Exception as error:
                # Whatever a store raises, the next tier may take the part.
                text = f"Rank {content.global_rank} couldn't write {content.id} to {tier}: {error}."
                _log.warning("%s", text)
                errors.append(text)
                names = [f"{content.id.folder}/{body.name}" for body in bodies]
                with contextlib.suppress(Exception):
                    remove_files(
                        tier.store, [manifest_name(content.id, content.global_rank), *names]
                    )
        manifest = manifest or make_manifest(content, bodies, slices)
        return Part(bodies, manifest, stores, errors)

    def settle(
        self,
        checkpoint: CheckpointId,
        sound: Collection[TierKind],
        *,
        busy: Collection[CheckpointId],
        superseded: Mapping[TierKind, Collection[CheckpointId]],
    ) -> None:
        """Note a checkpoint in the tiers that have it from all ranks, delete what is old there."""
        for tier in self.tiers:
            try:
                # Where this one isn't, an older one may be the newest: this node can't know.
                keep = tier.keep if tier.kind in sound else None
                if keep is not None:
                    confirm(tier.store, checkpoint)
                prune(
                    tier.store,
                    keep=keep,
                    shared=False,
                    busy=busy,
                    superseded=superseded[tier.kind],
                )
            except Exception as error:
                # What isn't deleted now is deleted another time.
                _log.warning("Couldn't tidy up %s: %s", tier, error)
            self._progress.tick()


def parts_held(store: Store, checkpoint: CheckpointId) -> set[int]:
    """Look again into a store: which parts of a checkpoint are there with all their files."""
    try:
        found = look_at_parts(store, store.list(), [checkpoint])
    except Exception as error:
        # Stores raise their client library's own types; another tier may have it all.
        _log.warning("Couldn't look into %s again: %s", store, error)
        return set()
    return {copy.part for copy in found.copies if not copy.missing}


def _check_finite(snapshot: Snapshot) -> None:
    for name in _not_finite(snapshot):
        raise CheckpointError(
            f"{name} isn't finite at {snapshot.content.id}, which is therefore not saved. Find the "
            "step that made it so: a loss or a gradient was NaN or infinite."
        )


def _not_finite(snapshot: Snapshot) -> Iterator[str]:
    for (index, key), tensor in snapshot.tensors.items():
        # The bounds are NaN if anything is; float8 has none.
        if not tensor.numel() or not tensor.is_floating_point() or tensor.element_size() == 1:
            continue
        item = snapshot.content.slices[index]
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        # A mask that never trains may be infinite, and so may what an optimizer keeps.
        is_trained = key == WEIGHT and bool(item.state or item.whole_state)
        if math.isnan(low) or (is_trained and math.isinf(high - low)):
            yield f"{item.parameter}'s {key}"
