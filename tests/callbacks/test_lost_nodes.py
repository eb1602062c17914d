"""Whole nodes are lost at once, keepers and workers; also the one that serves the store."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import LayerwiseCheckpoint
from lightning_hetero.callbacks.run_log import read_log
from tests.callbacks.in_place import (
    BATCH,
    Node,
    keep_workers,
    loader,
    log_to,
    trainer_of,
    undisturbed,
)
from tests.processes import fork_server, free_port
from tests.toy import ToyModule, ToyOptions

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

RANKS = ((0,), (1, 2), (3,))
"""Of each node; the first one serves the store."""
NUM_RANKS = 4


def train(folder: Path, node: int) -> None:
    os.environ["RANK"] = os.environ["FIRST_RANK"]
    trainer = trainer_of(
        folder, num_ranks=1, num_steps=1000, every=100, heartbeat_s=6.0, redundancy=1
    )
    for callback in trainer.callbacks:
        if isinstance(callback, LayerwiseCheckpoint):
            own = str(folder / f"disk-{node}")
            callback.places = replace(callback.places, local_dir=own)
    trainer.fit(ToyModule(ToyOptions(num_layers=4)), loader(BATCH))


def be_node(folder: Path, node: int, port: int) -> None:
    """Be what torchrun has started on a node."""
    log_to(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "nodes"}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "GROUP_RANK": str(node)}
    os.environ |= {"GROUP_WORLD_SIZE": str(len(RANKS))}
    names = [str(rank) for rank in RANKS[node]]
    keep_workers(folder, names, partial(train, folder, node), port, serves=node == 0)


class Nodes(Node):
    """Nodes under a test's control; the last one stays longest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        port = free_port()
        self.processes = [
            fork_server().Process(target=be_node, args=(folder, node, port))
            for node in range(len(RANKS))
        ]
        for process in self.processes:
            process.start()
        self.process = self.processes[-1]

    def lose(self, node: int) -> None:
        """SIGKILL a node's keeper, with which its workers end."""
        self.processes[node].kill()
        self.processes[node].join()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path / "run")
    yield found
    for process in found.processes:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore")
def test_a_lost_node_loses_no_step_and_without_the_stores_node_the_run_ends(nodes: Nodes) -> None:
    expected = undisturbed(NUM_RANKS, 6)
    nodes.let_go_on_to(3)
    for rank in range(NUM_RANKS):
        nodes.wait_for_step(rank, 3)
    nodes.lose(1)
    nodes.let_go_on_to(6)
    records: list[dict[str, Any]] = []
    for rank in (0, 3):
        nodes.wait_for_step(rank, 6)
        records += [item for item in nodes.records(rank) if "step" in item]
    assert [item["loss"] for item in records] == pytest.approx(
        [expected[item["step"] - 1] for item in records], rel=1e-5
    )
    assert [item["step"] for item in records] == [*range(1, 7), *range(1, 7)]
    (lost,) = [e for e in read_log(nodes.folder / "events.jsonl") if e["event"] == "generation"]
    assert (sorted(lost["lost"]), lost["ranks"], lost["steps_again"]) == ([1, 2], 2, 0)
    # Who loses the store can't know who else is left: it ends, for the launcher to start again.
    nodes.lose(0)
    nodes.let_go_on_to(1000)
    assert nodes.wait_for_end() not in (0, None)
    assert max(item.get("step", 0) for item in nodes.records(3)) <= 7
