"""How the processes of a run meet: connect to the store that one of them serves, and compare.

If one node has an old plan file or another version, messages would differ in size. So the ranks
compare what they run at the start: an error names the rank that differs, and none hangs.

With n ranks a store has 2n clients: for each rank one for calls that may wait and one for its
heartbeat. If ranks may be outlived there are 6n, because membership, generation and keepers have
clients, too. A server that runs out of file descriptors accepts no more clients, so its limit is
raised as far as the system allows.
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
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import DistError, DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process import Deadline, allow_files, installed_version
from lightning_hetero.runtime.ranks.communicators import Communicators

EXIT_CODE = 13
"""Exit code of a rank that had to be ended because its main thread would wait forever."""


def end_process(global_rank: int, reason: str) -> None:
    """End this process at once, whatever its threads wait for."""
    sys.stderr.write(f"PeerError on rank {global_rank}: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def connect_store(
    address: str, port: int, *, global_rank: int, world_size: int, start_timeout: timedelta
) -> Store:
    """Return the run's key-value store once all ranks have connected; collective over all ranks.

    Under torchrun its agent may serve the store, which then outlives the processes and still has
    the keys of an earlier start. So the ranks first agree on a prefix for this start.

    Raises:
        PeerError: The port is taken, or the other ranks didn't come within `start_timeout`.
    """
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if global_rank == 0:
        allow_files(os.getppid() if agent_serves else os.getpid())
    serves = global_rank == 0 and not agent_serves
    timeout_s = start_timeout.total_seconds()
    with ended_when_late(global_rank, f"the store at {address}:{port}", timeout_s):
        try:
            store = TCPStore(
                address,
                port,
                world_size,
                is_master=serves,
                timeout=start_timeout,
                multi_tenant=True,
            )
        except DistError as error:
            if serves and isinstance(error, DistNetworkError):
                raise PeerError(
                    f"Rank 0 can't serve the run's store at {address}:{port}. {error} "
                    "Stop the process that has this port, or set MASTER_PORT to a free one."
                ) from error
            raise _late(global_rank, world_size, timeout_s, str(error)) from error
        if not agent_serves:
            return PrefixStore("lightning_hetero", store)
        meeting = PrefixStore("lightning_hetero/meeting", store)
        name = _meet(meeting, global_rank, world_size, timeout_s)
        return PrefixStore(f"lightning_hetero/{name}", store)


def _late(global_rank: int, world_size: int, timeout_s: float, why: str) -> PeerError:
    return PeerError(
        f"Rank {global_rank} of {world_size} waited {timeout_s:.0f} s for the others to start. "
        f"{why} If they only start slowly, allow more: HeteroStrategy(start_timeout=...)."
    )


@contextmanager
def ended_when_late(global_rank: int, store: str, timeout_s: float) -> Iterator[None]:
    """End the process if it waits for a store for longer than the store's own timeouts.

    Those don't work if the server is frozen or cut off: it never answers.
    """
    reason = f"{store} is connected and doesn't answer. Look at the process that serves it."
    timer = threading.Timer(timeout_s + min(10.0, timeout_s), end_process, [global_rank, reason])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _meet(store: Store, global_rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name on which the ranks of this start agree, whatever earlier ones have left.

    Each rank writes a word that is new. Rank 0 answers each, again and again, with a name and the
    word that it has read, until all ranks have got their own word back and confirmed the name. The
    agents' restart counts can't be used: they differ between nodes if one has joined later.
    """
    deadline = Deadline(timeout_s)
    word = uuid.uuid4().hex
    store.set(f"word/{global_rank}", word)
    others = range(1, world_size)
    words, answers = [f"word/{rank}" for rank in others], [f"answer/{rank}" for rank in others]
    answered: list[str] = []
    while not deadline.is_over:
        if global_rank == 0:
            if store.check(words):
                heard = [json.dumps([word, item.decode()]) for item in store.multi_get(words)]
                if heard != answered:
                    store.multi_set(answers, heard)  # type: ignore[attr-defined]
                    answered = heard
            if store.add(f"confirmed/{word}", 0) == world_size - 1:
                return word
        elif store.check([f"answer/{global_rank}"]):
            name, heard_word = json.loads(store.get(f"answer/{global_rank}"))
            if heard_word == word:
                store.add(f"confirmed/{name}", 1)
                return str(name)
        # All ranks together ask the store no more often than a hundred ranks would.
        time.sleep(max(0.01, 1e-4 * world_size))
    raise _late(
        global_rank,
        world_size,
        timeout_s,
        "If nodes have come or gone, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is "
        "started: some of its versions send restarted processes to a store that has moved.",
    )


_PACKAGES = ("lightning_hetero", "torch", "lightning", "torchmetrics", "numpy")


def package_versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks, by package."""
    python = {"Python": ".".join(platform.python_version_tuple()[:2])}
    return python | {name: installed_version(name, otherwise="not installed") for name in _PACKAGES}


def _text_of(fact: object) -> str:
    """Return a text that is the same on all ranks, although the order of a set's strings isn't."""
    if isinstance(fact, (str, int, float)) or fact is None:
        return str(fact)
    if isinstance(fact, Set):
        return f"{{{', '.join(sorted(map(_text_of, fact)))}}}"
    if isinstance(fact, list | tuple):
        return f"[{', '.join(map(_text_of, fact))}]"
    if is_dataclass(fact) and not isinstance(fact, type):
        values = (f"{name}={_text_of(getattr(fact, name))}" for name in _fields_of(type(fact)))
        return f"{type(fact).__name__}({', '.join(values)})"
    return str(fact)


@cache
def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def check_alike(comms: Communicators, **facts: object) -> None:
    """Compare facts, by their text, and versions of packages between all ranks; collective.

    Raises:
        ConfigurationError: A rank's differ from those of most ranks; on every rank.
    """
    texts = {name: _text_of(fact) for name, fact in {**package_versions(), **facts}.items()}
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
