"""Faults that hit a training process at named moments, one after another over its restarts.

`arm` patches the places that a fault needs, in this process only. A fault is taken from a list of
which a file says how far it has been worked off: whoever lets one happen first moves on in that
file, so each happens once, whatever process is started next.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_hetero.checkpoint import CheckpointId, LocalStore, snapshot
from lightning_hetero.checkpoint.fetching import Fetcher
from lightning_hetero.checkpoint.manifest import parse_manifest_name
from lightning_hetero.checkpoint.serving import FileServer
from lightning_hetero.runtime.exchange.push import Push
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.strategy.hetero import HeteroStrategy
from tests.toy import ToyModule

Action = Callable[[], None]

METHODS: dict[str, tuple[Any, str]] = {
    "set-up": (HeteroStrategy, "setup"),
    "forward": (ToyModule, "training_step"),
    "push": (Push, "finish"),
    "deposit": (HeteroStrategy, "deposit_gradients"),
    "optimizer step": (HeteroStrategy, "optimizer_step"),
    "after the step": (Engine, "mark_weights_stale"),
    "snapshot": (snapshot, "_copy"),
    "copy to a peer": (FileServer, "read"),
    "recovery": (Fetcher, "run"),
}
"""Moments that are calls of a function or method."""

FILES: dict[str, Callable[[str, str], bool]] = {
    "memory file": lambda root, name: "/lightning_hetero-" in root and name.endswith("safetensors"),
    "disk file": lambda root, name: "/disk-" in root and name.endswith("safetensors"),
    "upload": lambda root, name: root.endswith("/remote") and name.endswith("safetensors"),
    "manifest": lambda root, name: parse_manifest_name(name) is not None,
    "confirmation": lambda root, name: name.endswith("confirmed"),
}
"""Moments in the middle of writing a file: which files count."""


def arm(faults: list[Mapping[str, Any]], folder: Path, node: str) -> None:
    """Let the next fault of the list happen if it is this node's."""
    position = folder / "next-fault"
    index = int(position.read_text()) if position.exists() else 0
    if index >= len(faults) or faults[index]["node"] != node:
        return
    fault = faults[index]

    def strike() -> None:
        temporary = position.with_suffix(f".{node}")
        temporary.write_text(str(index + 1))
        temporary.replace(position)
        _harm(fault, folder)

    if "full" in fault:
        _fill_up(FILES[fault["full"]])
    moment = fault["at"]
    countdown = Countdown(fault.get("after", 1), strike)
    if moment in METHODS:
        owner, name = METHODS[moment]
        original = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            countdown.tick()
            return original(*args, **kwargs)

        setattr(owner, name, struck)
    else:
        _watch_files(FILES[moment], countdown)


class Countdown:
    """Calls `action` at the n-th tick."""

    def __init__(self, ticks: int, action: Action) -> None:
        self.left, self.action = ticks, action

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()


def _watch_files(counts: Callable[[str, str], bool], countdown: Countdown) -> None:
    original = LocalStore.write

    def write(self: LocalStore, name: str, chunks: Iterable[Any]) -> None:
        if not counts(str(self), name):
            return original(self, name, chunks)

        def interrupted() -> Iterator[Any]:
            for number, chunk in enumerate(chunks):
                if number == 0:
                    yield chunk[: len(chunk) // 2]
                    countdown.tick()
                    yield chunk[len(chunk) // 2 :]
                else:
                    yield chunk

        return original(self, name, interrupted())

    LocalStore.write = write


def _fill_up(counts: Callable[[str, str], bool]) -> None:
    original = LocalStore.write

    def write(self: LocalStore, name: str, chunks: Iterable[Any]) -> None:
        if counts(str(self), name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        original(self, name, chunks)

    LocalStore.write = write


def _harm(fault: Mapping[str, Any], folder: Path) -> None:
    """Damage what the fault says, then send this process a signal."""
    for damage in fault.get("damage", ()):
        _damage(damage, folder)
    os.kill(os.getpid(), fault.get("signal", signal.SIGKILL))


def _damage(damage: Mapping[str, Any], folder: Path) -> None:
    """Truncate, alter or delete files of the newest confirmed checkpoint in a tier."""
    root = folder / damage["tier"]
    confirmed = [path.parent for path in root.glob("step-*/confirmed")]
    newest = max(confirmed, key=lambda path: CheckpointId.parse(path.name))
    for path in sorted(newest.glob(damage["files"])):
        data = bytearray(path.read_bytes())
        match damage["what"]:
            case "truncate":
                path.write_bytes(data[: len(data) // 2])
            case "flip":
                data[len(data) * 2 // 3] ^= 4
                path.write_bytes(data)
            case "delete":
                path.unlink()
