"""The nodes of `soak.py`, and all that can happen to them."""

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from local_nodes import Agents, forget
from soak_node import Settings, be_agent, checkpoint_of

NODES = ("a", "b", "c")


class Nodes:
    """The nodes of the run, and what is to be mended of them."""

    def __init__(self, settings: Settings) -> None:
        self.agents = Agents()
        self.settings = replace(settings, rendezvous_port=self.agents.port)
        self.repairs: list[tuple[float, Callable[[], None]]] = []
        self.num_lost_agents = 0
        for name in NODES:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a node's agent."""
        self.agents.start(name, be_agent, self.settings, name)

    def running(self) -> list[str]:
        """Return the nodes that have a worker now."""
        return [name for name in self.agents.processes if self.agents.workers(name)]

    def forget(self, name: str) -> None:
        """Empty a node's memory and disk."""
        forget(checkpoint_of(self.settings, name))

    def later(self, seconds: float, repair: Callable[[], None]) -> None:
        """Do something after a while."""
        self.repairs.append((time.monotonic() + seconds, repair))

    def repair(self) -> None:
        """Do what is due, and start nodes again whose agent has ended."""
        due = [repair for at_s, repair in self.repairs if at_s <= time.monotonic()]
        self.repairs = [item for item in self.repairs if item[0] > time.monotonic()]
        for repair in due:
            repair()
        agents = self.agents.processes
        for name in [name for name, agent in agents.items() if agent.exitcode is not None]:
            agents.pop(name).join()
            self.num_lost_agents += 1
            self.later(random.uniform(0.0, 2.0), lambda name=name: self.start(name))


class Faults:
    """What can happen to a node; each kind is a method that is told for how long."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def strike(self, kind: str, name: str, seconds: float) -> None:
        """Let a fault happen."""
        getattr(self, kind.replace(", ", "_").replace(" ", "_"))(name, seconds)

    def worker_killed(self, name: str, _: float) -> None:
        """SIGKILL to a worker; its agent is there."""
        self.nodes.agents.signal(signal.SIGKILL, self.nodes.agents.workers(name))

    def worker_frozen(self, name: str, seconds: float) -> None:
        """SIGSTOP to a worker for a while, perhaps longer than the others wait."""
        self._freeze(self.nodes.agents.workers(name), seconds)

    def worker_told_to_go(self, name: str, _: float) -> None:
        """SIGTERM to a worker."""
        self.nodes.agents.signal(signal.SIGTERM, self.nodes.agents.workers(name))

    def node_killed(self, name: str, seconds: float) -> None:
        """SIGKILL to all processes of a node, which comes back with what it has kept."""
        self.nodes.agents.kill(name)
        self.nodes.later(seconds / 3, lambda: self.nodes.start(name))

    def node_lost(self, name: str, seconds: float) -> None:
        """SIGKILL to all processes of a node, which comes back empty."""
        self.nodes.agents.kill(name)
        self.nodes.forget(name)
        self.nodes.later(seconds / 3, lambda: self.nodes.start(name))

    def node_frozen(self, name: str, seconds: float) -> None:
        """SIGSTOP to all processes of a node: a paused machine."""
        self._freeze(
            [self.nodes.agents.processes[name].pid, *self.nodes.agents.workers(name)], seconds
        )

    def node_told_to_go(self, name: str, _: float) -> None:
        """SIGTERM to a node's agent, which passes it on and leaves; the node comes back."""
        self.nodes.agents.signal(signal.SIGTERM, [self.nodes.agents.processes[name].pid])

    def disk_deleted(self, name: str, _: float) -> None:
        """A disk loses all files while its node trains."""
        shutil.rmtree(self.nodes.settings.disk(name), ignore_errors=True)

    def disk_full(self, name: str, seconds: float) -> None:
        """A disk takes nothing for a while."""
        self._flag(self.nodes.settings.disk_is_full(name), seconds)

    def store_answers_500(self, _: str, seconds: float) -> None:
        """The remote store fails for a while."""
        self._flag(self.nodes.settings.store_fails, seconds)

    def _freeze(self, pids: list[int], seconds: float) -> None:
        self.nodes.agents.signal(signal.SIGSTOP, pids)
        self.nodes.later(seconds, lambda: self.nodes.agents.signal(signal.SIGCONT, pids))

    def _flag(self, flag: Path, seconds: float) -> None:
        flag.touch()
        self.nodes.later(seconds, lambda: flag.unlink(missing_ok=True))


KINDS = {
    "worker killed": 3,
    "worker frozen": 2,
    "worker told to go": 2,
    "node killed": 2,
    "node lost": 2,
    "node frozen": 1,
    "node told to go": 1,
    "disk deleted": 2,
    "disk full": 2,
    "store answers 500": 3,
}
"""Kinds of faults, and how often they come."""


@contextlib.contextmanager
def playing(settings: Settings) -> Iterator[Nodes]:
    """Give the nodes of a run, and end them all."""
    nodes = Nodes(settings)
    try:
        yield nodes
    finally:
        for name in list(nodes.agents.processes):
            nodes.agents.kill(name)
        for name in NODES:
            nodes.forget(name)
