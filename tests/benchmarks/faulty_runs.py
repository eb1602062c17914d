"""Runs that lose a worker again and again, each with a peer's way to go on, and what that cost.

Each is watched in the same way: workers write down when they have ended a step, a driver kills one
of them every so often, and whoever keeps workers starts another one at once.
"""

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Protocol

from lightning_hetero.callbacks.run_log import read_log
from tests.benchmarks.paced_toy import NUM_ROWS, PacedToy
from tests.callbacks.in_place import BATCH, Node, playing

NUM_WORKERS = 4
WARM_UP_STEPS = 15
_PATIENCE_S = 400.0
_IDLE_STEPS = 3.0
"""Steps' times between two ends of a step from which on nobody trains."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run did while workers were killed."""

    num_faults: int
    idle_s: float
    """Seconds in which no step was trained, beyond the usual time of one."""
    lost_steps: int
    """Steps whose work counts for nothing."""
    steady_per_s: float
    """Samples a second before the first fault: the pace of steps alone."""
    samples_per_s: float
    """Samples that the weights at the end have learnt from, of the time watched."""
    share: float
    """The same over those of as long a run at the usual time of a step."""


class Faulty(Protocol):
    """A run of `NUM_WORKERS` workers."""

    folder: Path

    def strike(self, index: int) -> None:
        """Kill the worker that is at a place, and see to another one."""

    def lost_steps(self, since_s: float) -> int:
        """Return how many steps were lost since then."""


def watch(run: Faulty, *, seconds: float, every_s: float) -> Outcome:
    """Kill a worker every so often, for so long; the first one half of that after the start."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while (_read(run.folder) or [(0.0, 0, 0)])[-1][1] < WARM_UP_STEPS:
        assert time.monotonic() < deadline_s, "the run trains no steps"
        time.sleep(0.1)
    start_s = time.time()
    end_s, strikes_s = start_s + seconds, []
    for index in count():
        strike_s = start_s + (index + 0.5) * every_s
        if strike_s >= end_s:
            break
        time.sleep(max(0.0, strike_s - time.time()))
        strikes_s.append(time.time())
        run.strike(index % NUM_WORKERS)
    time.sleep(max(0.0, end_s - time.time()))
    return judge(_read(run.folder), start_s, end_s, strikes_s, run.lost_steps(start_s))


def judge(
    records: list[tuple[float, int, int]],
    start_s: float,
    end_s: float,
    strikes_s: list[float],
    lost_steps: int,
) -> Outcome:
    """Return the outcome of records (when, step, samples so far), in their order."""
    ends_s, newest = [start_s], 0
    for at_s, step, _ in records:
        # Each worker writes down each step; one that is trained again is no progress, but no pause.
        if start_s < at_s <= end_s and step != newest:
            ends_s.append(at_s)
        newest = step
    gaps_s = [later - earlier for earlier, later in pairwise([*ends_s, end_s])]
    usual_s = statistics.median(gaps_s)

    def samples_at(moment_s: float) -> int:
        return [samples for at_s, _, samples in records if at_s <= moment_s][-1]

    rate = (samples_at(end_s) - samples_at(start_s)) / (end_s - start_s)
    first_s = min(strikes_s, default=end_s)
    return Outcome(
        num_faults=len(strikes_s),
        steady_per_s=(samples_at(first_s) - samples_at(start_s)) / (first_s - start_s),
        idle_s=sum(gap_s - usual_s for gap_s in gaps_s if gap_s > _IDLE_STEPS * usual_s),
        lost_steps=lost_steps,
        samples_per_s=rate,
        share=rate * usual_s / (BATCH * NUM_WORKERS),
    )


def _read(folder: Path) -> list[tuple[float, int, int]]:
    """Return (when, step, samples learnt from) of each end of a step, by time."""
    found = []
    for path in folder.glob("worker-*.jsonl"):
        for item in _lines(path):
            if item.get("committed", "step" in item):
                samples = item.get("batches", item["step"] * NUM_WORKERS) * BATCH
                found.append((item["at_s"], item["step"], samples))
    return sorted(found)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


class _Ours:
    """A run of this package, in place or under torchrun."""

    def __init__(self, node: Node, *, joins: bool) -> None:
        self.folder, self._node, self._joins = node.folder, node, joins
        self._names = [str(rank) for rank in range(NUM_WORKERS)]

    def strike(self, index: int) -> None:
        """Kill a worker; in place another one joins."""
        name = self._names[index]
        self._node.strike(name)
        if self._joins:
            self._names[index] = f"new-{len(self._node.joiners)}"
            self._node.join(self._names[index])

    def lost_steps(self, since_s: float) -> int:
        """Return how many steps were trained again."""
        events = read_log(self.folder / "events.jsonl")
        recovered = [e for e in events if e["event"] == "recovered" and e["at_s"] > since_s]
        return sum(item["lost_steps"] or 0 for item in recovered)


@contextmanager
def _folder() -> Iterator[Path]:
    # A worker that is ended may still write its last files.
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _ours(row_ms: float, *, joins: bool, **more: Any) -> Iterator[Faulty]:
    options: dict[str, Any] = {"num_steps": 1_000_000, "every": 20, "heartbeat_s": 2.0, **more}
    options |= {"make_module": partial(PacedToy, row_ms), "num_rows": NUM_ROWS}
    with _folder() as folder, playing(folder / "run", NUM_WORKERS, **options) as node:
        yield _Ours(node, joins=joins)


@contextmanager
def in_place(row_ms: float) -> Iterator[Faulty]:
    """Give a run that goes on in place, with standbys, so that checkpoints may be rare.

    Here and below, a sample takes `row_ms`.

    Weights this small aren't worth cutting: owned whole, they give the optimizer half as many
    tensors.
    """
    with _ours(row_ms, joins=True, redundancy=1, every=200, ownership="parameter") as run:
        yield run


@contextmanager
def torchrun(row_ms: float) -> Iterator[Faulty]:
    """Give a run that torchrun restarts, from checkpoints in memory."""
    with _ours(row_ms, joins=False, in_place=False) as run:
        yield run


class _Torchft:
    """Replica groups of torchft."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def strike(self, index: int) -> None:
        """Kill a replica; its supervisor starts another one."""
        os.kill(int((self.folder / f"pid-{index}").read_text()), signal.SIGKILL)

    def lost_steps(self, since_s: float) -> int:
        """Return how many attempts weren't committed, as far as one replica has seen them."""
        failed: list[float] = []
        for path in self.folder.glob("worker-*.jsonl"):
            for item in _lines(path):
                if not item["committed"] and item["at_s"] > since_s:
                    failed.append(item["at_s"])
        # Replicas fail at the same attempt within a moment; attempts are a step's time apart.
        failed.sort()
        return sum(later - earlier > 0.05 for earlier, later in pairwise([0.0, *failed]))


@contextmanager
def torchft(row_ms: float, python: str) -> Iterator[Faulty]:
    """Give a run of torchft's replica groups, by the Python that has it."""
    with _folder() as folder, (folder / "log").open("w") as log:
        words = map(str, (folder, NUM_WORKERS, row_ms))
        command = [python, "-m", "tests.benchmarks.torchft_peer", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield _Torchft(folder)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
