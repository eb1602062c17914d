"""Stragglers: is every fault found and no other, how fast, what ski rental pays.

The corpora are drawn from seeds that were fixed before tuning. Operations of `update`: one pass of
about 35 NumPy calls over 65 hypotheses, a floor of 15-20 µs.
"""

import random
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.straggler import BocdDetector, ChangeKind, Mitigation
from tests.benchmarks.harness import Row
from tests.straggler.corpus import (
    FIXED_SEEDS,
    FIXED_SHORT_SEED,
    Job,
    Score,
    make_corpus,
    make_short_corpus,
    score,
)
from tests.straggler.ski_rental import STEPS, RandomFault, hindsight_s, online_s

Reports = list[tuple[int, int]]


def detect_ours(values: NDArray[np.float64]) -> Reports:
    """Our detector with its defaults."""
    detector = BocdDetector()
    found = (detector.update(float(value)) for value in values)
    return [(c.step, c.onset_step) for c in found if c and c.kind is ChangeKind.SLOWDOWN]


def detect_window(values: NDArray[np.float64], *, width: int = 10) -> Reports:
    """Sliding window: the mean of the last ten against the mean of the ten before."""
    reports: Reports = []
    for step in range(2 * width, len(values)):
        before = values[step - 2 * width + 1 : step - width + 1].mean()
        after = values[step - width + 1 : step + 1].mean()
        recent = bool(reports) and step - reports[-1][0] < 2 * width
        if after >= 1.1 * before and not recent:
            reports.append((step, step - width + 1))
    return reports


def run() -> list[Row]:
    """Return all rows."""
    return [
        *corpus_rows(),
        *short_rows(),
        update_row(),
        ski_rental_row(),
    ]


def corpora(num_jobs: int = 400) -> list[tuple[str, list[Job]]]:
    """Return the fixed corpora: as many jobs as the paper's, more of them faulty."""
    return [
        (name, make_corpus(seed, num_jobs=num_jobs, num_nodes=nodes, fault_share=share))
        for seed, name, nodes, share in zip(
            FIXED_SEEDS, ("one-node", "four-node"), (1, 4), (0.3, 0.5), strict=True
        )
    ]


def corpus_rows() -> list[Row]:
    """Accuracy, false positives, false negatives beside a sliding window and plain BOCD."""
    rows = []
    for name, jobs in corpora():
        ours = score(jobs, detect_ours)
        window = score(jobs, detect_window)
        note = f"{len(jobs)} {name} jobs, {ours.num_faults} faults; peer: "
        rows += _score_rows(name, ours, window, note + "sliding window")
        rows.append(_reaction_row(name, ours))
    return rows


def _score_rows(name: str, ours: Score, peer: Score, note: str) -> list[Row]:
    def row(what: str, target: float) -> Row:
        own, other = (getattr(scored, what.replace(" ", "_")) for scored in (ours, peer))
        found = Row.of_share(f"detection {what}, {name}", own, target, note)
        return replace(found, peer=other, better="higher" if what == "accuracy" else "lower")

    bounds = ("accuracy", 0.99), ("false positive rate", 0.005), ("false negative rate", 0.02)
    return [row(*bound) for bound in bounds]


def _reaction_row(name: str, ours: Score) -> Row:
    """Slow iterations up to and with the one that raises the report, for a step of +20 %."""
    reactions = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        jitter = 0.02 if name == "one-node" else 0.03
        values = np.exp(rng.normal(0.0, jitter, 200))
        values[150:] *= 1.2
        reports = detect_ours(values)
        reactions.append(reports[0][0] - 149 if reports else 50)
    median, late = np.median(reactions), np.percentile(reactions, 95)
    note = f"median {median:.0f}; over the corpus {np.median(ours.reactions) + 1:.0f}"
    row = Row.of_share(f"reaction at +20 %, {name} jitter: 95th percentile", late, 5.0, note)
    return replace(row, unit="iterations")


def short_rows(num_jobs: int = 300) -> list[Row]:
    """Faults of +50 % or more that come after 10 to 14 iterations, which may start slowly."""
    faulty, healthy = (
        score(make_short_corpus(FIXED_SHORT_SEED, num_jobs=num_jobs, is_faulty=it), detect_ours)
        for it in (True, False)
    )
    in_time = sum(reaction < 5 for reaction in faulty.reactions)
    figures = (
        ("not named within 5 iterations", 1.0 - in_time / num_jobs, 0.03),
        ("missed", faulty.false_negative_rate, 0.0),
        ("false positives", healthy.false_positive_rate, 0.005),
    )
    note = f"{num_jobs} jobs with a fault of +50 % to +300 %, {num_jobs} without"
    return [
        Row.of_share(f"after 10 to 14 iterations, {what}", share, target, note)
        for what, share, target in figures
    ]


def update_row() -> Row:
    """Time of one update beside bayesian-changepoint's own, after 300 observations."""
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0.0, 0.02, 2000)).tolist()
    detector, times_s = BocdDetector(), []
    for value in values:
        start_s = time.perf_counter()
        detector.update(value)
        times_s.append(time.perf_counter() - start_s)
    ours_us = float(np.median(times_s)) * 1e6
    row = Row.of_share("detector update", ours_us, 50.0, "median of 2,000")
    return replace(row, unit="µs", kind="measured")


def ski_rental_row() -> Row:
    """Worst total over the best in hindsight, over random faults."""
    rng = random.Random(7)
    worst = jumping = 0.0
    for _ in range(3000):
        fault = _random_fault(rng)
        total_s = online_s(fault)
        worst = max(worst, total_s / max(hindsight_s(fault), 1e-9))
        jumping = max(jumping, total_s / max(hindsight_s(fault, may_jump=True), 1e-9))
    note = f"worst of 3,000 random faults; {jumping:.2f} if hindsight skips steps for free"
    return replace(
        Row.of_share("ski rental over the best in hindsight", worst, 2.0, note), unit="1"
    )


def _random_fault(rng: random.Random) -> RandomFault:
    healthy_s = rng.uniform(0.2, 5.0)
    peak = rng.uniform(1.05, 4.0)
    num_slow = int(10 ** rng.uniform(0.0, 2.5))
    slow_s = tuple(healthy_s * peak * rng.uniform(0.95, 1.05) for _ in range(num_slow))
    left: dict[Mitigation, float] = {}
    remaining = 1.0
    for step in STEPS:
        if rng.random() < 0.8:
            remaining *= rng.uniform(0.05, 1.0)
            left[step] = remaining
    rebalance_s = 10 ** rng.uniform(-1.0, 1.0)
    swap_s = rebalance_s * 10 ** rng.uniform(0.3, 1.5)
    restart_s = swap_s * 10 ** rng.uniform(0.3, 1.5)
    return RandomFault(
        healthy_s=healthy_s, slow_s=slow_s, left=left, costs_s=(rebalance_s, swap_s, restart_s)
    )
