"""SIGKILL at random moments of saving: what was reported as committed is there, whole."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_hetero.checkpoint import LocalStore, Tier, TierKind
from tests.checkpoint.states import PLANS, assert_is_state, needs_of, recover
from tests.fast_python import fast_python

SAVER = """
import itertools, os, sys
from lightning_hetero.checkpoint import CheckpointWriter, LocalStore, Tier, TierKind
from tests.checkpoint.states import contents
from tests.checkpoint.states import PLANS

def save_for_ever(root, first, log):
    tiers = [
        Tier(kind=TierKind.MEMORY, store=LocalStore(root + "/shm"), keep=1),
        Tier(kind=TierKind.DISK, store=LocalStore(root + "/disk"), keep=1),
        Tier(kind=TierKind.REMOTE, store=LocalStore(root + "/remote"), keep=1),
    ]
    writer = CheckpointWriter(tiers)
    plan, size = PLANS["one device"]
    for step in itertools.count(first):
        saved = writer.save(contents(step, plan, size)[0])
        saved.wait_until_confirmed()
        os.write(log, f"local {step}\\n".encode())
        if saved.wait_until_uploaded():
            os.write(log, f"remote {step}\\n".encode())

print("ready", flush=True)
for line in sys.stdin:
    root, first, path = line.split()
    child = os.fork()
    if child == 0:
        save_for_ever(root, int(first), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""
ROUNDS = 30


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """Give a folder in shared memory where there is some: its fsync costs nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.dist
def test_sigkill_never_loses_or_tears_a_committed_checkpoint(fast_path: Path) -> None:
    random_ = random.Random(3)
    plan, size = PLANS["one device"]
    needs = needs_of(0, plan, size)
    committed = {"shm": 0, "disk": 0, "remote": 0}
    first = 1
    # One process imports once; its forks do the saving and are killed.
    server = subprocess.Popen(
        [fast_python(), "-c", SAVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    try:
        log = fast_path / "log"
        span_s: float | None = None
        assert server.stdout.readline() == "ready\n"
        for _ in range(ROUNDS):
            after_s = None if span_s is None else random_.uniform(0.0, 1.5 * span_s)
            passed_s = _save_until_killed(server, f"{fast_path} {first} {log}", log, after_s)
            span_s = span_s or passed_s
            for line in log.read_text().splitlines() if log.exists() else ():
                kind, step = line.split()
                for name in ("remote",) if kind == "remote" else ("shm", "disk"):
                    committed[name] = max(committed[name], int(step))
            for name in committed:
                store = LocalStore(fast_path / name)
                recovered = recover(needs, [Tier(kind=TierKind.DISK, store=store)])
                step = 0 if recovered is None else recovered.id.step
                assert step >= committed[name], name
                if recovered is not None:
                    assert_is_state(recovered, needs, step)
                    assert recovered.failures == ()
                first = max(first, step + 1)
    finally:
        server.kill()
        server.communicate()
    assert committed["disk"] > 1, "nothing was ever saved"


def _save_until_killed(
    server: "subprocess.Popen[str]", line: str, log: Path, after_s: float | None
) -> float:
    """Kill a saving process after a time, or after four lines in its log; return the time."""
    assert server.stdin is not None
    assert server.stdout is not None
    start_s = time.monotonic()
    server.stdin.write(line + "\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    if after_s is None:
        while not log.exists() or log.read_text().count("\n") < 4:
            time.sleep(0.001)
    else:
        time.sleep(after_s)
    passed_s = time.monotonic() - start_s
    os.kill(child, signal.SIGKILL)
    assert server.stdout.readline() == "dead\n"
    return passed_s
