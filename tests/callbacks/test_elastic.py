"""Whatever is killed, torn or full: torchrun's restarts go on as if nothing had happened.

Each of two workers is a node with a disk and a shared memory of its own; one run takes many faults
one after another. Nodes come and go in `tests.examples.test_long_run`, and all of it at random in
`examples/soak.py`.
"""

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import LayerwiseCheckpoint
from lightning_hetero.callbacks.run_log import read_log
from lightning_hetero.checkpoint import LocalStore, Tier, TierKind
from lightning_hetero.checkpoint.inspection import look, verify
from tests.callbacks.faults import FILES, METHODS, arm
from tests.callbacks.in_place import playing, undisturbed
from tests.callbacks.test_in_place import check_steps, trained

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]

NUM_STEPS = 84
EVERY = 2
DAMAGES: list[dict[str, Any]] = [
    {"what": "flip", "tier": "memory-0", "files": "layer-*.safetensors"},
    {"what": "truncate", "tier": "disk-1", "files": "before*"},
    {"what": "delete", "tier": "disk-0", "files": "*.pt"},
    {"what": "flip", "tier": "memory-1", "files": "part-*.json"},
]


def kills(random_: random.Random) -> list[dict[str, Any]]:
    """Return a fault at each kind of moment, in a random order, on a random node."""
    longest = {"recovery": 1, "set-up": 1, "confirmation": 2, "manifest": 4, "snapshot": 3}
    longest |= {"forward": 16, "copy to a peer": 30}
    moments = [*METHODS, *FILES]
    random_.shuffle(moments)
    return [
        {
            "at": moment,
            "node": random_.choice("01"),
            "after": random_.randint(1, longest.get(moment, 8)),
        }
        for moment in moments
    ]


FAULTS = [
    *kills(random.Random(11)),
    {"at": "forward", "node": "0", "after": 12, "signal": signal.SIGTERM},
    {"at": "forward", "node": "1", "after": 14, "full": "disk file"},
    {"at": "forward", "node": "0", "after": 14, "damage": DAMAGES},
]


def be_a_node(folder: Path, options: dict[str, Any]) -> None:
    """Give this worker a disk and a memory of its own, and let the next fault happen if it is its.

    Runs in a worker.
    """
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    options["disk"] = f"disk-{rank}"
    link = folder / f"memory-{rank}"
    if not link.is_symlink():
        own = LayerwiseCheckpoint(folder / "remote", local_dir=folder / options["disk"])
        link.symlink_to(own.places.memory_dir)
    arm(FAULTS, folder, rank)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder in shared memory where there is some: its fsync costs nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name) / "run"
        for rank in range(2):
            shutil.rmtree((Path(name) / f"run/memory-{rank}").resolve(), ignore_errors=True)


def test_killed_at_any_moment_it_trains_on_from_the_newest_checkpoint(folder: Path) -> None:
    expected = undisturbed(2, NUM_STEPS)
    options = {"num_steps": NUM_STEPS, "every": EVERY, "replicas": 2, "prepare": be_a_node}
    with playing(folder, 2, in_place=False, hastens=True, **options) as node:
        assert node.wait_for_end() == 0, node.log()
        assert int((folder / "next-fault").read_text()) == len(FAULTS)
        steps, num_ranks = trained(node), {size for size, _ in trained(node)}
        events = list(read_log(folder / "events.jsonl"))
    for items in steps.values():
        # Steps are trained again after a restart; who was killed may have written none down.
        latest = {item["rows"][0]: item for item in items}
        items[:] = latest.values()
    assert num_ranks == {2}
    check_steps(steps, expected, 2)
    safe = 0
    for event in events:
        if event["event"] == "recovered":
            assert event["step"] >= safe, "a checkpoint that was reported as complete is lost"
        if event["event"] == "checkpoint":
            safe = max([safe, *event["complete"].values()])
    tier = Tier(kind=TierKind.REMOTE, store=LocalStore(folder / "remote"))
    assert verify(look([tier]), [tier]) == []
