"""How the processes of a run meet: they connect to the store that one of them serves, and compare.

A stale plan file or another version on one node would make messages differ in size. So ranks see at
the start that all run the same thing: one that doesn't is named, and nobody hangs.
"""

import json
import os
import platform
import sys
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.runtime.ranks.communicators import Communicators

__all__ = ["EXIT_CODE", "check_alike", "connect_store", "end_process"]

EXIT_CODE = 13
"""Exit code of a rank that had to be ended, because its main thread waits for ever."""


def end_process(global_rank: int, reason: str) -> None:
    """End this process at once, whatever its threads wait for."""
    sys.stderr.write(f"PeerError on rank {global_rank}: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def connect_store(
    address: str, port: int, *, global_rank: int, world_size: int, timeout: timedelta
) -> Store:
    """Return the run's key-value store; collective over all ranks.

    Under torchrun the agent may serve it, and it outlives the processes. Keys of a former start are
    still there then, so the ranks first agree on a prefix of their own.

    Raises:
        PeerError: The other ranks didn't come within the timeout.
    """
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with _ended_when_late(global_rank, f"{address}:{port}", timeout.total_seconds()):
        store = TCPStore(
            address,
            port,
            world_size,
            is_master=global_rank == 0 and not agent_serves,
            timeout=timeout,
            multi_tenant=True,
        )
        if not agent_serves:
            return PrefixStore("lightning_hetero", store)
        meeting = PrefixStore("lightning_hetero/meeting", store)
        name = _meet(meeting, global_rank, world_size, timeout.total_seconds())
        return PrefixStore(f"lightning_hetero/{name}", store)


@contextmanager
def _ended_when_late(global_rank: int, address: str, timeout_s: float) -> Iterator[None]:
    """End the process if it still connects when its own timeouts should have raised.

    They don't hold for a server that is frozen: it takes connections and never answers.
    """
    reason = f"the store at {address} takes connections and doesn't answer. Look at rank 0."
    timer = threading.Timer(timeout_s + min(10.0, timeout_s), end_process, [global_rank, reason])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _meet(store: Store, global_rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name that the ranks that live now agree on, whatever former ones have left.

    Each rank says a word that nobody has used. Rank 0 goes on answering with a name and the words
    it has heard, until all ranks have found their own word in the answer and confirmed the name.
    The agents' restart counts can't serve: they differ between nodes once one has joined later.
    """
    deadline = time.monotonic() + timeout_s
    word = uuid.uuid4().hex
    store.set(f"word/{global_rank}", word)
    answered = ""
    while time.monotonic() < deadline:
        if global_rank == 0:
            keys = [f"word/{rank}" for rank in range(1, world_size)]
            if all(store.check([key]) for key in keys):
                answer = json.dumps([word, [store.get(key).decode() for key in keys]])
                if answer != answered:
                    store.set("answer", answer)
                    answered = answer
            if store.add(f"confirmed/{word}", 0) == world_size - 1:
                return word
        elif store.check(["answer"]):
            name, heard = json.loads(store.get("answer"))
            if len(heard) == world_size - 1 and heard[global_rank - 1] == word:
                store.add(f"confirmed/{name}", 1)
                return str(name)
        time.sleep(0.01)
    raise PeerError(
        f"Rank {global_rank} of {world_size} waited {timeout_s:.0f} s for the others to start. If "
        "nodes have come or gone, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is "
        "started: some of its versions send restarted processes to a store that has moved."
    )


_PACKAGES = ("lightning_hetero", "torch", "lightning", "torchmetrics", "numpy")


def _versions() -> dict[str, str]:
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_alike(comms: Communicators, **facts: object) -> None:
    """Compare facts of all ranks, by their text, and versions of packages; collective.

    Raises:
        ConfigurationError: A rank has others than most; on every rank.
    """
    texts = {name: str(fact) for name, fact in {**_versions(), **facts}.items()}
    own = {
        name: text if len(text) < 40 else f"digest {zlib.crc32(text.encode()):08x}"
        for name, text in texts.items()
    }
    everyone = comms.gather_objects(own)
    for name in own:
        found = [item.get(name, "none") for item in everyone]
        usual = Counter(found).most_common(1)[0][0]
        others = {rank: value for rank, value in enumerate(found) if value != usual}
        if others:
            shown = ", ".join(f"rank {rank} has {value}" for rank, value in others.items())
            raise ConfigurationError(
                f"Ranks don't run the same: most have {name} {usual}, but {shown}. Give all nodes "
                "the same code, packages, plan file and options."
            )
