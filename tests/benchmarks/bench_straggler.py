"""Stragglers: is every fault found and no other, how fast, what mitigation saves.

The corpora are drawn from seeds that were fixed before tuning. Operations of `update`: one pass of
about 35 NumPy calls over 65 hypotheses, a floor of 15-20 µs; bayesian-changepoint keeps one
hypothesis per observation in torch tensors.
"""

import functools
import importlib.util
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.straggler import BocdDetector, ChangeKind, Mitigation
from lightning_hetero.straggler.prediction import balance_microbatches
from lightning_hetero.straggler.run_length import RunLengthPosterior
from tests.benchmarks import cluster_run
from tests.benchmarks.harness import Row, median_times_s
from tests.straggler.corpus import (
    FIXED_SEEDS,
    FIXED_SHORT_SEED,
    Detect,
    Job,
    Score,
    make_corpus,
    make_short_corpus,
    score,
)
from tests.straggler.ski_rental import STEPS, RandomFault, hindsight_s, online_s

Reports = list[tuple[int, int]]

PLAIN_JOBS = 100
"""Jobs that plain BOCD is tried on, from each corpus: it takes as long as the whole detector."""
PEER_JOBS = {"ruptures": 40, "bayesian-changepoint": 10}
"""Jobs that a package is tried on, from each corpus: bayesian-changepoint takes 0.5 s for one."""


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


def detect_plain_bocd(values: NDArray[np.float64]) -> Reports:
    """BOCD without verification: every probable change to a higher level counts."""
    logs = np.log(values)
    posterior = RunLengthPosterior(hazard=1e-3, max_run=64, memory=200)
    posterior.restart(level=float(logs[0]), scale=0.03)
    reports: Reports = []
    for step, value in enumerate(logs):
        posterior.observe(float(value))
        if step < 30 or posterior.short_mass(longest=40) <= 0.9:
            continue
        run = posterior.likeliest_run(longest=40)
        onset = step - run + 1
        is_new = not reports or onset > reports[-1][1] + 5
        if run < 2 or onset < 20 or not is_new:
            continue
        if logs[onset : step + 1].mean() > logs[onset - 20 : onset].mean():
            reports.append((step, onset))
    return reports


def detect_ruptures(values: NDArray[np.float64]) -> Reports:
    """Return KernelCPD's upward changes, with all values at hand (offline), penalty 20 σ²."""
    import ruptures

    logs = np.log(values)
    sigma = 1.4826 * np.median(np.abs(np.diff(logs))) / np.sqrt(2.0)
    ends = ruptures.KernelCPD(kernel="linear", min_size=4).fit(logs).predict(pen=20 * sigma**2)
    edges = [0, *ends]
    reports = []
    for a, b, c in zip(edges, edges[1:], edges[2:], strict=False):
        if b > 30 and np.mean(logs[b:c]) - np.mean(logs[a:b]) >= np.log(1.1):
            reports.append((b, b))
    return reports


