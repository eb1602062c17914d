"""torchft's replica groups as a peer: the recovery benchmark's toy under its DDP, on gloo.

Run by a Python that has `torchft-nightly` beside torch (`torchft_environment`), never imported by
the package::

    python -m tests.benchmarks.torchft_peer FOLDER NUM_REPLICAS ROW_MS

One process serves the Lighthouse; each replica group is one process, which a supervisor starts
again at once where it has died, as torchrun or a cluster's manager would. They are forks of one
process that has imported everything, as ours and torchrun's are. A replica writes each attempt at a
step down: whether it was committed, torchft's step, and the batches that all replicas together have
committed.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from tests.benchmarks.paced_toy import BATCH, NUM_ROWS, PacedLoss
from tests.processes import die_with_parent
from tests.toy import TokenRows

HEARTBEAT_MS = 2000
"""As ours; its default is 5,000."""
JOIN_MS = 1000
"""How long a quorum waits for a replica that beats. The default of 100 leaves live ones out of many
steps where four share two cores."""
_GROUP_TIMEOUT = timedelta(seconds=5)
"""Of the process group, as in torchft's own example."""


def serve_lighthouse(folder: Path) -> None:
    """Serve until the parent ends."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        heartbeat_timeout_ms=HEARTBEAT_MS,
        join_timeout_ms=JOIN_MS,
    )
    _write(folder / "lighthouse", server.address().replace(os.uname().nodename, "127.0.0.1"))
    while True:
        time.sleep(3600.0)


def train(folder: Path, row_ms: float, index: int) -> None:
    """Be a replica group of one process."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    loss = PacedLoss(row_ms)
    module: Any = None
    optimizer: Any = None

    def state_dict() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_GROUP_TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"replica_{index}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=(folder / "lighthouse").read_text(),
        hostname="127.0.0.1",
    )
    module = DistributedDataParallel(manager, loss)
    optimizer = Optimizer(manager, loss.toy.configure_optimizers())
    _write(folder / f"pid-{index}", str(os.getpid()))
    with (folder / f"worker-{os.getpid()}.jsonl").open("a") as file:
        while True:
            for batch in DataLoader(TokenRows(NUM_ROWS), batch_size=BATCH):
                before = manager.current_step()
                optimizer.zero_grad()
                module(batch).backward()
                optimizer.step()
                step, batches = manager.current_step(), manager.batches_committed()
                entry = {"at_s": time.time(), "step": step, "batches": batches}
                file.write(json.dumps({**entry, "committed": step > before}) + "\n")
                file.flush()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"new-{path.name}")
    temporary.write_text(text)
    temporary.rename(path)


def _fork(work: Any, *arguments: Any) -> int:
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        try:
            work(*arguments)
        finally:
            os._exit(1)
    return pid


def main() -> None:
    """Start all, and start again what ends."""
    die_with_parent()  # It has a session of its own, which nobody ends with the benchmark's.
    folder, num_replicas, row_ms = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _fork(serve_lighthouse, folder)
    while not (folder / "lighthouse").exists():
        time.sleep(0.01)
    replicas = {_fork(train, folder, row_ms, index): index for index in range(num_replicas)}
    while True:
        pid, _ = os.wait()
        index = replicas.pop(pid)
        replicas[_fork(train, folder, row_ms, index)] = index


if __name__ == "__main__":
    main()
