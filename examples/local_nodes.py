"""Nodes on this machine for `long_run.py` and `soak.py`: agents to start, kill and look at.

Each node is a torchrun agent with one worker, a disk and a memory of its own. Agents fork their
worker from a process that has imported torch already, so that a restart takes no seconds for that.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from lightning_hetero import HeteroStrategy, LayerwiseCheckpoint


def prepare_folder(folder: Path) -> Path:
    """Empty a folder, and make this process ready to fork others; returns its absolute path."""
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    # For the process that imports once and is forked from then on.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    return folder


def fork(function: Callable[..., None], *arguments: Any) -> Any:
    """Run a function in a process that has imported the function's module already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def run_alone(function: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run a function in a process that writes to `folder/run.log`; SystemExit if it fails."""
    folder.mkdir()
    process = fork(_logged, function, folder / "run.log", *arguments)
    process.join()
    if process.exitcode:
        raise SystemExit((folder / "run.log").read_text()[-4000:])


def _logged(function: Callable[..., None], log: Path, *arguments: Any) -> None:
    write_to(log)
    function(*arguments)


def write_to(path: Path) -> None:
    """Send what this process and its children print to a file."""
    with path.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def launch(work: Callable[..., None], *arguments: Any, options: Sequence[str], port: int) -> None:
    """Be a node's torchrun agent, with one worker that runs `work`."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # For its own records a torchrun asks all modules who called it; this process has thousands.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    common = [
        "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1", "--monitor-interval=0.1", "--start-method=fork",
    ]  # fmt: skip
    config, _, _ = config_from_args(parse_args([*common, *options, "none"]))
    elastic_launch(config, work)(*arguments)


class Agents:
    """The agents of a run's nodes, by the nodes' names."""

    def __init__(self) -> None:
        # Served from here, so that any node may die; a real run has a host that stays, or etcd.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[str, Any] = {}

    @property
    def port(self) -> int:
        """Where agents meet."""
        return self._store.port

    def start(self, name: str, agent: Callable[..., None], *arguments: Any) -> None:
        """Start a node's agent."""
        self.processes[name] = fork(agent, *arguments)

    def workers(self, name: str) -> list[int]:
        """Return the process ids of a node's workers; none while there is none."""
        pid = self.processes[name].pid
        try:
            words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return []
        return [int(word) for word in words]

    def signal(self, number: int, pids: Sequence[int]) -> None:
        """Send a signal to processes that may be gone."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL a node's processes."""
        # The worker first, since the end of its agent would be a signal to it.
        self.signal(signal.SIGKILL, [*self.workers(name), self.processes[name].pid])
        self.processes.pop(name).join()


class LogTail:
    """What a run notes, read on from where the file ended before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """Return what is new; a line that a killed process has torn is left out."""
        if not self.path.exists() or self.path.stat().st_size <= self._position:
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


def forget(checkpoint: LayerwiseCheckpoint) -> None:
    """Empty the memory and the disk of the node that a callback saves on."""
    checkpoint.places.forget_memory()
    shutil.rmtree(str(checkpoint.places.local_dir), ignore_errors=True)


def quiet_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """Return a trainer that prints nothing and trains until it is told to stop."""
    warnings.simplefilter("ignore")
    L.seed_everything(0, verbose=False)
    defaults: dict[str, Any] = {
        "strategy": strategy,
        "accelerator": "cpu",
        "max_epochs": -1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        # LayerwiseCheckpoint stands for Lightning's own.
        "enable_checkpointing": isinstance(strategy, HeteroStrategy),
    }
    return L.Trainer(**defaults | options)
