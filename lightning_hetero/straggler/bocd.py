"""Decide when the iteration time has changed for good, from the stream of iteration times alone.

Greyhound's BOCD+V: Bayesian online change-point detection proposes a change (`run_length`), a
verification accepts it. Values are taken as logarithms, so a change is a ratio at any scale. The
paper thresholds the change probability; under a constant hazard P(run length = 0) never moves, so
the probability here is that of a *short* run.

The verification asks that the medians before and after differ by 10 %, and by more than noise
explains: the statistic is the difference of the medians in standard errors (`significance`). A run
is a burst and no level if it has almost as many values on the old side as on the new one, or if its
first values differ as spikes do. A change that isn't accepted is tried again with each further
value while its run is short.

Every threshold, its value and why. "Tuned" means on other seeds than figures are reported on:

======================  =====  =====================================================================
`min_change`            0.10   Greyhound; 0.095 is enough, for a change of 10 % is as likely to look
                               like 9.5 % as like 10.5 %
`change_probability`    0.9    Greyhound
`hazard`                0.001  One change in 1,000 iterations; tuned, insensitive
`min_run`               4      Up to 3 slow iterations (a checkpoint, a validation) are no level
`longest_short_run`     40     In the worst noise, a change of 10 % takes up to 40 values
`min_history`, `warmup` 8, 30  First iterations are slow: no change before 8, no fall before 30
`history`               200    Iterations of the old level that are compared
least `significance`    6.5    Tuned: at 6 noise is reported, at 7 faults are missed
`_RECENT`               50     Small steps and drift add up over 200 values, hardly over 50
`_AGREEING`             8      Standard deviations within which the first values of a level agree
`_DEFAULT_SCALE`        0.03   Noise where there are too few values to tell; 0.5 % to 5 % are usual
`_LEAST_SCALE`          0.002  Noise of a perfectly even stream, so that densities are finite
======================  =====  =====================================================================

Those of the proposal are in `run_length`, those of the statistic in `significance`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.run_length import RunLengthPosterior
from lightning_hetero.straggler.significance import robust_scale, significance, without_warmup

__all__ = ["BocdConfig", "BocdDetector", "ChangeKind", "ChangePoint"]

_LEAST_SIGNIFICANCE = 6.5
_RECENT = 50
_AGREEING = 8.0
_DEFAULT_SCALE = 0.03
_LEAST_SCALE = 0.002
_SCALE_EVERY = 32
"""Number of values between two estimates of the noise."""


class ChangeKind(StrEnum):
    """Meanings of a change of the level."""

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
    """The meaning of the change."""
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


class BocdDetector:
    """Tells onset and end of a slowdown in a stream of times, or of observed/predicted ratios.

    `update` is called once per iteration, in order. It is pure Python and NumPy, communicates with
    nobody and needs no clock, so any rank may run it on any stream.
    """

    def __init__(self, config: BocdConfig | None = None) -> None:
        self.config = config or BocdConfig()
        # More hypotheses than those that count as short: a change that is no longer short must have
        # left these before it reaches the last one, which stands for all older runs.
        self._posterior = RunLengthPosterior(
            hazard=self.config.hazard,
            max_run=self.config.longest_short_run + 24,
            memory=self.config.history,
        )
        self._least_shift = math.log1p(self.config.min_change)
        self._next_step = 0
        self.reset()

    def reset(self) -> None:
        """Forget all levels, as after a change of the model or data; steps are counted on."""
        self._logs: list[float] = []
        self._steps: list[int] = []
        self._num_values = 0
        self._num_in_regime = 0
        self._old_logs: list[float] = []
        self._noise: list[float] = []
        self._healthy_log: float | None = None
        self._healthy_logs: list[float] = []
        self._scale = _DEFAULT_SCALE
        self._in_first_regime = True
        self._last_rose = False

    def update(self, value: float) -> ChangePoint | None:
        """Take in the value of the next iteration; return the change it completes, if any.

        A value that is no positive finite number (a failed measurement, a clock set back) is
        counted as a step and otherwise ignored.
        """
        step = self._next_step
        self._next_step += 1
        if not (0.0 < value < math.inf):
            return None
        log_value = math.log(value)
        self._remember(log_value, step)
        self._posterior.observe(log_value)
        longest = self.config.longest_short_run
        confidence = self._posterior.short_mass(longest=longest)
        if confidence <= self.config.change_probability:
            return None
        run = self._posterior.likeliest_run(longest=longest)
        return self._examine(run, step, confidence)

    def _remember(self, log_value: float, step: int) -> None:
        if not self._num_values:
            self._posterior.restart(level=log_value, scale=self._scale)
        self._logs.append(log_value)
        self._steps.append(step)
        self._num_values += 1
        self._num_in_regime += 1
        kept = self.config.history + self.config.longest_short_run
        if len(self._logs) >= 2 * kept:
            del self._logs[:-kept], self._steps[:-kept]
        if self._num_values % _SCALE_EVERY == 0 or self._num_values in (8, 16):
            recent = self._level_logs()
            if len(recent) >= self.config.min_history:
                self._scale = max(_LEAST_SCALE, robust_scale(recent))
                self._posterior.set_prior(level=median(recent), scale=self._scale)

    def _level_logs(self, *, num_newer: int = 0) -> Sequence[float]:
        """Return the kept values of the present level without its newest, oldest first.

        While the first level is short, slow first iterations are left out: they would count as its
        noise.
        """
        config = self.config
        end = len(self._logs) - num_newer
        logs = self._logs[-self._num_in_regime : end][-config.history :]
        is_short = config.min_history <= len(logs) <= config.warmup
        return without_warmup(logs) if self._in_first_regime and is_short else logs

    def _examine(self, run: int, step: int, confidence: float) -> ChangePoint | None:
        """Verify a proposed change whose new level is `run` values old."""
        config = self.config
        num_before = self._num_in_regime - run
        if run < config.min_run or num_before < 1:
            return None
        before, after = self._before(run), self._logs[-run:]
        if not self._differs(before, after):
            return None
        shift = median(after) - median(before)
        too_early = self._in_first_regime and (
            num_before < config.min_run or self._num_values - run < config.min_history
        )
        # Then the present level begins at the run, without a report.
        if too_early or self._is_still_unfolding(shift, num_before):
            self._num_in_regime = run
            return None
        return self._report(run, step, confidence, before)

    def _is_still_unfolding(self, shift: float, num_before: int) -> bool:
        """Tell whether a change only continues the last one: the warm-up, or a slow onset."""
        if self._in_first_regime:
            return (
                shift < 0.0
                and self._num_values - self._num_in_regime + num_before < self.config.warmup
            )
        return num_before < 2 * self.config.min_history and (shift > 0.0) == self._last_rose

    def _before(self, run: int) -> list[float]:
        """Return up to `history` values of the level before the run, if need be with older ones."""
        recent = self._level_logs(num_newer=run)
        missing = self.config.history - len(recent)
        return [*self._old_logs[-missing:], *recent] if missing > 0 else list(recent)

    def _differs(self, before: list[float], after: list[float]) -> bool:
        """Tell whether the levels differ by enough, and by more than noise explains."""
        before_log, after_log = median(before), median(after)
        rises = after_log > before_log
        # A change of 10 % is as likely to look like 9.5 % as like 10.5 %.
        least = 0.95 * self._least_shift
        # Small steps and drift add up over a long memory: the change itself must be as large.
        shift = after_log - median(before[-_RECENT:])
        is_large = min(abs(after_log - before_log), shift if rises else -shift) >= least
        if self._healthy_log is not None and not rises:
            # What rose by 10 % must be able to fall, though noise makes it look like 8 %.
            is_large = is_large or after_log <= 0.5 * (self._healthy_log + before_log)
        if not is_large or self._is_burst(after, 0.5 * (before_log + after_log), rises=rises):
            return False
        missing = self.config.history - len(before)
        noise = self._noise[-missing:] if missing > 0 else []
        scale = self._scale
        if self._in_first_regime and len(before) < self.config.min_history:
            # The scale was estimated with slow first iterations.
            scale = max(_DEFAULT_SCALE, robust_scale(before))
        found = significance(before, after, scale=scale, noise=noise)
        return found >= _LEAST_SIGNIFICANCE

    def _is_burst(self, after: list[float], middle: float, *, rises: bool) -> bool:
        """Tell whether a run may be just outliers and the values between them.

        Each value on the old side cancels one on the new side, and while a run is short, enough of
        its values must agree: spikes differ in height.
        """
        least = self.config.min_run
        num_beyond = sum((value > middle) == rises for value in after)
        if 2 * num_beyond - len(after) < least:
            return True
        center, reach = median(after), _AGREEING * self._scale
        num_agreeing = sum(abs(value - center) <= reach for value in after)
        return len(after) < 2 * least and num_agreeing < least

    def _report(self, run: int, step: int, confidence: float, before: list[float]) -> ChangePoint:
        after = self._logs[-run:]
        before_log, after_log = median(before), median(after)
        was_slow = self._healthy_log is not None
        healthy = before_log if self._healthy_log is None else self._healthy_log
        still_slow = after_log >= healthy + 0.5 * self._least_shift
        rises = after_log > before_log
        if rises:
            kind = ChangeKind.SLOWDOWN
            if not was_slow:
                self._healthy_logs = before
        else:
            kind = ChangeKind.RECOVERY if was_slow else ChangeKind.IMPROVEMENT
        is_back = not rises and abs(after_log - healthy) < self._least_shift
        self._old_logs = self._healthy_logs if is_back and was_slow else []
        self._noise = [value - before_log for value in before]
        self._healthy_log = healthy if still_slow else None
        self._num_in_regime = run
        self._in_first_regime = False
        self._last_rose = rises
        return ChangePoint(
            step=step,
            onset_step=self._steps[-run],
            kind=kind,
            before=math.exp(before_log),
            after=math.exp(after_log),
            ratio=math.exp(after_log - before_log),
            confidence=confidence,
            healthy=math.exp(
                healthy if still_slow or kind is not ChangeKind.IMPROVEMENT else after_log
            ),
            is_slow=still_slow,
        )
