"""How long training has gone on without a checkpoint in a place that lasts.

One failed save is no reason to end training: the next one may succeed. But if no disk and no store
takes any, what is trained meanwhile is lost with the next fault, and the user must hear of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.core.errors import CheckpointError

__all__ = ["LastingCopies"]

_MAX_REASONS = 8


@dataclass
class LastingCopies:
    """Which checkpoints were begun, which of them a lasting tier has taken from all ranks."""

    within_s: float
    """Seconds after which it is an error that no lasting tier takes any."""
    clock: Callable[[], float] = time.monotonic
    begun: CheckpointId | None = None
    """The newest one that was begun."""
    newest: CheckpointId | None = None
    """The newest one that a lasting tier has."""
    _reached_s: float = 0.0
    _missing: list[tuple[CheckpointId, float]] = field(default_factory=list)
    _reasons: dict[str, None] = field(default_factory=dict)

    def begin(self, checkpoint: CheckpointId) -> None:
        """A checkpoint was begun."""
        self.begun = checkpoint
        self._missing.append((checkpoint, self.clock()))

    def reach(self, checkpoint: CheckpointId) -> bool:
        """A lasting tier has a checkpoint's parts of all ranks; return whether that is news."""
        if self.newest is not None and checkpoint <= self.newest:
            return False
        self.newest, self._reached_s = checkpoint, self.clock()
        self._missing = [item for item in self._missing if item[0] > checkpoint]
        self._reasons.clear()
        return True

    def note(self, reason: str) -> None:
        """Something failed."""
        self._reasons.pop(reason, None)
        self._reasons[reason] = None
        while len(self._reasons) > _MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]

    @property
    def reasons(self) -> str:
        """What has failed since, the last few."""
        return " ".join(self._reasons)

    @property
    def waited_s(self) -> float:
        """Seconds since lasting tiers should have had one: 0 where nothing is missing."""
        if not self._missing:
            return 0.0
        return self.clock() - max(self._reached_s, self._missing[0][1])

    def error(self, missing: CheckpointId) -> CheckpointError:
        """Return the error that says what is missing, since when, and why."""
        since = "at all" if self.newest is None else f"since {self.newest}"
        return CheckpointError(
            f"No lasting place, disk or store, has {missing} from all ranks, nor any other "
            f"checkpoint {since}, for {self.waited_s:.0f} s. {self.reasons} Make room "
            "or mend the connection; if storage is only slow, allow more time (lasting_within)."
        )
