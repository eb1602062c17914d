"""Count what it costs a rank that ranks meet, watch each other and tell each other small things."""

import os
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.iteration.running_plan import PlanSwitch
from lightning_hetero.runtime.ranks.communicators import Rows, init_process_group
from lightning_hetero.runtime.ranks.connections import Connections, is_broken_connection
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring, Watch
from lightning_hetero.strategy import processes as processes_module
from lightning_hetero.strategy.processes import Processes

_TIMEOUT = timedelta(seconds=120)


class CountingStore:
    """Counts the calls of all ranks together."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self._store, name)(*args)

        return counted


def heartbeats(
    store: CountingStore, world_size: int, interval_s: float = 0.0
) -> tuple[list[Heartbeat], list[Watch]]:
    """Return the heartbeats of all ranks, whose rounds the test calls itself, and their watches."""
    numbers = tuple(range(world_size))
    beats = [Heartbeat(store, number=rank, interval_s=interval_s) for rank in numbers]  # type: ignore[arg-type]
    return beats, [beats[rank].watch(Ring(numbers=numbers, rank=rank)) for rank in numbers]


def connect_stages(rank: int, *, plans: list[ParallelPlan]) -> list[tuple[int, bool]]:
    """Return, for plans that run one after another, new sockets and whether stages can talk."""
    processes = Processes(timeout=_TIMEOUT, start_timeout=_TIMEOUT, backend=None)
    processes.meet(TorchElasticEnvironment(), torch.device("cpu"))
    comms, found = processes.comms, []
    for plan in plans:
        before = _sockets()
        runs = mock.Mock(_comms=comms, _tensor_parallel=None)
        PlanSwitch._connect(runs, plan)
        found.append((len(_sockets() - before), bool(comms._edges)))
        dist.barrier(group=processes.control)
    processes.stop_watching()
    return found


def connect_and_agree(rank: int, *, most_eager: int) -> int:
    """Return the sockets that a rank has once all have gathered rows and objects."""
    lazy = "TORCH_GLOO_LAZY_INIT"
    with mock.patch.object(processes_module, "_MAX_EAGER_RANKS", most_eager):
        before = _sockets()
        processes = Processes(timeout=_TIMEOUT, start_timeout=_TIMEOUT, backend=None)
        processes.meet(TorchElasticEnvironment(), torch.device("cpu"))
    try:
        world_size, own = processes.comms.world_size, torch.tensor([float(rank)])
        rows = Rows(own, processes.control).share()
        assert rows.flatten().tolist() == list(range(world_size))
        assert processes.comms.gather_objects(rank) == list(range(world_size))
        dist.barrier(group=processes.control)
        return len(_sockets() - before)
    finally:
        os.environ.pop(lazy, None)
        processes.stop_watching()


def wait_for_frozen(rank: int, *, frozen: int) -> str:
    """Wait for a message that never comes, and hang up.

    Returns why the wait has ended; nothing on the frozen rank.
    """
    processes = Processes(timeout=_TIMEOUT, start_timeout=_TIMEOUT, backend=None)
    found = ""
    processes.meet(TorchElasticEnvironment(), torch.device("cpu"))
    message, store = torch.zeros(1), processes._connect_store()
    if rank == frozen:
        store.wait([f"ended/{r}" for r in range(processes.comms.world_size) if r != frozen])
    else:
        late = threading.Timer(0.2, processes.comms.connections.hang_up)
        late.start()
        try:
            dist.recv(message, frozen, group=processes.control)
        except RuntimeError as error:
            found = str(error)
        late.join()
        store.set(f"ended/{rank}", "")
    processes.stop_watching()
    return found


def talk_until_hung_up(rank: int, *, port: int, num_times: int) -> set[str]:
    """Exchange message after message until both ranks hang up, many times; return how waits ended.

    A wait that isn't ended by hanging up ends by its timeout, and gloo says so. No rank serves the
    store at the port.
    """
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    found = set()
    for number in range(num_times):
        connections = Connections()
        store = dist.PrefixStore(str(number), server)
        options = {"timeout": timedelta(seconds=5)}
        connections.open(partial(init_process_group, "gloo", store, rank, 2, **options))
        hangs_up = threading.Timer((1 + number % 7) * 1e-3, connections.hang_up)
        dist.barrier()
        hangs_up.start()
        try:
            while True:
                dist.all_reduce(torch.zeros(100))
        except RuntimeError as error:
            if not is_broken_connection(error):
                raise
            found.add("Timed out" if "Timed out" in str(error) else "ended")
        hangs_up.join()
        dist.destroy_process_group()
        store.add("left", 1)
        while store.add("left", 0) < 2:
            time.sleep(0.001)
    return found


def _sockets() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for item in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(item))
        except FileNotFoundError:  # The folder's own.
            continue
    return {target for target in found if target.startswith("socket:")}
