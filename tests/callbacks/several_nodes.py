"""Runs on several nodes, each a keeper and its workers, of which whole ones are lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.callbacks.in_place import Node, train
from tests.callbacks.nodes import keep_workers
from tests.processes import fork_server, free_port

RANKS = ((0,), (1, 2), (3,))
"""Of each node; the first one serves the store."""
NUM_RANKS = 4


def _train(folder: Path, node: int, options: dict[str, Any]) -> None:
    os.environ["RANK"] = os.environ["FIRST_RANK"]
    train(folder, num_ranks=1, disk=f"disk-{node}", **options)


def _be_node(folder: Path, node: int, port: int, options: dict[str, Any]) -> None:
    """Be what torchrun has started on a node."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "nodes"}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "GROUP_RANK": str(node)}
    os.environ |= {"GROUP_WORLD_SIZE": str(len(RANKS))}
    names = [str(rank) for rank in RANKS[node]]
    keep_workers(folder, names, partial(_train, folder, node, options), port, serves=node == 0)


class Nodes(Node):
    """Nodes under a test's control; the last one stays longest."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        folder.mkdir()
        port = free_port()
        self.processes = [
            fork_server().Process(target=_be_node, args=(folder, node, port, options))
            for node in range(len(RANKS))
        ]
        for process in self.processes:
            process.start()
        self.process = self.processes[-1]

    def lose(self, node: int) -> None:
        """SIGKILL a node's keeper, with which its workers end."""
        self.processes[node].kill()
        self.processes[node].join()


@contextmanager
def playing_nodes(folder: Path, **options: Any) -> Iterator[Nodes]:
    """Give nodes; what is left of them ends with the context."""
    nodes = Nodes(folder, **options)
    try:
        yield nodes
    finally:
        for process in nodes.processes:
            process.kill()
            process.join()
