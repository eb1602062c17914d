"""Decide when the iteration time has changed for good, from the stream of iteration times alone.

Greyhound's BOCD+V: Bayesian online change-point detection proposes a change, a verification accepts
it only when the levels before and after differ by 10 % or more. Values are taken as logarithms, so
a change is a ratio at any scale. The paper thresholds the change probability; under a constant
hazard P(run length = 0) never moves, so the probability here is that of a *short* run.

The verification compares medians, asks for more than the noise of medians of that many values (as
seen in the values before, also those of the last level, so correlated noise counts), tells bursts
of outliers from a level, and is tried again with each further value.
"""

import math
from collections.abc import Sequence

from lightning_hetero.straggler.change import BocdConfig, ChangeKind, ChangePoint
from lightning_hetero.straggler.run_length import RunLengthPosterior
from lightning_hetero.straggler.verification import (
    is_significant,
    median,
    robust_scale,
    without_outliers,
    without_warmup,
)

__all__ = ["BocdDetector"]


_DEFAULT_SCALE = 0.03
_LEAST_SCALE = 0.002
_SCALE_EVERY = 32
_RECENT = 50
"""Values just before a change that it is also compared with."""
_MANY = 20
"""Values of a new level that make its median good to a percent or so."""


class BocdDetector:
    """Tells onset and end of a slowdown in a stream of times, or of observed/predicted ratios.

    `update` is called once per iteration, in order. It is pure Python and NumPy, communicates with
    nobody and needs no clock, so any rank may run it on any stream.
    """

    def __init__(self, config: BocdConfig | None = None) -> None:
        self.config = config or BocdConfig()
        # Twice as many hypotheses as count as short: a change that is no longer short must have
        # left the short ones before it reaches the last, which stands for all older ones.
        self._posterior = RunLengthPosterior(
            hazard=self.config.hazard,
            max_run=self.config.longest_short_run + 24,
            memory=self.config.history,
        )
        self._least_shift = math.log1p(self.config.min_change)
        self._next_step = 0
        self.reset()

    def reset(self) -> None:
        """Forget all levels, as after a change of the model or of the data: the count goes on."""
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

    @property
    def is_slow(self) -> bool:
        """Whether a reported slowdown hasn't ended."""
        return self._healthy_log is not None

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
        """Return what is kept of the present level but for its newest values, oldest first.

        While the first level is short, slow first iterations would pass for its noise: they aren't
        part of it.
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
        if too_early or self._is_still_unfolding(shift, num_before):
            self._settle(run)
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
        """Return the values of the level before the run; a healthy level's memory is long."""
        recent = self._level_logs(num_newer=run)
        missing = self.config.history - len(recent)
        return [*self._old_logs[-missing:], *recent] if missing > 0 else list(recent)

    def _differs(self, before: list[float], after: list[float]) -> bool:
        """Tell whether the levels differ by enough, and by more than noise explains."""
        before_log, after_log = median(before), median(after)
        shift = after_log - before_log
        if abs(shift) < 0.5 * self._least_shift:
            return False
        # A change of 10 % is as likely to look like 9.5 % as like 10.5 %; wait, then allow for it.
        least = self._least_shift * (0.95 if len(after) >= _MANY else 1.0)
        # Small steps and drift add up over a long memory: the change itself must be as large.
        recent_shift = after_log - median(before[-_RECENT:])
        enough = min(abs(shift), recent_shift * math.copysign(1.0, shift)) >= least
        if self._healthy_log is not None and shift < 0.0:
            # What rose by 10 % must be able to fall, though noise makes it look like 8 %.
            enough = enough or after_log <= 0.5 * (self._healthy_log + before_log)
        middle = 0.5 * (before_log + after_log)
        if not enough or self._is_burst(after, middle, rises=shift > 0.0):
            return False
        missing = self.config.history - len(before)
        noise = self._noise[-missing:] if missing > 0 else []
        scale = self._scale
        if self._in_first_regime and len(before) < self.config.min_history:
            # The scale was learnt with slow first iterations.
            scale = max(_DEFAULT_SCALE, robust_scale(before))
        return is_significant(before, after, scale=scale, noise=noise)

    def _is_burst(self, after: list[float], middle: float, *, rises: bool) -> bool:
        """Tell whether a run may be outliers and the values between them.

        Each value back on the old side makes up for one on the new side, and while a run is short,
        enough of its values must agree: spikes differ in height.
        """
        least = self.config.min_run
        num_beyond = sum((value > middle) == rises for value in after)
        if 2 * num_beyond - len(after) < least:
            return True
        return len(after) < 2 * least and len(without_outliers(after, scale=self._scale)) < least

    def _settle(self, run: int) -> None:
        """Let the present level begin at its last `run` values, without a report."""
        self._num_in_regime = run

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
