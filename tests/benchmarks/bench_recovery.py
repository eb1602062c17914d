"""Seconds from a fault to the end of the next step: ranks that go on in place, against a restart.

Four workers of a toy on one machine, checkpoints in memory every two steps. In place, one run takes
SIGKILL of rank 0, SIGKILL of another rank and SIGSTOP of a third; the peer is the same script under
torchrun, as without `in_place`: the agent ends all workers and starts them again. Its workers are
forks of a process that has imported torch, so the seconds that a real start spends on imports (8 s
of processor time each here) are not counted; the peer is shown at its best.

Counted in place: one store call of the keeper, a round of heartbeats (0.2 s at most), teardown and
set-up of one fit, one recovery. A frozen rank costs the heartbeat's limit of 2 s besides.
"""

import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.benchmarks.harness import Row
from tests.callbacks.in_place import playing

NUM_REPEATS = 20
NUM_RANKS = 4
HEARTBEAT_S = 2.0
FIRST_STEP = 6
TRAINING_S = 1.0
"""Between two faults."""
_FAULTS = {
    "SIGKILL of rank 0": (0, signal.SIGKILL),
    "SIGKILL of rank 3": (3, signal.SIGKILL),
    "SIGSTOP of rank 2, after the heartbeat's 2 s": (2, signal.SIGSTOP),
}


def run(num_repeats: int = NUM_REPEATS) -> list[Row]:
    staying: dict[str, list[float]] = {name: [] for name in _FAULTS}
    restarts: dict[str, list[float]] = {name: [] for name in list(_FAULTS)[:2]}
    for _ in range(num_repeats):
        _measure(staying, in_place=True)
        _measure(restarts, in_place=False)
    rows = []
    for name, seconds in staying.items():
        peers = restarts.get(name)
        rows.append(
            Row(
                name=f"next step after {name}, {NUM_RANKS} workers",
                ours=statistics.median(seconds),
                peer=None if peers is None else statistics.median(peers),
                unit="s",
                target=2.0,
                better="lower",
                kind="measured",
                value=max(seconds),
                note=f"worst of {len(seconds)} {max(seconds):.2f} s"
                + ("" if peers is None else f"; torchrun without imports {max(peers):.2f} s"),
            )
        )
    return rows


def _measure(seconds: dict[str, list[float]], *, in_place: bool) -> None:
    """Let the faults happen to one run, one after another."""
    # A worker that is ended may still write its last files.
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        options = {"num_steps": 100_000, "every": 2, "heartbeat_s": HEARTBEAT_S}
        with playing(Path(folder) / "run", NUM_RANKS, in_place=in_place, **options) as node:
            node.wait_for_step(0, FIRST_STEP)
            for name in seconds:
                rank, number = _FAULTS[name]
                lost_s = node.wait_for_recovery(node.strike(rank, number))
                time.sleep(TRAINING_S)
                seconds[name].append(lost_s - (HEARTBEAT_S if number == signal.SIGSTOP else 0.0))
