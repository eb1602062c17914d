"""Detect lasting changes of the iteration time, from the sequence of iteration times alone.

Greyhound's BOCD+V: Bayesian online change-point detection (Adams and MacKay) proposes a change, and
a verification accepts or rejects it. It uses logarithms of the values, so a change is a ratio at
any scale.

A hypothesis says "the current run began r values ago". Before every value a new run begins with a
constant probability, the hazard. The posterior over r follows from how well each hypothesis
predicted the value: by a Student-t, since values are normal with unknown mean and variance
(normal-inverse-gamma prior). Every hypothesis may also take a value for an outlier, with a fixed
density. So a spike says nothing about the run length, and changes a hypothesis only by the
probability that it isn't an outlier. A change is proposed when the run is probably *short*. (The
paper uses a threshold on P(run length = 0), which never changes under a constant hazard.)

The verification asks that the medians before and after differ by 10 %, and by more than noise
explains. Greyhound compares means; iteration times have outliers and correlated noise, so with
medians m₀, m₁ of n₀ values before and n₁ after a change the statistic is ::

    z = |m₁ - m₀| / (1.2533 σ √(1/n₀ + 1/n₁) √((1+ρ)/(1-ρ)) (1 + (16/n₀)²))

Medians make the error of normal values 1.2533 = √(π/2) times larger; σ is estimated from the median
absolute deviation of the values before, ρ is their lag-1 correlation. σ and ρ are uncertain if
there are few values, as in Student's t; the last factor accounts for that. It is left out for
changes by half or more, which noise produces more rarely than real faults do.

A run is a burst, not a level, if almost as many of its values are on the old side as on the new
one, if such values were usual before, or if its first values differ. A change that isn't accepted
is verified again with each further value as long as its run is short. Thresholds called tuned were
tuned on other seeds than those of the published figures.
"""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.straggler.events import ChangeEvent, ChangeKind

_LEAST_SHIFT = math.log1p(0.10)
"""Least difference of two levels' logarithms that counts: 10 % (Greyhound)."""
_LEAST_SEEN = 0.95 * _LEAST_SHIFT
"""Least difference that is accepted in noisy values: half of all changes of exactly 10 % look
smaller than that."""
_CHANGE_PROBABILITY = 0.9
"""Least probability of a short run (Greyhound)."""
_HAZARD = 1e-3
"""Probability of a change: one in 1,000 iterations; tuned, insensitive."""
_MIN_RUN = 4
"""Least number of values of a level: 3 slow iterations may be a checkpoint or validation."""
_LONGEST_SHORT_RUN = 40
"""Number of values up to which a run is short: with the worst noise, a change of 10 % takes up to
40 to verify."""
_MIN_HISTORY, _WARMUP = 8, 30
"""First iterations are slow: no change counts before value 8, no fall is reported before 30."""
_HISTORY = 200
"""Number of old values to compare with; a drift slower than this is followed without a report."""
_LEAST_SIGNIFICANCE = 6.5
"""Tuned: at 6 noise is reported, at 7 faults are missed."""
_RECENT = 50
"""Number of newest old values that a change must differ from, too: small steps and drift add up
over 200 values, but hardly over 50."""
_AGREEING = 8.0
"""Number of standard deviations within which the first values of a level agree."""
_LEAST_CHANCE = 0.002
"""Expected number of times that values usual before come together as in a run."""
_DEFAULT_SCALE, _LEAST_SCALE = 0.03, 0.002
"""The noise to assume for few values (0.5 % to 5 % are usual), and the least noise of all."""
_SCALE_EVERY = 32
"""Number of values between two estimates of the noise."""
_NORMAL_MAD = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
_FEW, _DOUBTFUL = 8, 16.0
"""Number of values from which their own spread is used, and number at which the error doubles.
Tuned."""
_LARGE = math.log(1.5)
_LEAST_CORRELATED, _HIGHEST_CORRELATION = 32, 0.9
"""Least number of values for a correlation; a higher correlation is drift, which would hide all
changes."""
_WARMUP_DEVIATIONS, _LEAST_WARMUP_SCALE = 5.0, 0.005
"""A first iteration that exceeds later ones by more standard deviations than this is warm-up."""
_PRIOR_ALPHA = 2.0
"""A new run's variance counts as known from four values, the fewest that give it a finite mean."""
_PRIOR_MEAN_SD = 1.0
"""Standard deviation of a new run's level, in logarithms: e times faster or slower is usual."""
_OUTLIER_DENSITY = 0.01
"""Density of an outlier's logarithm: a value less likely in all runs tells nothing. Tuned."""
_TINY = 1e-290


