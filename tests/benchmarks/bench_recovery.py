"""Seconds from a fault to the end of the next step: ranks that go on in place, against a restart.

Four workers of a toy on one machine, checkpoints in memory every two steps. In place, one run takes
SIGKILL of rank 0, SIGKILL of another rank and SIGSTOP of a third; once without and once with
standbys (`redundancy=1`), where no step is to be lost. The peer is the same script under torchrun,
as without `in_place`: the agent ends all workers and starts them again. Its workers are forks of a
process that has imported torch, so the seconds that a real start spends on imports (8 s of
processor time each here) are not counted; the peer is shown at its best.

Four workers on three nodes lose the node of two, with its keeper: nobody tells of it, so its
silence must last for the heartbeat's limit, too. Then they lose the node that serves the store, and
with it the membership: who is left can't know who else is, and ends, for the launcher to start
again. The figure is when the last one has.

Then newcomers join a run of three, one after another, and leave on a SIGTERM: the longest gap
between two steps of the others, over their usual one. Newcomers are forks, too, but what they
import on the way to their fit they import before they knock.

Counted in place: one store call of the keeper, a round of heartbeats (0.2 s at most), teardown and
set-up of one fit, one recovery. A frozen rank costs the heartbeat's limit of 2 s besides.
"""

import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from lightning_hetero.callbacks.run_log import read_log
from tests.benchmarks.harness import Row
from tests.callbacks.in_place import playing
from tests.callbacks.several_nodes import playing_nodes

REPEATS = 20
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
_CASES: dict[str, dict[str, int]] = {"": {}, ", redundancy=1": {"redundancy": 1}}
_NODES = {
    "next step after a node of 2 is lost, after the heartbeat's 2 s, redundancy=1": 1,
    "all have ended after the store's node is lost": 0,
}
_JOINING = "gap of the others when a process joins, or leaves on a SIGTERM"


_Measured = dict[str, list[float]]


def run(repeats: int = REPEATS, only: str = "") -> list[Row]:
    """Measure all, or the rows whose name holds a text; each fault costs about 9 s a repeat."""
    rows = []
    for what, options in _CASES.items():
        faults = [name for name in _FAULTS if only in _name(name, what)]
        rows += _measure_faults(faults, what, repeats, **options)
    if any(only in name for name in _NODES):
        rows += [_row(name, seconds, None) for name, seconds in _measure_nodes(repeats).items()]
    if only in _JOINING:
        for what, seconds in _measure_joining(repeats).items():
            rows.append(_row(f"gap of the others when a process {what}", seconds, None, target=1.0))
    return rows


def _name(fault: str, what: str) -> str:
    return f"next step after {fault}{what}"


def _measure_faults(faults: list[str], what: str, repeats: int, **options: int) -> list[Row]:
    """Let some faults happen to runs in place, and to the same runs under torchrun."""
    staying: _Measured = {name: [] for name in faults}
    can_restart = [name for name in faults if not options and _FAULTS[name][1] != signal.SIGSTOP]
    restarts: _Measured = {name: [] for name in can_restart}
    again: list[int] = []
    for _ in range(repeats if faults else 0):
        again += _measure(staying, **options)
        if can_restart:
            _measure(restarts, in_place=False)
    rows = [_row(_name(name, what), staying[name], restarts.get(name)) for name in faults]
    if faults and options:
        rows.append(_lost_steps(again))
    return rows


def _lost_steps(again: list[int]) -> Row:
    return Row(
        name=f"steps lost with redundancy=1, {len(again)} faults, checkpoints every 2 steps",
        ours=sum(again),
        unit="steps",
        target=0.0,
        note=f"{again.count(0)} of {len(again)} recoveries read no checkpoint's step again",
    )


def _measure_nodes(num_repeats: int) -> _Measured:
    """Lose a node, then the one that serves the store; return the seconds that each has cost."""
    names = {node: name for name, node in _NODES.items()}
    seconds: _Measured = {name: [] for name in _NODES}
    options = {"num_steps": 100_000, "every": 1000, "redundancy": 1, "heartbeat_s": HEARTBEAT_S}
    for _ in range(num_repeats):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder,
            playing_nodes(Path(folder) / "run", **options) as nodes,
        ):
            nodes.wait_for_step(0, FIRST_STEP)
            struck_at_s = time.time()
            nodes.lose(1)
            seconds[names[1]].append(nodes.wait_for_recovery(struck_at_s) - HEARTBEAT_S)
            time.sleep(TRAINING_S)
            struck_at_s = time.time()
            nodes.lose(0)
            nodes.wait_for_end()
            seconds[names[0]].append(time.time() - struck_at_s)
    return seconds


def _measure_joining(num_repeats: int) -> _Measured:
    """Let newcomers come and go; return the seconds that each has cost the others."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "run"
        options = {"num_steps": 1_000_000, "every": 1000, "heartbeat_s": HEARTBEAT_S}
        with playing(run, NUM_RANKS - 1, **options) as node:
            node.wait_for_step(0, FIRST_STEP)
            for index in range(num_repeats):
                node.join(f"new-{index}")
                node.wait_for_generation(2 * index + 1)
                time.sleep(TRAINING_S)
                node.strike(f"new-{index}", signal.SIGTERM)
                node.wait_for_generation(2 * index + 2)
                time.sleep(TRAINING_S)
            events = list(read_log(run / "events.jsonl"))
            ends_s = [item["at_s"] for item in node.records(0) if "step" in item]
    usual_s = statistics.median(later - end for end, later in pairwise(ends_s))
    noted = [item for item in events if item["event"] == "generation"]
    joined = [item["idle_s"] - usual_s for item in noted if item["joined"]]
    left = [item["idle_s"] - usual_s for item in noted if item["lost"]]
    return {"joins": joined, "leaves on a SIGTERM": left}


def _row(name: str, seconds: list[float], peers: list[float] | None, target: float = 2.0) -> Row:
    return Row(
        name=f"{name}, {NUM_RANKS} workers",
        ours=statistics.median(seconds),
        peer=None if peers is None else statistics.median(peers),
        target=target,
        value=max(seconds),
        note=f"worst of {len(seconds)} {max(seconds):.2f} s"
        + ("" if peers is None else f"; torchrun without imports {max(peers):.2f} s"),
    )


def _measure(seconds: _Measured, *, in_place: bool = True, redundancy: int = 0) -> list[int]:
    """Let the faults happen to one run, one after another; return the steps that each has lost."""
    # A worker that is ended may still write its last files.
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        options = {"num_steps": 100_000, "every": 2, "heartbeat_s": HEARTBEAT_S}
        run = Path(folder) / "run"
        more = {"in_place": in_place, "redundancy": redundancy}
        with playing(run, NUM_RANKS, **options, **more) as node:
            node.wait_for_step(0, FIRST_STEP)
            for name in seconds:
                rank, number = _FAULTS[name]
                lost_s = node.wait_for_recovery(node.strike(rank, number))
                time.sleep(TRAINING_S)
                seconds[name].append(lost_s - (HEARTBEAT_S if number == signal.SIGSTOP else 0.0))
            events = list(read_log(run / "events.jsonl"))
    return [item["steps_again"] for item in events if item["event"] == "generation"]
