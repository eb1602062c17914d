"""Nodes on loopback: a torchrun agent each, with a folder of its own for its disk."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from examples.local_nodes import LogTail
from tests.processes import free_port
from tests.scripts import start_python

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0


class Nodes:
    """Two nodes of one run; a context that ends them.

    Args:
        folder: Where they write.
        nnodes: As torchrun's option.
        missed_beats: After so many, of 5 s each, torchrun takes a node for lost.
        settings: What every training process is told; see `tests.callbacks.agent`.
    """

    def __init__(
        self, folder: Path, *, nnodes: str = "2", missed_beats: int = 1000, **settings: Any
    ) -> None:
        self.folder = folder
        self.nnodes = nnodes
        self.missed_beats = missed_beats
        self.settings = settings
        self.agents: dict[str, mp.Process] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        # Served from here, so that any node may die.
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)

    def __enter__(self) -> "Nodes":
        for name in "ab":
            command = [
                "-m", "tests.callbacks.agent", f"--nnodes={self.nnodes}",
                "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self._port}",
                "--rdzv-id=run",
                # By default no node is lost because a machine under load is late.
                "--rdzv-conf=is_host=false,last_call_timeout=2,"
                f"keep_alive_max_attempt={self.missed_beats}",
                "--local-addr=127.0.0.1", "--monitor-interval=0.1",
            ]  # fmt: skip
            self.agents[name] = start_python(
                command,
                output=self.folder / f"{name}.log",
                folder=ROOT,
                FOLDER=str(self.folder),
                NODE=name,
                LIGHTNING_HETERO_CACHE=str(self.folder / name / "cache"),
                ELASTIC=json.dumps(self.settings),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
        return self

    def __exit__(self, *_: object) -> None:
        for name, agent in self.agents.items():
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
            workers = children.read_text().split() if children.exists() else []
            for pid in (agent.pid, *map(int, workers)) if agent.is_alive() else ():
                os.kill(pid, signal.SIGKILL)
            agent.join()
            shutil.rmtree((self.folder / name / "memory").resolve(), ignore_errors=True)

    def wait_for_end(self) -> list[int]:
        """Return the agents' exit codes."""
        for agent in self.agents.values():
            agent.join(PATIENCE_S)
            assert not agent.is_alive(), self.logs()
        return [agent.exitcode for agent in self.agents.values()]

    def records(self, *names: str) -> list[dict[str, Any]]:
        """Return what the nodes' processes wrote, node by node; a torn last line is left out."""
        return [
            item for name in names or "ab" for item in LogTail(self.folder / f"{name}.jsonl").read()
        ]

    def logs(self) -> str:
        texts = [f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log")]
        return "\n".join(texts)[-20000:]