class BocdDetector:
    """Detects the begin and end of a slowdown in times, or in observed/predicted ratios.

    `update` is called once per iteration, in order. It is pure Python and NumPy, doesn't
    communicate and needs no clock, so any rank may run it on any sequence.
    """

    def __init__(self) -> None:
        self._posterior = _RunLengths()
        self._next_step = 0
        self.reset()

    def reset(self) -> None:
        """Forget all levels, as after a change of the model or data; steps are still counted."""
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

    def update(self, value: float, step: int | None = None) -> ChangeEvent | None:
        """Process the value of the next iteration; return the change it completes, or None.

        A value that isn't a positive finite number (a failed measurement, a clock that was set
        back) counts as a step and is otherwise ignored.

        Args:
            value: Time of the iteration, or any other positive level.
            step: Number of the iteration; None counts calls from 0.
        """
        step = self._next_step if step is None else step
        self._next_step = step + 1
        if not (0.0 < value < math.inf):
            return None
        log_value = math.log(value)
        self._remember(log_value, step)
        run = self._posterior.observe(log_value)
        return self._examine(run, step) if run >= _MIN_RUN else None

    def _remember(self, log_value: float, step: int) -> None:
        if not self._num_values:
            self._posterior.restart(level=log_value, scale=self._scale)
        self._logs.append(log_value)
        self._steps.append(step)
        self._num_values += 1
        self._num_in_regime += 1
        kept = _HISTORY + _LONGEST_SHORT_RUN
        if len(self._logs) >= 2 * kept:
            del self._logs[:-kept], self._steps[:-kept]
        if self._num_values % _SCALE_EVERY == 0 or self._num_values in (8, 16):
            recent = self._level_logs()
            if len(recent) >= _MIN_HISTORY:
                self._scale = max(_LEAST_SCALE, _robust_scale(recent))
                self._posterior.set_prior(level=median(recent), scale=self._scale)

    def _level_logs(self, *, num_newer: int = 0) -> Sequence[float]:
        """Return the known values of the present level without its newest ones, oldest first.

        While the first level is short, slow first iterations are left out, because they would count
        as its noise.
        """
        end = len(self._logs) - num_newer
        logs = self._logs[-self._num_in_regime : end][-_HISTORY:]
        is_short = _MIN_HISTORY <= len(logs) <= _WARMUP
        return _without_warmup(logs) if self._in_first_regime and is_short else logs

    def _examine(self, run: int, step: int) -> ChangeEvent | None:
        """Verify a proposed change whose new level is `run` values old."""
        num_before = self._num_in_regime - run
        if num_before < 1:
            return None
        recent, after = self._level_logs(num_newer=run), self._logs[-run:]
        # If a level has returned after a fault, its older values count, too.
        before = [*self._old_logs, *recent][-_HISTORY:]
        if not self._differs(before, after):
            return None
        shift = median(after) - median(before)
        too_early = self._in_first_regime and (
            num_before < _MIN_RUN or self._num_values - run < _MIN_HISTORY
        )
        # In that case the present level begins with this run, and nothing is reported.
        if too_early or self._is_still_unfolding(shift, num_before):
            self._num_in_regime = run
            return None
        return self._report(run, step, before)

    def _is_still_unfolding(self, shift: float, num_before: int) -> bool:
        """Tell whether a change only continues the last one: the warm-up, or a slow onset."""
        if self._in_first_regime:
            return shift < 0.0 and self._num_values - self._num_in_regime + num_before < _WARMUP
        return num_before < 2 * _MIN_HISTORY and (shift > 0.0) == self._last_rose

    def _differs(self, before: list[float], after: list[float]) -> bool:
        """Tell whether the levels differ by enough, and by more than noise explains."""
        before_log, after_log = median(before), median(after)
        rises = after_log > before_log
        # Small steps and drift add up over a long time: the change itself must be large.
        shift = after_log - median(before[-_RECENT:])
        is_large = min(abs(after_log - before_log), shift if rises else -shift) >= _LEAST_SEEN
        if self._healthy_log is not None and not rises:
            # A level that rose by 10 % must be able to fall again, even if that looks like 8 %.
            is_large = is_large or after_log <= 0.5 * (self._healthy_log + before_log)
        if not is_large or self._is_burst(before, after):
            return False
        noise = self._noise[len(before) - _HISTORY :] if len(before) < _HISTORY else []
        scale = self._scale
        if self._in_first_regime and len(before) < _MIN_HISTORY:
            # The scale was estimated with slow first iterations.
            scale = max(_DEFAULT_SCALE, _robust_scale(before))
        return _significance(before, after, scale=scale, noise=noise) >= _LEAST_SIGNIFICANCE

    def _is_burst(self, before: list[float], after: list[float]) -> bool:
        """Tell whether a run may be only outliers and values between them.

        Each value on the old side cancels one on the new side; values that were usual before come
        together by chance. Of a short run enough values must also agree: spikes differ, and so do
        those of a level that is still rising.
        """
        center, old = median(after), median(before)
        is_new = [(v > 0.5 * (old + center)) == (center > old) for v in (*before, *after)]
        num_before, excess = len(before), 2 * sum(is_new[len(before) :]) - len(after)
        by_chance = num_before * (sum(is_new[:num_before]) / num_before) ** max(excess, 0)
        is_chance = excess < _MIN_RUN or by_chance > _LEAST_CHANCE
        num_agreeing = sum(abs(value - center) <= _AGREEING * self._scale for value in after)
        return is_chance or (len(after) < 2 * _MIN_RUN and num_agreeing < _MIN_RUN)

    def _report(self, run: int, step: int, before: list[float]) -> ChangeEvent:
        before_log, after_log = median(before), median(self._logs[-run:])
        was_slow = self._healthy_log is not None
        healthy = before_log if self._healthy_log is None else self._healthy_log
        rises = after_log > before_log
        kind = ChangeKind.RECOVERY if was_slow else ChangeKind.IMPROVEMENT
        if rises:
            kind = ChangeKind.SLOWDOWN
            self._healthy_logs = self._healthy_logs if was_slow else before
        is_back = was_slow and not rises and abs(after_log - healthy) < _LEAST_SHIFT
        self._old_logs = self._healthy_logs if is_back else []
        self._noise = [value - before_log for value in before]
        self._healthy_log = healthy if after_log >= healthy + 0.5 * _LEAST_SHIFT else None
        self._num_in_regime = run
        self._in_first_regime, self._last_rose = False, rises
        return ChangeEvent(
            step=step,
            onset_step=self._steps[-run],
            kind=kind,
            before=math.exp(before_log),
            after=math.exp(after_log),
        )


