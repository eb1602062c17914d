"""A run that survives everything, to watch: four unequal devices, and all that can happen to them.

::

    python examples/long_run.py

Four nodes on this machine, each a torchrun agent with one emulated device (speeds 1:1:2:2), train
on packed Python sources under plans that change with the iterations. Meanwhile a device becomes
slow and well again, so does a link; a node is killed and comes back empty, and another gets a spot
notice. What happens is printed when the run notes it. Then one process of plain Lightning trains
the same steps undisturbed, and both are compared.

Nothing here waits for time to pass: each fault comes when the run has answered the one before.
"""

import argparse
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from local_nodes import Agents, LogTail, forget, prepare_folder, run_alone
from long_run_node import Settings, be_agent, checkpoint_of, train_alone
from long_run_timeline import Event, Timeline, show
from rich.console import Console

from lightning_hetero import ParallelPlan
from lightning_hetero.callbacks import read_log

MOST_STEPS = 100
"""After which something that the run should have noted counts as missed."""
PATIENCE_S = 300.0
"""After which a run that notes nothing counts as hung."""
SLOWDOWNS = {"a": 8.0, "b": 8.0, "c": 4.0, "d": 4.0}


class MetadataServer:
    """A cloud's metadata server, as EC2 has it; a node's name comes first in its path."""

    def __init__(self) -> None:
        going = self._going = set[str]()

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):  # A node that is killed while it asks.
                    super().handle_one_request()

            def do_GET(self) -> None:
                node, _, path = self.path.lstrip("/").partition("/")
                action = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
                if path == "latest/api/token":
                    self._reply(200, b"token")
                elif node in going:
                    self._reply(200, json.dumps(action).encode())
                else:
                    self._reply(404, b"")

            do_PUT = do_GET

            def _reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{http.server_address[1]}"
        threading.Thread(target=http.serve_forever, daemon=True).start()

    def take_away(self, node: str) -> None:
        """Tell a node from now on that it will go."""
        self._going.add(node)


class Nodes:
    """The nodes of the run."""

    def __init__(self, settings: Settings) -> None:
        self.agents = Agents()
        self.settings = replace(settings, rendezvous_port=self.agents.port)

    def start(self, *names: str) -> None:
        """Start agents."""
        for name in names:
            self.agents.start(name, be_agent, self.settings, name, SLOWDOWNS[name])

    def kill(self, name: str) -> None:
        """Take a node away at once: SIGKILL to its processes, and what it kept is lost."""
        self.agents.kill(name)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Empty a node's memory and disk."""
        forget(checkpoint_of(self.settings, name))

    def wait_for_end(self, name: str) -> None:
        """Wait for a node's agent."""
        self.agents.processes[name].join(PATIENCE_S)
        if self.agents.processes[name].exitcode is None:
            raise SystemExit(f"Node {name} hasn't ended for {PATIENCE_S:.0f} s.")
        del self.agents.processes[name]

    def check(self) -> None:
        """End everything where an agent has ended badly."""
        for name, agent in self.agents.processes.items():
            if agent.exitcode:
                log = (self.settings.folder / f"{name}.log").read_text()
                raise SystemExit(f"node {name} has failed:\n{log[-4000:]}")


class Watch:
    """Follows what a run notes, prints it, and adds what is done to the run from outside."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.settings = nodes.settings
        self.settings.events.touch()
        self.events: list[Event] = []
        self._log = LogTail(self.settings.events)
        self._timeline, self._console = Timeline(), Console(soft_wrap=True)

    def did(self, event: str, **fields: Any) -> None:
        """Note something that was done to the run."""
        entry = {"event": event, "at_s": time.time(), "step": self.events[-1]["step"], **fields}
        with self.settings.events.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def order(self, *faults: dict[str, Any], end: bool = False) -> None:
        """Tell the run what is slow from its next step on, or that this is its last."""
        temporary = self.settings.orders.with_suffix(".new")
        temporary.write_text(json.dumps({"faults": faults, "end": end}))
        temporary.replace(self.settings.orders)

    def wait_for(self, what: Callable[[list[Event]], bool]) -> None:
        """Wait until something holds for the events since this was called."""
        start, heard_s = len(self.events), time.monotonic()
        while not what(self.events[start:]):
            time.sleep(0.1)
            self.nodes.check()
            new = self._log.read()
            self.events += new
            heard_s = time.monotonic() if new else heard_s
            if time.monotonic() - heard_s > PATIENCE_S:
                raise SystemExit(f"The run has noted nothing for {PATIENCE_S:.0f} s.")
            for event in new:
                if line := self._timeline.line(event):
                    self._console.print(line)
            if steps(MOST_STEPS)(self.events[start:]):
                raise SystemExit(
                    f"The run hasn't answered within {MOST_STEPS} steps. Where the machine is busy "
                    "with other work, emulated faults drown in that: try again when it is idle."
                )

    def last(self, event: str) -> Event:
        """Return the last event of a kind."""
        return next(item for item in reversed(self.events) if item["event"] == event)


def happened(event: str, **fields: Any) -> Callable[[list[Event]], bool]:
    """Return whether there was such an event."""
    wanted = {"event": event, **fields}
    return lambda events: any(wanted.items() <= item.items() for item in events)


def started(world_size: int) -> Callable[[list[Event]], bool]:
    """Return whether training has begun with `world_size` nodes."""
    return lambda events: any(
        item["event"] == "started" and len(item["nodes"]) == world_size for item in events
    )


def steps(count: int) -> Callable[[list[Event]], bool]:
    """Return whether this number of steps was trained."""
    return lambda events: sum(item["event"] == "trained" for item in events) >= count


def is_steady(events: list[Event]) -> bool:
    """Return whether the last iterations have taken about as long as each other."""
    times_s = [e["scalars"]["run/iteration_s"] for e in events if e["event"] == "metrics"]
    last_s = times_s[-12:]
    return len(last_s) == 12 and max(last_s) < 1.6 * statistics.median(last_s)


def is_settled(events: list[Event]) -> bool:
    """Return whether the run is steady, or this machine won't let it be."""
    return is_steady(events) or steps(24)(events)


