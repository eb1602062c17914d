"""A drill: a small run on three nodes takes as many faults as you like, and loses nothing.

::

    python examples/soak.py 200              # faults; about 10 s each on 2 CPU cores
    python examples/soak.py 20 --seed 7      # others, at other moments

Three torchrun agents on this machine, each a node with a disk and a memory of its own, and a remote
store. Workers and whole nodes are killed, frozen and told to go; disks are deleted or full; the
store answers 500. Faults come while the run trains, uploads a checkpoint, or still recovers from
the fault before. Then one process of plain Lightning trains the same steps undisturbed: every step
must have been trained, each time with the same loss. What the faults have cost is printed.
"""

import argparse
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from local_nodes import LogTail, prepare_folder, run_alone
from soak_faults import KINDS, Faults, Nodes, playing
from soak_node import Settings, train_alone
from soak_table import Fault, compare, tell

PATIENCE_S = 300.0
"""After which a run that trains no step counts as hung."""
MOMENTS = {"training": 4, "upload": 2, "recovery": 4}
"""When faults come, and how often."""


class Watch:
    """Follows what the run notes, and keeps its nodes in repair meanwhile."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.events: list[dict[str, Any]] = []
        self.num_trained = 0
        self._log = LogTail(nodes.settings.events)
        self._trained_at_s = time.monotonic()

    def look(self) -> None:
        """Read what is new; SystemExit if nothing was trained for too long."""
        time.sleep(0.05)
        self.nodes.repair()
        new = self._log.read()
        self.events += new
        count = sum(event["event"] == "trained" for event in new)
        if count:
            self.num_trained, self._trained_at_s = self.num_trained + count, time.monotonic()
        if time.monotonic() - self._trained_at_s > PATIENCE_S:
            logs = [path.read_text()[-3000:] for path in self._log.path.parent.glob("*.log")]
            raise SystemExit("\n".join([*logs, f"no step was trained for {PATIENCE_S:.0f} s"]))

    @property
    def is_training(self) -> bool:
        """Whether a step was trained a moment ago."""
        return time.monotonic() - self._trained_at_s < 1.0

    def wait_for_steps(self, count: int) -> None:
        """Wait until this number of steps was trained."""
        until = self.num_trained + count
        while self.num_trained < until:
            self.look()

    def wait_for_upload(self) -> None:
        """Wait until a checkpoint is on its way to the remote store, if one comes soon."""
        known, until = self._in_store(), self.num_trained + 20
        while self._in_store() <= known and self.num_trained < until:
            self.look()

    def wait_for_seconds(self, seconds: float) -> None:
        """Wait, whether anything is trained or not."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.look()

    def has_seen(self, event: str) -> bool:
        """Return whether there was such an event."""
        return any(item["event"] == event for item in self.events)

    def _in_store(self) -> set[str]:
        remote = self.nodes.settings.remote
        return {path.name for path in remote.iterdir()} if remote.exists() else set()


def play(watch: Watch, num_faults: int, random_: random.Random) -> list[Fault]:
    """Train, and let faults happen up to a number of them."""
    nodes, happened = watch.nodes, Faults(watch.nodes)
    # The store holds something from the first fault on: what a run can fall back to.
    watch.wait_for_steps(3 * nodes.settings.every_n_train_steps)
    done: list[Fault] = []
    start_s = time.time()
    for _ in range(num_faults):
        moment = random_.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "recovery":
            watch.wait_for_seconds(random_.uniform(0.0, 4.0))
        else:
            watch.wait_for_steps(random_.randint(2, 8))
        if moment == "upload":
            watch.wait_for_upload()
        kind = random_.choices(list(KINDS), list(KINDS.values()))[0]
        while not (running := nodes.running()):
            watch.look()
        name = random_.choice(running)
        if moment == "recovery" and watch.is_training:
            moment = "training"
        done.append(Fault(kind=kind, moment=moment, at_s=time.time()))
        print(
            f"{done[-1].at_s - start_s:7.1f} s  step {watch.num_trained:5}  "
            f"{len(done):4}. {kind}: {name}, {moment}",
            flush=True,
        )
        happened.strike(kind, name, random_.uniform(0.2, 2.0) * nodes.settings.timeout_s)
    watch.wait_for_steps(10)
    nodes.settings.is_last.touch()
    while not watch.has_seen("ended"):
        watch.look()
    return done


def main() -> None:
    """Play the run, train the undisturbed one, compare them and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", type=int, help="number of faults")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed that decides which faults come, and when"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/soak"), help="folder for all files"
    )
    parser.add_argument(
        "--timeout", type=float, default=6.0, help="seconds that a rank waits for another"
    )
    arguments = parser.parse_args()
    # So that the nodes end with this process, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to go"))
    out = prepare_folder(arguments.out)
    run = Settings(folder=out / "run", timeout_s=arguments.timeout)
    run.folder.mkdir(parents=True)
    with playing(run) as nodes:
        watch = Watch(nodes)
        faults = play(watch, arguments.faults, random.Random(arguments.seed))
    num_steps = max(event["step"] for event in watch.events if event["event"] == "trained")
    print(f"\nthe same {num_steps} steps undisturbed, in one process of plain Lightning")
    single = replace(run, folder=out / "undisturbed", num_steps=num_steps, pace_s=0.0)
    run_alone(train_alone, single.folder, single)
    print(tell(faults, watch.events))
    difference = compare(watch.events, single.events)
    print(f"every step was trained; losses differ by {difference:.1e} at most")
    if not difference <= 1e-4:
        raise SystemExit("the losses aren't those of the undisturbed run")


if __name__ == "__main__":
    main()