class _RunLengths:
    """The posterior of the run length after each value, and each hypothesis's statistics.

    Hypothesis r has seen the last r values; `mass[r]` is its probability.
    """

    def __init__(self) -> None:
        # More hypotheses than count as short. The last one stands for all longer runs; a run must
        # have stopped being short before it gets there.
        max_run = _LONGEST_SHORT_RUN + 24
        self.mass: FloatArray = np.zeros(max_run + 1)
        self._stats: FloatArray = np.ones((4, max_run + 1))
        self._prior = np.array([0.0, 1.0, _PRIOR_ALPHA, 1.0])

    def restart(self, *, level: float, scale: float) -> None:
        """Forget everything: the next value begins a run."""
        self.set_prior(level=level, scale=scale)
        self.mass[:] = 0.0
        self.mass[0] = 1.0
        self._stats[:] = self._prior[:, None]

    def set_prior(self, *, level: float, scale: float) -> None:
        """Set the expectation for a new run: any level, noise of about `scale`."""
        kappa = (scale / _PRIOR_MEAN_SD) ** 2
        self._prior[:] = (level, kappa, _PRIOR_ALPHA, _PRIOR_ALPHA * scale * scale)
        self._stats[:, 0] = self._prior

    def observe(self, value: float) -> int:
        """Process one value: weigh the hypotheses by their predictions, then update them.

        Returns:
            The most likely length of the run, counting from 1; 0 if it probably isn't short.
        """
        mean, kappa, alpha, beta = self._stats
        deviation = value - mean
        density = self._density(deviation)
        likelihood = density + _OUTLIER_DENSITY
        weight = density / likelihood
        # The first value of a run defines its level, so it can't be an outlier of the run.
        weight[0] = 1.0
        # Mass: likelihood × old mass, of which a share `hazard` begins anew.
        joint = self.mass * likelihood
        total, tail = max(float(joint.sum()), _TINY), float(joint[-1])
        self.mass[1:] = joint[:-1] * ((1.0 - _HAZARD) / total)
        self.mass[0] = _HAZARD
        self.mass[-1] += tail * (1.0 - _HAZARD) / total
        # Learning: the conjugate update, each hypothesis with its own weight.
        weighted = deviation * weight
        squares = deviation * weighted * kappa
        kappa += weight
        mean += weighted / kappa
        beta += squares / kappa * 0.5
        alpha += weight * 0.5
        # Every hypothesis is one value older now.
        stats = self._stats
        stats[:, 1:] = stats[:, :-1]
        stats[:, 0] = self._prior
        short = self.mass[: _LONGEST_SHORT_RUN + 1]
        return 1 + int(short[1:].argmax()) if short.sum() > _CHANGE_PROBABILITY else 0

    def _density(self, deviation: FloatArray) -> FloatArray:
        """Return the Student-t density of `deviation` under every hypothesis."""
        _, kappa, alpha, beta = self._stats
        q = (beta / kappa + beta) * 2.0
        # Γ(α+½)/Γ(α) ≈ √(α - ¼ + 1/32α), better than 0.3 % for α ≥ 2.
        peak = np.sqrt((alpha - 0.234375) / q)
        tails = np.exp(-(np.log1p(deviation * deviation / q) * (alpha + 0.5)))
        density: FloatArray = peak * tails * (1.0 / math.sqrt(math.pi))
        return density