def play(nodes: Nodes, watch: Watch, metadata: MetadataServer) -> None:
    """Do to the run what happens to runs."""
    watch.order()
    nodes.start(*SLOWDOWNS)
    watch.wait_for(started(4))

    watch.wait_for(is_settled)
    watch.order({"nodes": ["c"], "slowdown": 3.0})
    watch.wait_for(happened("action", kind="apply"))
    watch.wait_for(steps(6))
    watch.order()
    watch.wait_for(happened("action", kind="undo"))

    watch.wait_for(is_settled)
    ranks, nodes_of = busy_link(watch.last("started")), watch.last("started")["nodes"]
    watch.order({"nodes": [nodes_of[rank] for rank in ranks], "bytes_per_s": 4e5})
    watch.wait_for(happened("finding", kind="link", ranks=ranks))
    # Whether another plan pays depends on what changing it has cost so far.
    watch.wait_for(steps(12))
    watch.order()
    watch.wait_for(steps(5))

    nodes.kill("d")
    watch.did("killed", node="d")
    watch.wait_for(started(3))
    watch.wait_for(steps(5))
    nodes.start("d")
    watch.did("joined", node="d")
    watch.wait_for(started(4))
    watch.wait_for(steps(5))

    metadata.take_away("b")
    watch.did("notice", node="b")
    nodes.wait_for_end("b")
    watch.wait_for(started(3))
    watch.wait_for(steps(5))
    watch.order(end=True)
    watch.wait_for(happened("ended"))
    for name in list(nodes.agents.processes):
        nodes.wait_for_end(name)


def busy_link(started: Event) -> list[int]:
    """Return the ranks of a link that carries weights and gradients: first stages of pipelines."""
    plan = ParallelPlan.from_dict(started["plans"][0])
    ranks = [pipeline.stages[0].ranks[0] for pipeline in plan.pipelines]
    return sorted((ranks if len(ranks) > 1 else list(plan.ranks))[:2])


@contextlib.contextmanager
def playing(settings: Settings) -> Iterator[tuple[Nodes, Watch]]:
    """Give the nodes of a run, and end them all."""
    nodes = Nodes(settings)
    try:
        yield nodes, Watch(nodes)
    finally:
        for name in list(nodes.agents.processes):
            nodes.kill(name)
        for name in SLOWDOWNS:
            nodes.forget(name)


def main() -> None:
    """Play the run, train the undisturbed one, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/long_run"))
    parser.add_argument(
        "--first-callback", default="", help='first callback on each node, "module:function"'
    )
    arguments = parser.parse_args()
    out = prepare_folder(arguments.out)
    metadata = MetadataServer()
    run = Settings(
        folder=out / "run",
        metadata_url=metadata.url,
        first_callback=arguments.first_callback,
    )
    run.folder.mkdir(parents=True)
    with playing(run) as (nodes, watch):
        play(nodes, watch, metadata)
    num_steps = watch.last("trained")["step"]
    print(f"\nthe same {num_steps} steps undisturbed, in one process of plain Lightning")
    single = replace(run, folder=out / "undisturbed", num_steps=num_steps)
    run_alone(train_alone, single.folder, single)
    (out / "slowdowns.json").write_text(json.dumps(SLOWDOWNS))
    show(watch.events, list(read_log(single.events)), SLOWDOWNS)


if __name__ == "__main__":
    main()
