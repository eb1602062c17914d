"""Which run a place belongs to: an identity made once, kept beside the checkpoints and in each.

The lasting places say which run goes on. What they don't know, such as what an earlier run left in
shared memory, is no part of it.
"""

import json
import logging
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.core.errors import CheckpointError

__all__ = ["RUN_FILE", "mark_places", "new_run", "read_run"]

_log = logging.getLogger(__name__)

RUN_FILE = "run.json"
"""Names the run at the top of every lasting place."""


def new_run() -> str:
    """Return a new identity; later ones sort behind earlier ones."""
    return f"{datetime.now(UTC):%Y%m%dt%H%M%S%f}-{uuid.uuid4().hex[:8]}"


def read_run(store: Store) -> str:
    """Return the run that a place belongs to; the store's own error if it can't be read.

    Raises:
        CheckpointError: The file is there but torn.
    """
    data = store.read(RUN_FILE)
    try:
        run = str(json.loads(data)["run"])
        if CheckpointId.parse(CheckpointId(0, 0, run).folder) is None:
            raise ValueError(f"{run!r} is no name of a run")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{store}/{RUN_FILE} is torn: {error!r}. Write "
            '{"run": "..."} into it, with what follows the last number in the names of the folders '
            "beside it, or delete it if there are none."
        ) from error
    return run


def mark_places(tiers: Sequence[Tier], run: str) -> None:
    """Write down in lasting places which run they belong to from now on.

    Raises:
        CheckpointError: The shared place can't be written. It says which run goes on, so it must
            know; a disk may be full today.
    """
    for tier in tiers:
        if tier.kind is TierKind.MEMORY:
            continue
        try:
            if RUN_FILE not in tier.store.list() or read_run(tier.store) != run:
                tier.store.write(RUN_FILE, [json.dumps({"run": run}).encode()])
        except Exception as error:
            # Stores raise their client library's own types.
            text = f"Couldn't write {RUN_FILE} to {tier}: {error}"
            if tier.kind is TierKind.REMOTE:
                raise CheckpointError(text) from error
            _log.warning("%s", text)