def _robust_scale(values: Sequence[float]) -> float:
    """Return the standard deviation, estimated from the median absolute deviation."""
    center = median(values)
    return _NORMAL_MAD * median([abs(value - center) for value in values])


def _significance(
    before: Sequence[float], after: Sequence[float], *, scale: float, noise: Sequence[float]
) -> float:
    """Return by how many standard errors the medians of two levels differ; 0 or more.

    `scale` is used if `before` is too short for an estimate. `noise` are deviations of earlier
    values from their own level: the correlation of noise depends on the machine, not on the level.
    """
    center = median(before)
    shift = abs(median(after) - center)
    spread = scale if len(before) < _FEW else _robust_scale(before)
    error = math.sqrt(0.5 * math.pi) * spread * math.sqrt(1.0 / len(before) + 1.0 / len(after))
    error *= _stray([*noise, *(value - center for value in before)])
    error *= 1.0 + (_DOUBTFUL / len(before)) ** 2 if shift < _LARGE else 1.0
    return shift / error if error > 0.0 else math.inf


def _stray(values: Sequence[float]) -> float:
    """Return the factor by which means of these values vary more than means of independent ones.

    √((1+ρ)/(1-ρ)) for autoregressive noise; ρ is its lag-1 correlation without outliers, less the
    standard error of ρ.
    """
    if len(values) < _LEAST_CORRELATED:
        return 1.0
    limit = 3.0 * _robust_scale(values)
    deviations = np.clip(np.asarray(values) - median(values), -limit, limit)
    variance = float(deviations @ deviations)
    if not variance > 0.0:
        return 1.0
    found = float(deviations[1:] @ deviations[:-1]) / variance - 1.0 / math.sqrt(len(values))
    correlation = min(_HIGHEST_CORRELATION, max(0.0, found))
    return math.sqrt((1.0 + correlation) / (1.0 - correlation))


def _without_warmup(values: Sequence[float]) -> Sequence[float]:
    """Return the values without the first ones that are too high for the noise of later ones."""
    settled = values[len(values) // 2 :]
    scale = max(_LEAST_WARMUP_SCALE, _robust_scale(settled))
    highest = median(settled) + _WARMUP_DEVIATIONS * scale
    first = next(index for index, value in enumerate(values) if value <= highest)
    return values[first:]
