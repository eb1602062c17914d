"""What a detector says, and how eager it is: change points and the detector's configuration.

Thresholds are Greyhound's where it gives them (change probability 0.9, means 10 % apart); hazard
and prior, which it doesn't give, were tuned on other seeds than those that figures are reported on.
"""

from dataclasses import dataclass
from enum import StrEnum

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["BocdConfig", "ChangeKind", "ChangePoint"]


class ChangeKind(StrEnum):
    """What a change of the level means."""

    SLOWDOWN = "slowdown"
    """The level rose."""
    RECOVERY = "recovery"
    """The level fell after a slowdown: the cause ended or eased."""
    IMPROVEMENT = "improvement"
    """The level fell below the healthy one: nothing to mend."""


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """A verified change of the level."""

    step: int
    """Number of `update` calls before the one that found the change: its index from 0."""
    onset_step: int
    """Index of the first value of the new level."""
    kind: ChangeKind
    """What the change means."""
    before: float
    """Median of the values before, in their own unit."""
    after: float
    """Median of the values since the onset."""
    ratio: float
    """after / before."""
    confidence: float
    """Probability that the run is short, 0 to 1."""
    healthy: float
    """Level without a fault, as known so far."""
    is_slow: bool
    """Whether the new level is still slow: False after a recovery means that the cause ended."""


@dataclass(frozen=True, kw_only=True)
class BocdConfig:
    """How eager the detector is.

    Raises:
        ConfigurationError: A value is out of range.
    """

    min_change: float = 0.10
    """Least relative difference of the levels that counts (Greyhound: 0.10)."""
    change_probability: float = 0.9
    """Least probability of a short run, 0 to 1 (Greyhound: 0.9)."""
    hazard: float = 1e-3
    """Prior probability of a change before each value, 0 to 1."""
    min_run: int = 4
    """Values that a new level must hold before it counts: shorter bursts are outliers."""
    longest_short_run: int = 40
    """Values for which a change is tried again until it is verified."""
    min_history: int = 8
    """Values, slow first ones among them, that must come before the first change that counts."""
    warmup: int = 30
    """Values in which a falling level is taken for the end of the warm-up and not reported."""
    history: int = 200
    """Values of the old level to compare with; a slower drift than this is followed silently."""

    def __post_init__(self) -> None:
        for name in ("min_change", "change_probability", "hazard"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}; it must lie between 0 and 1."
                )
        if not 2 <= self.min_run <= self.longest_short_run <= self.history:
            raise ConfigurationError(
                f"min_run {self.min_run}, longest_short_run {self.longest_short_run} and history "
                f"{self.history} must be 2 or more and ascending."
            )
        if self.min_history < self.min_run or self.warmup < 0:
            raise ConfigurationError(
                f"min_history is {self.min_history}, warmup {self.warmup}; the first must be "
                f"min_run ({self.min_run}) or more, the second 0 or more."
            )
