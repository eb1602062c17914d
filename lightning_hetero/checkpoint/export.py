"""How layer-wise checkpoints become plain Lightning ones.

Export puts all slices together into one file with `state_dict`, `optimizer_states` and whatever the
metadata holds, which `LightningModule.load_from_checkpoint` and `Trainer.fit(ckpt_path=...)` on one
device read. Optimizer state is keyed by parameter names here and by running numbers there.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.checkpoint.content import RestoredSlice, optimizer_state_dict
from lightning_hetero.checkpoint.inspection import look
from lightning_hetero.checkpoint.manifest import PartManifest
from lightning_hetero.checkpoint.recovered import Recovered
from lightning_hetero.checkpoint.recovery import recover
from lightning_hetero.checkpoint.resharding import SliceNeed
from lightning_hetero.checkpoint.tiers import Tier
from lightning_hetero.core.errors import CheckpointError

__all__ = ["export_checkpoint"]


def _whole_needs(manifests: Mapping[int, PartManifest]) -> list[SliceNeed]:
    """Return every parameter of a checkpoint, whole."""
    needs: dict[str, SliceNeed] = {}
    for manifest in manifests.values():
        for item in manifest.slices:
            rows = item.shape[item.dim] if item.shape else 1
            need = SliceNeed(item.parameter, tuple(item.shape), item.dim, 0, rows)
            needs.setdefault(item.parameter, need)
    return [needs[name] for name in sorted(needs)]


def _consolidate(recovered: Recovered) -> dict[str, Any]:
    """Return a plain Lightning checkpoint of a state whose slices are whole parameters."""
    checkpoint: dict[str, Any] = dict(recovered.metadata)
    by_name = {item.parameter: item for item in recovered.slices}
    # Buffers and whatever else isn't sliced come with the metadata.
    checkpoint["state_dict"] = dict(checkpoint.get("state_dict", {})) | {
        name: item.weight for name, item in by_name.items()
    }
    optimizers = checkpoint.get("optimizer_states")
    if optimizers is not None:
        checkpoint["optimizer_states"] = [_numbered(item, by_name) for item in optimizers]
    checkpoint.setdefault("global_step", recovered.id.step)
    checkpoint.setdefault("epoch", 0)
    return checkpoint


def export_checkpoint(
    tiers: Sequence[Tier], path: str | Path, *, step: int | None = None
) -> Recovered:
    """Write one consolidated file, in one go or not at all.

    Args:
        tiers: Where the parts are.
        path: The file to write.
        step: Which step; the newest complete one if None.

    Raises:
        CheckpointError: There is no such checkpoint, or it can't be read, or the file not written.
    """
    view = look(tiers, step=step)
    # A run that still writes may have pruned what was seen; any checkpoint of it has these.
    recovered = recover(_whole_needs(view.manifests), tiers, step=step, skip_unreadable=True)
    assert recovered is not None, "what was seen was complete"
    checkpoint = _consolidate(recovered)
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(
            f"{recovered.id} has no 'pytorch-lightning_version' in its metadata, so "
            "Lightning can't read an export of it. It was saved without a Trainer."
        )
    target = Path(path)
    temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"Can't write {target}: {error}") from error
    return recovered


def _numbered(optimizer: Mapping[str, Any], slices: Mapping[str, RestoredSlice]) -> dict[str, Any]:
    """Return one optimizer's `state_dict` with running numbers in place of names."""
    groups = optimizer["param_groups"]
    for name in (name for group in groups for name in group["params"]):
        if name not in slices:
            raise CheckpointError(
                f"The metadata's optimizer_states name the parameter {name!r}, which the "
                "checkpoint doesn't hold. Export another step."
            )
    return {**optimizer, **optimizer_state_dict(groups, slices)}
