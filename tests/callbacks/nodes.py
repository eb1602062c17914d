"""Be the processes of a node: a keeper or torchrun's agent, and workers that are forks of it."""

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from lightning_hetero.keep import be_kept, block_signals
from lightning_hetero.runtime.generation import keeper as keeper_module
from lightning_hetero.runtime.generation.keeper import JOIN, Keeper, Worker
from tests.processes import free_port, use_default_start_method


def log_to(folder: Path) -> None:
    """Send what this process prints to the node's log."""
    use_default_start_method()
    torch.set_num_threads(1)
    log = (folder / "log").open("a")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())


def _write_pid(folder: Path, name: str) -> None:
    temporary = folder / f"new-pid-{name}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(folder / f"pid-{name}")  # Whoever waits for it reads all of it.


def play_restarts(
    folder: Path, num_ranks: int, work: Callable[[], None], *, hastens: bool = False
) -> None:
    """Be a node whose workers torchrun starts again; forks, so they import nothing."""
    log_to(folder)
    if hastens:
        # Without what spares the store of a large cluster, and a search for callers' names.
        dynamic_rendezvous._delay = lambda seconds: time.sleep(random.uniform(0.02, 0.1))
        dynamic_rendezvous._BackendRendezvousStateHolder.__init__.__defaults__ = (0,)
        dynamic_rendezvous.get_method_name = lambda depth=2: ""

    def start() -> None:
        os.environ["FIRST_RANK"] = os.environ["RANK"]
        _write_pid(folder, os.environ["RANK"])
        work()

    options = [f"--nproc-per-node={num_ranks}", "--max-restarts=100", "--monitor-interval=0.1"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={folder.name}"]
    options += ["--start-method=fork", "none"]
    config, _, _ = config_from_args(parse_args(options))
    elastic_launch(config, start)()


def play(folder: Path, num_ranks: int, work: Callable[[], None], *, replaces: bool = False) -> None:
    """Be a node: keep workers that do `work`, and end with the keeper's exit code."""
    port = free_port()
    (folder / "port").write_text(str(port))
    names = [str(rank) for rank in range(num_ranks)]
    os.environ |= {**_launched(port), "NODE_RANK": "0", "WORLD_SIZE": str(num_ranks)}
    keep_workers(folder, names, work, port, serves=True, replaces=replaces)


def play_second(folder: Path, name: str, port: int, work: Callable[[], None]) -> None:
    """Be the second node of two of one worker each, which reach the store at a port."""
    os.environ |= {**_launched(port), "NODE_RANK": "1", "WORLD_SIZE": "2"}
    keep_workers(folder, [name], work, port, serves=False)


def play_joiner(folder: Path, name: str, work: Callable[[], None]) -> None:
    """Be a node of one worker that joins a run."""
    port = int((folder / "port").read_text())
    os.environ |= {JOIN: f"127.0.0.1:{port}", "NODE_RANK": "1"}
    keep_workers(folder, [name], work, port, serves=False)


def _launched(port: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**address, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def keep_workers(
    folder: Path,
    names: list[str],
    work: Callable[[], None],
    port: int,
    *,
    serves: bool,
    replaces: bool = False,
) -> None:
    """Be the keeper of workers with these names; ends with its exit code."""
    log_to(folder)
    block_signals()
    keeper_module._FIRST_WAIT_S = 0.1

    def start(local_rank: int, environment: dict[str, str], _: int) -> int:
        pid = os.fork()
        if pid == 0:
            be_kept()
            os.environ |= environment | {"LOCAL_RANK": str(local_rank)}
            os.environ["FIRST_RANK"] = names[local_rank]
            _write_pid(folder, names[local_rank])
            try:
                work()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
        return pid

    workers = [Worker(partial(start, rank)) for rank in range(len(names))]
    keeper = Keeper(workers, address="127.0.0.1", port=port, serves=serves, replaces=replaces)
    os._exit(keeper.run())
