"""Measure for how long no lasting tier (a disk or a remote store) has taken a checkpoint."""

import time
from collections import deque
from dataclasses import dataclass, field

from lightning_hetero.checkpoint.manifest import CheckpointId

_NUM_REASONS = 8
"""Number of failures that are kept."""


@dataclass
class Lasting:
    """Measures for how long no lasting tier has taken a checkpoint that was begun."""

    begun: CheckpointId | None = None
    """The newest checkpoint that was begun."""
    newest: CheckpointId | None = None
    """The newest checkpoint of which a lasting tier has all ranks' parts."""
    since_s: float | None = None
    """Monotonic time since which the newest checkpoint has been missing in lasting tiers. It
    restarts when an older one arrives there. None if the newest one has arrived."""
    reasons: "deque[str]" = field(default_factory=lambda: deque(maxlen=_NUM_REASONS))
    """The last failures since a lasting tier took a checkpoint."""

    def begin(self, checkpoint: CheckpointId) -> None:
        """Note that a checkpoint is being written."""
        self.begun = checkpoint
        if self.since_s is None:
            self.since_s = time.monotonic()

    def reach(self, checkpoint: CheckpointId) -> None:
        """Note that a lasting tier has all of a checkpoint's parts."""
        if self.newest is None or checkpoint > self.newest:
            self.newest = checkpoint
            self.since_s = None if checkpoint == self.begun else time.monotonic()
            self.reasons.clear()

    def note(self, *reasons: str) -> None:
        """Note why a part wasn't stored."""
        self.reasons.extend(text for text in reasons if text not in self.reasons)

    @property
    def waited_s(self) -> float:
        """Seconds for which a checkpoint has been missing in lasting tiers; 0 if none is."""
        since_s = self.since_s
        return 0.0 if since_s is None else time.monotonic() - since_s
