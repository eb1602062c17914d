"""Stragglers: is every fault found and no other, and how fast.

The corpora are drawn from seeds that were fixed before tuning. Ski rental's bound is a law of
`tests.straggler.test_mitigation`, the monitor's time a row of `bench_straggler_runs`.
"""

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.straggler import BocdDetector, ChangeKind
from tests.benchmarks.harness import Row
from tests.straggler.corpus import (
    FIXED_SEEDS,
    FIXED_SHORT_SEED,
    make_corpus,
    make_short_corpus,
    score,
)

Reports = list[tuple[int, int]]
NUM_JOBS, NUM_SHORT_JOBS = 400, 300


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
    kinds = zip(FIXED_SEEDS, ("one-node", "four-node"), (1, 4), (0.3, 0.5), strict=True)
    rows = [row for kind in kinds for row in corpus_rows(*kind)]
    return [*rows, *short_rows()]


def corpus_rows(seed: int, name: str, num_nodes: int, fault_share: float) -> list[Row]:
    """Errors beside a sliding window's; reactions to a step of +20 %.

    As many jobs as the paper's, more of them faulty.
    """
    jobs = make_corpus(seed, num_jobs=NUM_JOBS, num_nodes=num_nodes, fault_share=fault_share)
    ours, window = score(jobs, detect_ours), score(jobs, detect_window)
    rows = [
        Row(
            name=f"detection {what.replace('_', ' ')}, {name}",
            ours=getattr(ours, what),
            peer=getattr(window, what),
            value=getattr(ours, what),
            unit="share",
            target=target,
            better="higher" if what == "accuracy" else "lower",
            kind="simulated",
            note=f"{NUM_JOBS} {name} jobs, {ours.num_faults} faults; peer: sliding window",
        )
        for what, target in (
            ("accuracy", 0.99),
            ("false_positive_rate", 0.005),
            ("false_negative_rate", 0.02),
        )
    ]
    reactions = []
    for number in range(200):
        rng = np.random.default_rng(number)
        values = np.exp(rng.normal(0.0, 0.02 if num_nodes == 1 else 0.03, 200))
        values[150:] *= 1.2
        reports = detect_ours(values)
        # Slow iterations up to and with the one that raises the report.
        reactions.append(reports[0][0] - 149 if reports else 50)
    median, over = np.median(reactions), np.median(ours.reactions) + 1
    return [
        *rows,
        Row(
            name=f"reaction at +20 %, {name} jitter: 95th percentile",
            ours=float(np.percentile(reactions, 95)),
            unit="iterations",
            target=5.0,
            kind="simulated",
            note=f"median {median:.0f}; over the corpus {over:.0f}",
        ),
    ]


def short_rows() -> list[Row]:
    """Faults of +50 % or more that come after 10 to 14 iterations, which may start slowly."""
    count = NUM_SHORT_JOBS
    faulty, healthy = (
        score(make_short_corpus(FIXED_SHORT_SEED, num_jobs=count, is_faulty=it), detect_ours)
        for it in (True, False)
    )
    in_time = sum(reaction < 5 for reaction in faulty.reactions)
    note = f"{count} jobs with a fault of +50 % to +300 %, {count} without"
    return [
        Row.of_share(f"after 10 to 14 iterations, {what}", share, target, note)
        for what, share, target in (
            ("not named within 5 iterations", 1.0 - in_time / count, 0.03),
            ("missed", faulty.false_negative_rate, 0.0),
            ("false positives", healthy.false_positive_rate, 0.005),
        )
    ]