def run() -> list[Row]:
    """Return all rows."""
    return [
        *corpus_rows(),
        *short_rows(),
        *peer_rows(),
        update_row(),
        balance_row(),
        ski_rental_row(),
        *cluster_rows(),
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
        window, plain = score(jobs, detect_window), score(jobs[:PLAIN_JOBS], detect_plain_bocd)
        note = f"{len(jobs)} {name} jobs, {ours.num_faults} faults; peer: "
        rows += _score_rows(name, ours, window, note + "sliding window")
        plain_note = f"BOCD without verification, on the first {PLAIN_JOBS} jobs"
        rows += _score_rows(name, ours, plain, note + plain_note)
        rows.append(_reaction_row(name, jobs, ours))
    return rows


def _score_rows(name: str, ours: Score, peer: Score, note: str) -> list[Row]:
    figures = (
        ("accuracy", ours.accuracy, peer.accuracy, 0.99, "higher"),
        ("false positives", ours.false_positive_rate, peer.false_positive_rate, 0.005, "lower"),
        ("false negatives", ours.false_negative_rate, peer.false_negative_rate, 0.02, "lower"),
    )
    return [
        Row(
            name=f"detection {what}, {name}",
            ours=own,
            peer=other,
            unit="share",
            target=target,
            better=better,  # type: ignore[arg-type]
            kind="simulated",
            value=own,
            note=note,
        )
        for what, own, other, target, better in figures
    ]


def _reaction_row(name: str, jobs: Sequence[Job], ours: Score) -> Row:
    """Slow iterations up to and with the one that raises the report, for a step of +20 %."""
    reactions = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        jitter = 0.02 if name == "one-node" else 0.03
        values = np.exp(rng.normal(0.0, jitter, 200))
        values[150:] *= 1.2
        reports = detect_ours(values)
        reactions.append(reports[0][0] - 149 if reports else 50)
    return Row(
        name=f"reaction at +20 %, {name} jitter",
        ours=float(np.median(reactions)),
        peer=None,
        unit="iterations",
        target=5.0,
        better="lower",
        kind="simulated",
        value=float(np.percentile(reactions, 95)),
        note=f"value: 95th percentile; median over the corpus: {np.median(ours.reactions) + 1:.0f}",
    )


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


def peer_rows() -> list[Row]:
    """Accuracy beside the packages from PyPI, on as many jobs as their speed allows.

    A package that judges no job right is taken to have judged one.
    """
    peers: list[tuple[str, Detect]] = []
    if importlib.util.find_spec("ruptures"):
        peers.append(("ruptures", detect_ruptures))
    if importlib.util.find_spec("bayesian_changepoint_detection"):
        peers.append(("bayesian-changepoint", detect_bayesian_changepoint))
    rows = []
    for package, detect in peers:
        jobs = list(itertools.chain(*(jobs for _, jobs in corpora(PEER_JOBS[package]))))
        ours, theirs = score(jobs, detect_ours), score(jobs, detect)
        rows.append(
            Row(
                name=f"detection accuracy beside {package}",
                ours=ours.accuracy,
                peer=theirs.accuracy,
                unit="share",
                target=1.0,
                better="higher",
                kind="simulated",
                value=ours.accuracy / max(theirs.accuracy, 1.0 / len(jobs)),
                note=f"cut to the first {PEER_JOBS[package]} jobs of each corpus; theirs: "
                f"{theirs.num_false_alarms} false alarms, "
                f"{theirs.num_missed} of {theirs.num_faults} missed",
            )
        )
    return rows


def detect_bayesian_changepoint(values: NDArray[np.float64]) -> Reports:
    """bayesian-changepoint's detector, its prior for +20 % steps, and means 10 % apart."""
    scaled = values / np.median(values[10:60])
    detector = bayesian_changepoint()
    reports: Reports = []
    for step, value in enumerate(scaled):
        detector.update(float(value))
        probability = float(detector.run_length_posterior[:6].sum())
        is_new = not reports or step - reports[-1][0] > 10
        if step < 30 or probability <= 0.9 or not is_new:
            continue
        if scaled[step - 3 : step + 1].mean() >= 1.1 * scaled[step - 20 : step - 4].mean():
            reports.append((step, step - 3))
    return reports


def bayesian_changepoint() -> Any:
    """Return the peer's detector, its memory bounded, with the prior that finds +20 % steps."""
    from bayesian_changepoint_detection.hazard_functions import constant_hazard
    from bayesian_changepoint_detection.online_likelihoods import StudentT
    from bayesian_changepoint_detection.streaming import OnlineChangepointDetector

    likelihood = StudentT(alpha=1.0, beta=1e-4, kappa=1.0, mu=1.0, device="cpu")
    return OnlineChangepointDetector(
        functools.partial(constant_hazard, 250), likelihood, max_run_length=200, device="cpu"
    )


def update_row() -> Row:
    """Time of one update beside bayesian-changepoint's own, after 300 observations."""
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0.0, 0.02, 2000)).tolist()
    detector, times_s = BocdDetector(), []
    for value in values:
        start_s = time.perf_counter()
        detector.update(value)
        times_s.append(time.perf_counter() - start_s)
    peer_us = None
    if importlib.util.find_spec("bayesian_changepoint_detection"):
        peer, peer_s = bayesian_changepoint(), []
        for value in values[:600]:
            start_s = time.perf_counter()
            peer.update(value)
            peer_s.append(time.perf_counter() - start_s)
        peer_us = float(np.median(peer_s)) * 1e6
    ours_us = float(np.median(times_s)) * 1e6
    return Row(
        name="detector update",
        ours=ours_us,
        peer=peer_us,
        unit="µs",
        target=50.0,
        better="lower",
        kind="measured",
        value=ours_us,
        note="median of 2,000; peer: bayesian-changepoint, streaming, run length up to 200",
    )


def balance_row() -> Row:
    """Balance 512 pipelines."""
    rng = random.Random(0)
    times_s = [rng.uniform(1.0, 3.0) for _ in range(512)]
    (seconds,) = median_times_s(lambda: balance_microbatches(times_s, 8192), repeats=15)
    return Row(
        name="balance_microbatches, 512 pipelines",
        ours=seconds * 1e3,
        peer=None,
        unit="ms",
        target=5.0,
        better="lower",
        kind="measured",
        value=seconds * 1e3,
        note="8,192 micro-batches; the paper prints 35.9 s for its solver",
    )


def ski_rental_row() -> Row:
    """Worst total over the best in hindsight, over random faults."""
    rng = random.Random(7)
    worst = jumping = 0.0
    for _ in range(3000):
        fault = _random_fault(rng)
        total_s = online_s(fault)
        worst = max(worst, total_s / max(hindsight_s(fault), 1e-9))
        jumping = max(jumping, total_s / max(hindsight_s(fault, may_jump=True), 1e-9))
    return Row(
        name="ski rental over the best in hindsight",
        ours=worst,
        peer=None,
        unit="ratio",
        target=2.0,
        better="lower",
        kind="simulated",
        value=worst,
        note=f"worst of 3,000 random faults; {jumping:.2f} if hindsight skips steps for free",
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


def cluster_rows() -> list[Row]:
    """Throughput lost to faults on 256 GPUs, without and with mitigation."""
    schedule = cluster_run.paper_schedule()
    healthy = cluster_run.healthy_iterations_per_min()
    faulty = cluster_run.run(schedule, mitigate=False).iterations_per_min
    mended = cluster_run.run(schedule, mitigate=True).iterations_per_min
    costs = cluster_run.swap_figures()
    return [
        Row(
            name="256 GPUs: lost iterations/min, cut by",
            ours=healthy - mended,
            peer=healthy - faulty,
            unit="it/min",
            target=(37.4 - 18.9) / (37.4 - 29.8),
            better="higher",
            kind="simulated",
            value=(healthy - faulty) / (healthy - mended),
            note=f"{healthy:.1f} healthy, {faulty:.1f} under faults, {mended:.1f} mitigated "
            f"(paper 37.4, 18.9, 29.8); peer: no mitigation; {costs}",
        )
    ]
