"""Judge a recovered state by its first steps, compared with what is known of earlier ones.

A copy may be corrupt although all its checksums are right, if it was corrupt when it was written.
The first steps show it: the loss is no number, or gradients are far larger than before. A copy that
fails is quarantined, not deleted: a file in the checkpoint's folder says so, and while it is there
the copy counts as absent (`tiers`). Then the next copy or the next older checkpoint is used. If a
step fails from several of them, its data is at fault, not the checkpoints: the copies count again,
and the tries stay on record.
"""

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import QUARANTINED, Tier
from lightning_hetero.core.errors import CheckpointError

__all__ = [
    "MAX_TRIES",
    "FailedTry",
    "Probation",
    "StepFacts",
    "acquit",
    "failed_alike",
    "put_in_quarantine",
    "read_failed_tries",
]

MAX_TRIES = 3
"""Number of copies from which a step must fail to show that its data is at fault."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts of one step by which it is judged."""

    step: int
    """Optimizer steps taken, this one included."""
    loss: float | None
    """Its loss, None if unknown."""
    gradient_norm: float | None
    """Norm of all gradients before clipping, None if unknown."""

    @property
    def is_finite(self) -> bool:
        """Whether nothing that is known is NaN or infinite."""
        return all(
            value is None or math.isfinite(value) for value in (self.loss, self.gradient_norm)
        )


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A copy that failed on probation."""

    checkpoint: CheckpointId
    place: str
    """Which tier it came from."""
    facts: StepFacts
    reason: str
    samples: str
    """Data that the step was trained on."""

    def encode(self) -> bytes:
        """Return it as JSON."""
        facts = [self.facts.step, _text(self.facts.loss), _text(self.facts.gradient_norm)]
        body = [self.checkpoint.folder, self.place, facts, self.reason, self.samples]
        return json.dumps(body).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse what `encode` returns; CheckpointError if it is torn."""
        try:
            folder, place, (step, loss, norm), reason, samples = json.loads(data)
            facts = StepFacts(int(step), _number(loss), _number(norm))
            checkpoint = CheckpointId.parse(folder)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"What failed on probation can't be read: {error}") from error
        if checkpoint is None:
            raise CheckpointError(f"{folder!r} failed on probation, but is no checkpoint.")
        return cls(checkpoint, place, facts, reason, samples)

    def __str__(self) -> str:
        return f"{self.checkpoint} from {self.place}: {self.reason}"


@dataclass(frozen=True)
class Probation:
    """Judges the first steps after a recovery, and those at which other copies failed.

    Args:
        start: Step of the checkpoint.
        known: Facts of earlier steps; the last entry for a step counts.
        failed: Earlier tries that failed.
        num_steps: Number of steps on probation.
        tolerance: How many times larger than before gradients may be.
    """

    start: int
    known: Iterable[StepFacts] = ()
    failed: Collection[FailedTry] = ()
    num_steps: int = 8
    tolerance: float = 10.0
    _norms: Mapping[int, float] = field(init=False)
    _worst_loss: float = field(init=False)

    def __post_init__(self) -> None:
        known = [*self.known, *(item.facts for item in self.failed)]
        facts = [item for item in known if item.is_finite]
        norms = {item.step: item.gradient_norm for item in facts if item.gradient_norm}
        losses = [item.loss for item in facts if item.loss is not None]
        object.__setattr__(self, "_norms", norms)
        object.__setattr__(self, "_worst_loss", max(losses, default=-math.inf))

    def covers(self, step: int) -> bool:
        """Return whether a step is to be judged."""
        is_early = self.start < step <= self.start + self.num_steps
        return is_early or any(item.facts.step == step for item in self.failed)

    def doubt(self, facts: StepFacts) -> str:
        """Return why the state can't be trusted, given a step's facts; "" if it can."""
        if not facts.is_finite:
            return (
                f"step {facts.step} isn't finite: loss {facts.loss}, gradient norm "
                f"{facts.gradient_norm}"
            )
        if facts.gradient_norm is None or not self._norms:
            return ""
        if facts.loss is not None and facts.loss <= self._worst_loss:
            # Gradients also grow where layers thaw, but what is corrupt predicts worse than ever.
            return ""
        # The same step, if a former try got there, says more than what the steps before were like.
        usual = self._norms.get(facts.step, max(self._norms.values()))
        if facts.gradient_norm > self.tolerance * usual:
            return (
                f"the gradient norm of step {facts.step} is {facts.gradient_norm:.3g}, where "
                f"{usual:.3g} was the most before"
            )
        return ""


def failed_alike(failed: Collection[FailedTry], new: FailedTry) -> list[FailedTry]:
    """Return all tries, the new one included, that weren't finite at the new one's step."""
    if new.facts.is_finite:
        return [new]
    step = new.facts.step
    earlier = {
        (item.checkpoint, item.place): item
        for item in failed
        if item.facts.step == step and not item.facts.is_finite
    }
    earlier[new.checkpoint, new.place] = new
    return list(earlier.values())


def _text(value: float | None) -> str | None:
    # JSON has neither NaN nor infinity.
    return None if value is None else repr(value)


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


_log = logging.getLogger(__name__)
_ACQUITTED = "acquitted"


def put_in_quarantine(tiers: Iterable[Tier], failed: FailedTry) -> None:
    """Quarantine a copy in the tiers that it came from; log it if that can't be written."""
    for tier in tiers:
        if tier.kind.name.lower() == failed.place:
            try:
                tier.store.write(f"{failed.checkpoint.folder}/{QUARANTINED}", [failed.encode()])
            except Exception as error:
                # Stores raise their client library's own types.
                _log.warning("%s of %s isn't put aside: %s", failed.checkpoint, tier, error)


def acquit(tiers: Iterable[Tier], step: int) -> None:
    """Lift the quarantine of copies that failed at a step; the failures stay on record."""
    for tier in tiers:
        for name, failed in _marks_in(tier.store):
            if failed.facts.step == step and name.endswith(f"/{QUARANTINED}"):
                folder = name.rpartition("/")[0]
                tier.store.write(f"{folder}/{_ACQUITTED}", [failed.encode()])
                tier.store.remove([name])


def read_failed_tries(tiers: Iterable[Tier], run: str) -> list[FailedTry]:
    """Return the failed tries of a run that tiers have on record."""
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
