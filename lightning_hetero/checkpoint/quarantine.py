"""Copies of checkpoints that failed on probation are put aside, not deleted.

A file in the checkpoint's folder of a tier says so. While it is there, the copy counts as nothing
(`completeness`). Once the step's data turns out to be at fault, the copies are good again; what was
tried stays on record.
"""

import logging
from collections.abc import Iterable

from lightning_hetero.checkpoint.completeness import QUARANTINED
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.probation import FailedTry
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import Tier
from lightning_hetero.core.errors import CheckpointError

__all__ = ["acquit", "put_in_quarantine", "read_failed_tries"]

_log = logging.getLogger(__name__)
_ACQUITTED = "acquitted"


def put_in_quarantine(tiers: Iterable[Tier], failed: FailedTry) -> None:
    """Put a copy aside in the tiers that are its place; what can't be written is logged."""
    for tier in tiers:
        if tier.kind.name.lower() == failed.place:
            try:
                tier.store.write(f"{failed.checkpoint.folder}/{QUARANTINED}", [failed.encode()])
            except Exception as error:
                # Stores raise their client library's own types.
                _log.warning("%s of %s isn't put aside: %s", failed.checkpoint, tier, error)


def acquit(tiers: Iterable[Tier], step: int) -> None:
    """Take back what was put aside because of a step; it stays on record."""
    for tier in tiers:
        for name, failed in _marks_in(tier.store):
            if failed.facts.step == step and name.endswith(f"/{QUARANTINED}"):
                folder = name.rpartition("/")[0]
                tier.store.write(f"{folder}/{_ACQUITTED}", [failed.encode()])
                tier.store.remove([name])


def read_failed_tries(tiers: Iterable[Tier], run: str) -> list[FailedTry]:
    """Return what failed on probation in a run, as far as tiers tell."""
    found = [failed for tier in tiers for _, failed in _marks_in(tier.store)]
    return [item for item in found if item.checkpoint.run == run]


def _marks_in(store: Store) -> list[tuple[str, FailedTry]]:
    marks = []
    try:
        for name in store.list():
            folder, _, leaf = name.rpartition("/")
            if leaf in (QUARANTINED, _ACQUITTED) and CheckpointId.parse(folder) is not None:
                marks.append((name, FailedTry.decode(store.read(name))))
    except (OSError, CheckpointError) as error:
        _log.warning("What failed before in %s can't be read: %s", store, error)
    return marks
