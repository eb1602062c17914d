r"""A drill of lost ranks: as many faults as you like, and none changes what is trained.

::

    python -m tests.callbacks.drill 200              # faults; about 4 s each on 2 CPU cores
    python -m tests.callbacks.drill 20 --seed 7      # others, at other moments

Runs of four to six workers with `redundancy=1` take faults until one is left: a worker is killed or
frozen, or two at once, while they train or still recover from the fault before. Every step is
trained by all that are there, each time with the loss of one device that
nobody disturbed, and with each sample of its iteration once.
"""

import argparse
import random
import re
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_hetero.callbacks.run_log import read_log
from tests.callbacks.in_place import BATCH, Node, playing, undisturbed

KINDS = {
    "killed": ((signal.SIGKILL,), 4),
    "frozen": ((signal.SIGSTOP,), 1),
    "two killed": ((signal.SIGKILL, signal.SIGKILL), 2),
    "one killed, one frozen": ((signal.SIGKILL, signal.SIGSTOP), 1),
}
"""Signals that are sent at once, and how often."""
MOMENTS = {"training": 3, "recovery": 2}
HEARTBEAT_S = 4.0
MOST_STEPS = 150
TOLERANCE = 1e-5


def newest_step(node: Node, ranks: Sequence[int]) -> int:
    """Return the farthest step that any of some workers has written down."""
    # Not the last entry alone: that of a generation that hasn't trained yet names no step.
    return max((item.get("step", 0) for rank in ranks for item in node.records(rank)), default=0)


def train_on(node: Node, left: list[int], num_steps: int) -> None:
    """Wait until those who are left have trained so many steps more; drop who has ended itself."""
    until = newest_step(node, left) + num_steps
    for rank in list(left):
        while not any(item.get("step", 0) >= until for item in node.records(rank)):
            assert node.process.exitcode is None, node.log()
            has_begun = (node.folder / f"pid-{rank}").exists()
            if has_begun and not Path(f"/proc/{node.pid_of(rank)}").exists():
                tell(f"worker {rank} has ended by itself:\n{node.log()}")
                left.remove(rank)
                break
            time.sleep(0.02)


def play(node: Node, num_ranks: int, most: int, draw: random.Random) -> list[tuple[str, str]]:
    """Let faults happen to a run until one worker is left; return their kinds and moments."""
    left, done = list(range(num_ranks)), []
    train_on(node, left, 1)
    while len(left) > 1 and len(done) < most:
        moment = draw.choices(list(MOMENTS), list(MOMENTS.values()))[0] if done else "training"
        if moment == "training":
            train_on(node, left, draw.randint(1, 6))
            time.sleep(draw.uniform(0.0, 0.2))
        else:
            time.sleep(draw.uniform(0.0, 2.0))
        weights = [number for _, number in KINDS.values()]
        kind = draw.choices(list(KINDS), weights)[0]
        signals = KINDS[kind][0][: len(left) - 1]
        struck = draw.sample(left, len(signals))
        for rank, number in zip(struck, signals, strict=True):
            node.strike(rank, number)
            left.remove(rank)
        done.append((kind, moment))
    train_on(node, left, 3)
    return done


def check(node: Node, num_ranks: int, expected: Sequence[float]) -> float:
    """Compare what was trained with the undisturbed run; return the largest difference.

    Raises:
        AssertionError: A step is missing, or was trained otherwise.
    """
    found: Mapping[Any, list[dict[str, Any]]] = defaultdict(list)
    for rank in range(num_ranks):
        fit, size = 0, 0
        for item in node.records(rank):
            fit, size = (item["at_s"], item["size"]) if "begin" in item else (fit, size)
            if "step" in item:
                found[size, item["step"]].append(item)
    last = max(step for _, step in found)
    assert {step for _, step in found} == set(range(1, last + 1)), "a step is missing"
    worst = 0.0
    for (size, step), items in found.items():
        for item in items:
            worst = max(worst, abs(item["loss"] / expected[step - 1] - 1.0))
        # Who was struck may have trained it and not written it down.
        rows = Counter(row for item in items for row in item["rows"])
        if len(items) == size:
            assert len(rows) == rows.total() == BATCH * num_ranks, f"step {step}: {rows}"
    assert worst <= TOLERANCE, f"losses differ by {worst:.1e}"
    return worst


def main() -> None:
    """Play runs until there were enough faults, and print what they have cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    losses = {size: undisturbed(size, MOST_STEPS) for size in (4, 5, 6)}
    kinds: Counter[tuple[str, str]] = Counter()
    idle: list[float] = []
    whys: Counter[str] = Counter()
    worst = 0.0
    while kinds.total() < arguments.faults:
        num_ranks, every = draw.randint(4, 6), draw.randint(3, 12)
        with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
            options = {"num_steps": MOST_STEPS, "every": every, "redundancy": 1}
            run = Path(folder) / "run"
            with playing(run, num_ranks, heartbeat_s=HEARTBEAT_S, **options) as node:
                most = arguments.faults - kinds.total()
                kinds.update(play(node, num_ranks, most, draw))
                worst = max(worst, check(node, num_ranks, losses[num_ranks]))
                events, text = list(read_log(run / "events.jsonl")), node.log()
        new = [item for item in events if item["event"] == "generation"]
        assert new or "in a row have trained no step" in text, "no generation has trained since"
        idle += [item["idle_s"] for item in new]
        for item in events:
            if item["event"] == "recovered":
                why = item["why_not_live"] or "no step lost"
                whys[re.sub(r"\(.*\)|such as .*?\)|\d+ parameters", "…", why)] += 1
        tell(
            f"{kinds.total():4} faults; {num_ranks} workers, generations of "
            f"{[item['ranks'] for item in new]}, steps again {[i['steps_again'] for i in new]}, "
            f"largest difference {worst:.1e}"
        )
    for (kind, moment), count in sorted(kinds.items()):
        tell(f"{count:4} {kind}, while in {moment}")
    for why, count in whys.most_common():
        tell(f"{count:4} recoveries: {why}")
    idle.sort()
    tell(
        f"{len(idle)} generations; seconds without a step: median {idle[len(idle) // 2]:.2f}, "
        f"worst {idle[-1]:.2f} (the heartbeat's limit is {HEARTBEAT_S} s)"
    )


def tell(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201 - a tool


if __name__ == "__main__":
    main()
