r"""A drill of ranks that are lost, come and go: however often, none changes what is trained.

::

    python -m tests.callbacks.drill 200              # events; about 4 s each on 2 CPU cores
    python -m tests.callbacks.drill 20 --seed 7      # others, at other moments

Runs of four to six workers with `redundancy=1` go on until one worker is left: workers are killed
or frozen, one or two at once, told to leave, or join, while the others train, still recover from
what was before, or let somebody in. Every step is trained by all that are there, each time with the
loss of one device that nobody disturbed, and with each sample of its iteration once.
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

from tests.callbacks.in_place import BATCH, Node, playing, undisturbed

KINDS: dict[str, tuple[tuple[signal.Signals, ...], int]] = {
    "killed": ((signal.SIGKILL,), 4),
    "frozen": ((signal.SIGSTOP,), 1),
    "two killed": ((signal.SIGKILL, signal.SIGKILL), 2),
    "one killed, one frozen": ((signal.SIGKILL, signal.SIGSTOP), 1),
    "told to leave": ((signal.SIGTERM,), 1),
    "joined": ((), 4),
}
"""Signals that are sent at once, and how often."""
MOMENTS = {"training": 3, "recovery": 2}
HEARTBEAT_S = 4.0
MOST_STEPS = 600
MOST_WORKERS = 6
LEASH = 30
"""Steps that a run is let ahead of the last look, while nobody waits for a joiner."""
TOLERANCE = 1e-5


def newest_step(node: Node, workers: Sequence[str]) -> int:
    """Return the farthest step that any of some workers has written down."""
    return max((item.get("step", 0) for name in workers for item in node.records(name)), default=0)


def train_on(node: Node, left: list[str], num_steps: int) -> None:
    """Wait until all of some workers have trained so many steps more; drop who has ended itself.

    While one of them still comes, the others train a step now and then.
    """
    until = limit = newest_step(node, left) + num_steps
    for name in list(left):
        looked_at_s = time.monotonic()
        while not any(item.get("step", 0) >= until for item in node.records(name)):
            assert node.process.exitcode is None, node.log()
            has_begun = (node.folder / f"pid-{name}").exists()
            if has_begun and not Path(f"/proc/{node.pid_of(name)}").exists():
                left.remove(name)
                break
            limit = max(limit, min(newest_step(node, left), limit) + 1)
            node.let_go_on_to(limit)
            assert time.monotonic() < looked_at_s + 300.0, f"{name} doesn't train:\n{node.log()}"
            time.sleep(0.2 if name.startswith("new") else 0.02)
    node.let_go_on_to(newest_step(node, left) + LEASH)


class Drill:
    """What happens to the workers of one run."""

    def __init__(self, node: Node, num_ranks: int, draw: random.Random) -> None:
        self._node, self._draw = node, draw
        self.left = [str(rank) for rank in range(num_ranks)]
        """The workers that nobody has struck."""
        self.all = list(self.left)
        """All workers there have been."""

    def play(self, most: int) -> list[tuple[str, str]]:
        """Let things happen until one worker is left; return their kinds and moments."""
        node, draw, left, done = self._node, self._draw, self.left, list[tuple[str, str]]()
        node.let_go_on_to(LEASH)
        train_on(node, left, 1)
        while len(left) > 1 and len(done) < most and newest_step(node, left) < MOST_STEPS - 150:
            moment = draw.choices(list(MOMENTS), list(MOMENTS.values()))[0] if done else "training"
            if moment == "training":
                train_on(node, left, draw.randint(1, 6))
                time.sleep(draw.uniform(0.0, 0.2))
            else:
                time.sleep(draw.uniform(0.0, 4.0 if done[-1][0] == "joined" else 2.0))
            done.append((self._happen(), moment))
        train_on(node, left, 3)
        return done

    def _happen(self) -> str:
        """Let one thing happen; return which."""
        node, draw, left = self._node, self._draw, self.left
        # The store goes with worker 0 where it leaves, and so do all.
        can_leave = [name for name in left if name != "0"]
        kinds = {
            kind: number
            for kind, (_, number) in KINDS.items()
            if (kind != "joined" or len(left) < MOST_WORKERS)
            and (kind != "told to leave" or can_leave)
        }
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        if kind == "joined":
            self.all.append(f"new-{len(self.all)}")
            left.append(self.all[-1])
            node.join(self.all[-1])
        # One that has joined and was never let in can't go on alone.
        stays = draw.choice([name for name in left if node.records(name)])
        candidates = can_leave if kind == "told to leave" else left
        may_go = [name for name in candidates if name != stays]
        signals = KINDS[kind][0][: len(may_go)]
        for name, number in zip(draw.sample(may_go, len(signals)), signals, strict=True):
            if (node.folder / f"pid-{name}").exists():
                node.strike(name, number)
            left.remove(name)
        return kind


def check(node: Node, workers: Sequence[str], num_ranks: int) -> float:
    """Compare what workers have trained with an undisturbed run; return the largest difference."""
    found: Mapping[Any, list[dict[str, Any]]] = defaultdict(list)
    for name in workers:
        begin: dict[str, Any] = {}
        for item in node.records(name):
            begin = item if "begin" in item else begin
            if "step" in item:
                found[begin["generation"], begin["size"], item["step"]].append(item)
    last, num_rows = max(step for *_, step in found), BATCH * num_ranks
    expected = undisturbed(num_ranks, last)
    assert {step for *_, step in found} == set(range(1, last + 1)), "a step is missing"
    worst = 0.0
    for (_, size, step), items in found.items():
        for item in items:
            worst = max(worst, abs(item["loss"] / expected[step - 1] - 1.0))
        rows = Counter(row for item in items for row in item["rows"])
        assert len(rows) == rows.total(), f"step {step}: samples were doubled: {rows}"
        # Who was struck may have trained it and not written it down.
        assert len(items) < size or len(rows) == num_rows, f"step {step}: samples were lost: {rows}"
    assert worst <= TOLERANCE, f"losses differ by {worst:.1e}"
    return worst


def main() -> None:
    """Play runs until enough has happened, and print what it has cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    kinds: Counter[tuple[str, str]] = Counter()
    whys: Counter[str] = Counter()
    idle, worst = list[float](), 0.0
    while kinds.total() < arguments.events:
        num_ranks, every = draw.randint(4, 6), draw.randint(3, 12)
        with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
            options = {"num_steps": MOST_STEPS, "every": every, "redundancy": 1}
            with playing(
                Path(folder) / "run", num_ranks, heartbeat_s=HEARTBEAT_S, **options
            ) as node:
                drill = Drill(node, num_ranks, draw)
                kinds.update(drill.play(arguments.events - kinds.total()))
                worst = max(worst, check(node, drill.all, num_ranks))
                idle += [item["idle_s"] for item in node.events("generation")]
                for item in node.events("recovered"):
                    why = item["why_not_live"] or "no step lost"
                    whys[re.sub(r"\(.*\)|such as .*?\)|\d+ parameters", "…", why)] += 1
        tell(f"{kinds.total():4} events; {num_ranks} workers, largest difference {worst:.1e}")
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
