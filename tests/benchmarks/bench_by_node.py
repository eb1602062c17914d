"""Gradients summed on each node before they leave it, against those sent straight to their owners.

Two nodes are two network namespaces with a link of 200 Mbit/s between them (`tc`), two ranks on
each, so half as many bytes of a push cross it. Needs root and iproute2; elsewhere there is no row.

Counted for S bytes of fp32 gradients: straight, two ranks send S/2 each over the link each way, by
node S/4. A pull is the same in both: an all-gather around a ring, each link of which carries S·3/4.
So the floor of the ratio is 0.71, were nothing computed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import StepTimes
from tests.toy import ToyModule, ToyOptions, loader, quiet

NUM_RANKS = 4
WIDTH = 512
NUM_LAYERS = 2
NUM_STEPS = 8
WARM_UP = 3
LINK = "200mbit"
LINK_NAME = "between"
"""Of the interface in each namespace."""
KINDS = ("by-node", "collectives")
REPEATS = 3
_PATIENCE_S = 300.0


def run() -> list[Row]:
    with two_nodes() as names:
        if names is None:
            return []
        ours, peer = _step_s(names)
    return [
        Row(
            name=f"step of 2 nodes with 2 ranks each, {LINK} between them, gradients by node",
            ours=ours,
            peer=peer,
            target=0.9,
            note="gradients straight to their owners; the pull is the same",
        )
    ]


@contextmanager
def two_nodes() -> Iterator[tuple[str, str] | None]:
    """Give two network namespaces with one slow link; None where they can't be made."""
    one, other = (f"hetero-{os.getpid()}-{index}" for index in range(2))
    commands = [f"netns add {one}", f"netns add {other}"]
    commands += [f"link add {LINK_NAME} netns {one} type veth peer name {LINK_NAME} netns {other}"]
    for index, name in enumerate((one, other)):
        shape = f"tc qdisc add dev {LINK_NAME} root tbf rate {LINK} burst 256kb latency 200ms"
        commands += [
            f"-n {name} addr add 10.77.0.{index + 1}/24 dev {LINK_NAME}",
            *(f"-n {name} link set {item} up" for item in (LINK_NAME, "lo")),
            f"netns exec {name} {shape}",
        ]
    if shutil.which("ip") is None:
        yield None
        return
    try:
        # Each needs those before it.
        are_made = all(_ip(command) for command in commands)
        yield (one, other) if are_made else None
    finally:
        for name in (one, other):
            _ip(f"netns del {name}")


def _ip(command: str) -> bool:
    done = subprocess.run(["ip", *command.split()], check=False, capture_output=True)
    return done.returncode == 0


def _step_s(names: tuple[str, str]) -> list[float]:
    """Return the median seconds of a step on rank 0, for each of the kinds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        common = {
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29731",
            "WORLD_SIZE": str(NUM_RANKS),
            "GROUP_WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "by-node",
            "GLOO_SOCKET_IFNAME": LINK_NAME,
        }
        command = [sys.executable, "-m", "tests.benchmarks.bench_by_node", str(output)]
        processes = []
        for rank in range(NUM_RANKS):
            node, local_rank = divmod(rank, 2)
            own = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
            own_environment = os.environ | common | {key: str(n) for key, n in own.items()}
            inside = ["ip", "netns", "exec", names[node], *command]
            processes.append(subprocess.Popen(inside, env=own_environment))
        try:
            for process in processes:
                assert process.wait(_PATIENCE_S) == 0
        finally:
            for process in processes:
                process.kill()
        times: dict[str, list[float]] = json.loads(output.read_text())
        return [statistics.median(times[kind]) for kind in KINDS]


def main(output: str) -> None:
    """Train as one rank by each kind in turn; rank 0 writes the seconds of its steps."""
    times = {kind: list[float]() for kind in KINDS}
    for _ in range(REPEATS):
        for kind in KINDS:
            times[kind] += _train(kind)
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(times))


def _train(kind: Any) -> list[float]:
    stages = [
        {"stages": [{"ranks": [rank], "layers": [0, NUM_LAYERS]}]} for rank in range(NUM_RANKS)
    ]
    strategy = HeteroStrategy(ParallelPlan.from_dict({"pipelines": stages}), exchange=kind)
    times, options = StepTimes(WARM_UP), quiet(devices=2, max_steps=NUM_STEPS)
    trainer = L.Trainer(strategy=strategy, callbacks=[times], num_nodes=2, **options)
    sizes = ToyOptions(num_layers=NUM_LAYERS, width=WIDTH)
    trainer.fit(ToyModule(sizes), loader(NUM_RANKS * NUM_STEPS, 1))
    return times.seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
