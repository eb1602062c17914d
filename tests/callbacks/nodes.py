"""Nodes on loopback: a torchrun agent each, with a folder of its own for its disk."""

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from examples.local_nodes import LogTail
from tests.processes import free_port
from tests.scripts import start_python

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0
RUN_ID = "run"


class Nodes:
    """The nodes of one run; a context that ends them all.

    Args:
        folder: Where they write.
        nnodes: As torchrun's option, such as "2:4".
        settings: What every training process is told; see `tests.callbacks.agent`.
    """

    def __init__(self, folder: Path, nnodes: str, **settings: Any) -> None:
        self.folder = folder
        self.nnodes = nnodes
        self.settings = settings
        self.agents: dict[str, mp.Process] = {}
        self._records: dict[str, tuple[LogTail, list[dict[str, Any]]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        # Served from here, so that any node may die.
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.agents):
            self.lose(name)

    def start(self, *names: str) -> None:
        for name in names:
            command = [
                "-m", "tests.callbacks.agent", f"--nnodes={self.nnodes}",
                "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self._port}",
                f"--rdzv-id={RUN_ID}",
                # Nodes are lost when the test says so, not when a machine under load is late.
                "--rdzv-conf=is_host=false,last_call_timeout=2,keep_alive_max_attempt=1000",
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

    def lose(self, *names: str) -> None:
        """Take nodes away at once, with all processes and everything they kept."""
        pids = [self.agents[name].pid for name in names]
        for name in names:
            agent = self.agents.pop(name)
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
            workers = children.read_text().split() if children.exists() else []
            for pid in (agent.pid, *map(int, workers)):
                if agent.is_alive() or pid != agent.pid:
                    os.kill(pid, signal.SIGKILL)
            agent.join()
        self._expire(pids)
        for name in names:
            shutil.rmtree((self.folder / name / "memory").resolve(), ignore_errors=True)
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def let_go_on_to(self, step: int) -> None:
        """Let training go on, and make it stop before the step after `step`."""
        temporary = self.folder / "limit.new"
        temporary.write_text(str(step))
        temporary.replace(self.folder / "limit")

    def wait_for_end(self, *names: str) -> list[int]:
        codes = []
        for name in names:
            agent = self.agents[name]
            agent.join(PATIENCE_S)
            assert not agent.is_alive(), self.logs()
            codes.append(self.agents.pop(name).exitcode)
            self._expire([agent.pid])
        return codes

    def _expire(self, pids: Sequence[int]) -> None:
        """Let agents that have ended be lost for the rendezvous, as if their heartbeat was late."""
        backend = C10dRendezvousBackend(self._store, RUN_ID)
        is_set: bool | None = False
        while not is_set:
            found = backend.get_state()
            if found is None:
                return
            state, token = pickle.loads(found[0]), found[1]
            for node in state.last_heartbeats:
                if node.pid in pids:
                    state.last_heartbeats[node] = datetime.min.replace(tzinfo=UTC)
            answer = backend.set_state(pickle.dumps(state), token)
            assert answer is not None
            is_set = answer[2]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            ended = [name for name, agent in self.agents.items() if agent.exitcode not in (None, 0)]
            assert not ended, self.logs()
            time.sleep(0.02)

    def records(self, *names: str) -> list[dict[str, Any]]:
        """Return what the nodes' processes wrote, node by node; a torn last line is left out."""
        found = []
        for name in names or sorted(path.stem for path in self.folder.glob("*.jsonl")):
            found += self._records_of(name)
        return found

    def _records_of(self, name: str) -> list[dict[str, Any]]:
        if name not in self._records:
            self._records[name] = LogTail(self.folder / f"{name}.jsonl"), []
        tail, known = self._records[name]
        known += tail.read()  # Whoever waits asks many times a second.
        return known

    def is_uploading(self, name: str) -> bool:
        counts = [item["uploading"] for item in self.records(name) if "uploading" in item]
        return bool(counts and counts[-1])

    def last(self, key: str, *names: str) -> int:
        return max((item[key] for item in self.records(*names) if key in item), default=-1)

    def rank_of(self, name: str) -> int:
        """Return the rank that a node had in its last start."""
        return [item["rank"] for item in self.records(name) if "begin" in item][-1]

    def logs(self) -> str:
        texts = [f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log")]
        return "\n".join(texts)[-20000:]
