"""Find fractional plans: how many pipelines of each scheme suit the data (Hydraulis §7).

The paper's dynamic programme `t[n][l]` over GPUs and lengths (Eq. 4), with fractional pipelines,
divides lengths into intervals, gives each to d pipelines of one scheme and lets the slowest decide.
If d is continuous, cutting an interval costs nothing, so each length may choose its own scheme, and
the programme becomes linear in the pipeline-seconds `D_k = d_k·λ`: minimise the latency λ with
`Σ_k f[l, k] = 1` over the schemes k that hold length l, `Σ_l W[l, k]·f[l, k] <= D_k` and, for every
device type t, `Σ_k N[k, t]·D_k <= λ·N_t`. It is the limit of the paper's programme for ever finer
steps, takes milliseconds instead of minutes, and allows several device types.

With bubbles, a pipeline of scheme k gives only `λ - lost_k` of its time to work and holds no
sequence that alone takes longer than λ; then λ is found by bisection.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.planner.linear_program import LinearProgram

__all__ = ["AverageWork", "FractionalPlan", "fractional_plan"]

_NUM_BISECTIONS = 6


@dataclass(frozen=True, kw_only=True)
class AverageWork:
    """The work of an average iteration, by length interval and scheme."""

    work_s: FloatArray
    """[S, K] seconds of a stage on one pipeline of the scheme."""
    alone_s: FloatArray
    """[S, K] seconds of one sequence of the interval alone on the scheme, bubbles included."""
    fits: BoolArray
    """[S, K] whether the interval's longest sequence fits."""
    lost_s: FloatArray
    """[K] seconds a pipeline loses to bubbles and constants."""
    devices: FloatArray
    """[K, types] devices of each type that a pipeline takes."""
    available: FloatArray
    """[types] devices of the cluster."""


@dataclass(frozen=True, kw_only=True)
class FractionalPlan:
    """Numbers of pipelines that need not be whole."""

    counts: FloatArray
    """[K] pipelines of each scheme."""
    latency_s: float
    """Seconds of an iteration on them."""


def fractional_plan(work: AverageWork, *, with_bubbles: bool) -> FractionalPlan | None:
    """Return the best fractional plan, or None if some length fits no scheme."""
    if not work.fits.any(axis=1).all():
        return None
    base = _without_bubbles(work)
    if not with_bubbles:
        return base
    low_s, high_s = base.latency_s, base.latency_s
    best = None
    # Bubbles only add time, so the latency without them is a lower bound.
    while best is None:
        high_s *= 1.5
        best = _with_bubbles(work, high_s)
    for _ in range(_NUM_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        found = _with_bubbles(work, middle_s)
        if found is None:
            low_s = middle_s
        else:
            best, high_s = found, middle_s
    return best


def _without_bubbles(work: AverageWork) -> FractionalPlan:
    program = LinearProgram()
    seconds = _add_shares(program, work, work.fits)
    (latency,) = program.add_variables(upper=np.inf, cost=1.0)
    for devices, available in zip(work.devices.T, work.available, strict=True):
        program.add_row([*seconds, latency], [*devices, -available], upper=0.0)
    solution = program.minimize()
    latency_s = max(solution.objective, 1e-12)
    return FractionalPlan(counts=solution.values[seconds] / latency_s, latency_s=latency_s)


def _with_bubbles(work: AverageWork, latency_s: float) -> FractionalPlan | None:
    """Return the plan of a latency with the smallest share of the devices; None without any."""
    allowed = work.fits & (work.alone_s <= latency_s)
    left_s = latency_s - work.lost_s
    allowed &= left_s > 0
    if not allowed.any(axis=1).all():
        return None
    program = LinearProgram()
    seconds = _add_shares(program, work, allowed)
    (share,) = program.add_variables(upper=1.0, cost=1.0)
    per_second = work.devices / np.maximum(left_s, 1e-12)[:, None]
    for devices, available in zip(per_second.T, work.available, strict=True):
        program.add_row([*seconds, share], [*devices, -available], upper=0.0)
    solution = program.minimize()
    if not len(solution.values):
        return None
    return FractionalPlan(
        counts=solution.values[seconds] / np.maximum(left_s, 1e-12), latency_s=latency_s
    )


def _add_shares(program: LinearProgram, work: AverageWork, allowed: BoolArray) -> IntArray:
    """Add shares f and pipeline-seconds D with their rows; return the D variables [K]."""
    num_schemes = allowed.shape[1]
    shares = program.add_variables(upper=allowed.astype(float).ravel()).reshape(allowed.shape)
    seconds = program.add_variables(upper=np.full(num_schemes, np.inf))
    for row, is_allowed in zip(shares, allowed, strict=True):
        program.add_row(row[is_allowed], 1.0, lower=1.0, upper=1.0)
    for k in range(num_schemes):
        usable = allowed[:, k]
        columns = [*shares[usable, k], seconds[k]]
        program.add_row(columns, [*work.work_s[usable, k], -1.0], upper=0.0)
    return seconds
