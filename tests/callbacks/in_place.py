"""Runs whose ranks are lost, on forks of one process that has imported torch: nothing starts twice.

A node is a keeper and its workers (`play`), or torchrun's agent and workers that it starts again
(`play_restarts`). Each worker appends to `worker-PID.jsonl` what it trained, as `RunLog` does to
`events.jsonl`.
"""

import json
import os
import signal
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_only
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import ElasticRestart, HeteroStrategy, LayerwiseCheckpoint, RunLog
from lightning_hetero.callbacks.run_log import read_log
from tests.callbacks.nodes import play, play_joiner, play_restarts, play_second
from tests.processes import fork_server
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

NUM_ROWS = 240
BATCH = 4


class Record(Callback):
    """Writes down each step, and stays before one until the test lets training go on."""

    def __init__(self, folder: Path) -> None:
        # Line by line: a worker may be killed.
        self._file = (folder / f"worker-{os.getpid()}.jsonl").open("a", buffering=1)
        self._limit = folder / "limit"
        self._struck = folder / "struck-in-set-up"
        self._rows: list[int] = []
        self._num_fits = 0
        self._told: tuple[int, ...] = ()
        """What it heard of the last generation."""

    def write(self, **entry: Any) -> None:
        self._file.write(json.dumps({"at_s": time.time(), **entry}) + "\n")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._num_fits += 1
        who, number = self._struck.read_text().split() if self._struck.exists() else ("", "0")
        if self._num_fits > 1 and who == os.environ["FIRST_RANK"]:
            os.kill(os.getpid(), int(number))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        zero = (rank_zero_only.rank, trainer.is_global_zero, self._told)  # type: ignore[attr-defined]
        place = {"rank": trainer.global_rank, "size": trainer.world_size}
        place["threads"] = torch.get_num_threads()
        generation = trainer.strategy.processes.generation
        self.write(begin=trainer.global_step, generation=generation, zero=zero, **place)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.write(ended=trainer.global_step)

    def on_generation(self, trainer: Any, old: Any, new: Any) -> None:
        self._told = (new.number, trainer.global_rank, trainer.world_size)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self._rows = [zlib.crc32(row.numpy().tobytes()) for row in batch[0]]
        while self._limit.exists() and int(self._limit.read_text()) <= trainer.global_step:
            time.sleep(0.01)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = float(outputs["loss"])
        self.write(step=trainer.global_step, loss=loss, rows=self._rows)


def trainer_of(
    folder: Path,
    *,
    num_ranks: int,
    num_steps: int,
    every: int,
    heartbeat_s: float = 30.0,
    in_place: bool = True,
    num_nodes: int = 1,
    num_stages: int = 1,
    accelerator: str = "cpu",
    disk: str = "disk",
    replicas: int = 1,
    **more: Any,
) -> Any:
    """Return a Trainer as a script would make it."""
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    checkpoint = LayerwiseCheckpoint(
        folder / "remote",
        every_n_train_steps=every,
        local_dir=folder / disk,
        replicas=replicas,
    )
    strategy = HeteroStrategy(num_stages=num_stages, timeout=timedelta(minutes=2), **more)
    options = {
        **quiet(max_steps=num_steps),
        "enable_checkpointing": True,
        "accelerator": accelerator,
    }
    silence = timedelta(seconds=heartbeat_s)
    elastic = ElasticRestart(
        drain_timeout_s=25.0 if in_place else 1.0, in_place=in_place, heartbeat_timeout=silence
    )
    callbacks = [checkpoint, elastic, RunLog(folder / "events.jsonl")]
    return L.Trainer(
        strategy=strategy,
        devices=num_ranks,
        num_nodes=num_nodes,
        callbacks=[*callbacks, Record(folder)],
        **options,
    )


def _toy() -> ToyModule:
    return ToyModule(ToyOptions(num_layers=4))


def toy_of_a_command_line() -> ToyModule:
    """Return the toy with an optimizer that was made with it, as `LightningCLI` does.

    The environment says nothing of threads, as users' say nothing.
    """
    os.environ.pop("OMP_NUM_THREADS", None)
    module = _toy()
    made = module.configure_optimizers()
    module.configure_optimizers = lambda: made  # type: ignore[method-assign]
    return module


class AveragedToy(ToyModule):
    """A toy that takes over an average of its weights when training ends.

    Each rank writes the norms of its rows of it.
    """

    def configure_callbacks(self) -> list[Callback]:
        return [EMAWeightAveraging(decay=0.5)]

    def on_train_end(self) -> None:
        self.norms = [float(p.detach().norm()) for p in self.parameters()]
        for callback in self.trainer.callbacks:
            if isinstance(callback, Record):
                callback.write(norms=self.norms)


def averaged_toy() -> AveragedToy:
    """Return a toy whose weights are averaged."""
    return AveragedToy(ToyOptions(num_layers=4))


def train(
    folder: Path,
    *,
    make_module: Callable[[], Any] = _toy,
    num_rows: int = NUM_ROWS,
    prepare: Callable[[Path, dict[str, Any]], None] | None = None,
    **options: Any,
) -> None:
    """Be a worker."""
    if prepare is not None:
        prepare(folder, options)
    trainer = trainer_of(folder, **options)
    trainer.fit(make_module(), loader(BATCH, num_rows))


def loader(batch_size: int, num_rows: int = NUM_ROWS) -> StatefulDataLoader[Any]:
    """Return a loader of so many samples a rank, in the same order for any number of ranks."""
    return StatefulDataLoader(TokenRows(num_rows), batch_size=batch_size)


def undisturbed(
    num_ranks: int,
    num_steps: int,
    accelerator: str = "cpu",
    make_module: Callable[[], Any] = _toy,
) -> list[float]:
    """Return the losses of plain Lightning, on one device that gets all ranks' samples."""
    losses: list[float] = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    L.seed_everything(3, verbose=False)
    options = {**quiet(max_steps=num_steps, callbacks=[Losses()]), "accelerator": accelerator}
    trainer = L.Trainer(devices=1, **options)
    trainer.fit(make_module(), loader(BATCH * num_ranks))
    return losses


class Node:
    """A node under a test's control."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        *,
        in_place: bool = True,
        replaces: bool = False,
        hastens: bool = False,
        **options: Any,
    ) -> None:
        self.folder = folder
        folder.mkdir()
        work = partial(train, folder, num_ranks=num_ranks, in_place=in_place, **options)
        self._joiner = partial(train, folder, num_ranks=1, **options)
        self.joiners: dict[str, Any] = {}
        be_node = (
            partial(play, replaces=replaces)
            if in_place
            else partial(play_restarts, hastens=hastens)
        )
        self.process = fork_server().Process(target=be_node, args=(folder, num_ranks, work))
        self.process.start()

    def join(self, name: str) -> None:
        """Start a process that joins; its name is used where others have a rank."""
        self._add(name, play_joiner, self.folder, name, self._joiner)

    def add_second(self, name: str, port: int) -> None:
        """Start the second node of two of one worker each; it reaches the store at a port."""
        self._add(name, play_second, self.folder, name, port, self._joiner)

    def _add(self, name: str, be_node: Callable[..., None], *arguments: Any) -> None:
        self.joiners[name] = fork_server().Process(target=be_node, args=arguments)
        self.joiners[name].start()

    def wait_for_store(self) -> int:
        """Return the port of the store once it is known."""
        while not (path := self.folder / "port").exists() or not path.read_text():
            assert self.process.exitcode is None, self.log()
            time.sleep(0.01)
        return int((self.folder / "port").read_text())

    def let_go_on_to(self, step: int) -> None:
        """Stop before the step after this one."""
        temporary = self.folder / "limit.new"
        temporary.write_text(str(step))
        temporary.rename(self.folder / "limit")

    def go_on_until(self, happens: Callable[[], bool], *, first: int, last: int) -> int:
        """Go on step by step, slowly, until something happens; returns the last one that may be."""
        for step in range(first, last):
            self.let_go_on_to(step)
            deadline_s = time.monotonic() + 300.0
            while not (happened := happens()) and not self._has_trained(step):
                assert time.monotonic() < deadline_s, self.log()
                time.sleep(0.01)
            if happened:
                return step
            time.sleep(0.3)
        raise AssertionError(f"it didn't happen:\n{self.log()}")

    def _has_trained(self, step: int) -> bool:
        names = [path.name.removeprefix("pid-") for path in self.folder.glob("pid-*")]
        return any(item.get("step") == step for name in names for item in self.records(name))

    def pid_of(self, rank: int | str) -> int:
        """Return the process that has been a rank since the start."""
        return int((self.folder / f"pid-{rank}").read_text())

    def strike(self, rank: int | str, number: int = signal.SIGKILL) -> float:
        """Send a signal to a worker, named by its first rank; returns when."""
        os.kill(self.pid_of(rank), number)
        return time.time()

    def records(self, rank: int | str) -> list[dict[str, Any]]:
        """Return what a worker, named by its first rank, has written."""
        if not (self.folder / f"pid-{rank}").exists():
            return []
        path = self.folder / f"worker-{self.pid_of(rank)}.jsonl"
        return _lines(path) if path.exists() else []

    def all_records(self) -> list[list[dict[str, Any]]]:
        """Return what each worker has written that ever was one."""
        return [_lines(path) for path in self.folder.glob("worker-*.jsonl")]

    def _wait_for(self, find: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """Return what is found, once something is, while the node's first process lives."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self.process.exitcode is None:
            if found := find():
                return found
            time.sleep(0.01)
        raise AssertionError(f"{what}:\n{self.log()}")

    def wait_for_step(self, rank: int | str, step: int, timeout_s: float = 300.0) -> dict[str, Any]:
        """Return what a worker wrote of a step, the last time that it trained it."""

        def find() -> list[dict[str, Any]]:
            return [item for item in self.records(rank) if item.get("step") == step]

        found = self._wait_for(find, f"rank {rank} didn't train step {step}", timeout_s)
        return dict(found[-1])

    def wait_for_all(self, ranks: Iterable[int | str], step: int) -> None:
        """Let training go on to a step, and wait until workers have written it down."""
        self.let_go_on_to(step)
        for rank in ranks:
            self.wait_for_step(rank, step)

    def wait_for_recovery(self, struck_at_s: float, timeout_s: float = 300.0) -> float:
        """Return the seconds from a fault to the end of the first step of a fit begun after it."""

        def find() -> list[float]:
            files = self.folder.glob("worker-*.jsonl")
            return [end_s for path in files if (end_s := _next_step(path, struck_at_s))]

        return float(min(self._wait_for(find, "no step follows", timeout_s)) - struck_at_s)

    def wait_for_generation(self, number: int, timeout_s: float = 300.0) -> None:
        """Return once a generation has trained a step."""

        def find() -> bool:
            return any(item["generation"] >= number for item in self.events("generation"))

        self._wait_for(find, f"generation {number} doesn't train", timeout_s)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind in the run's log."""
        return [i for i in read_log(self.folder / "events.jsonl") if i["event"] == kind]

    def log(self) -> str:
        """Return what its processes printed."""
        return (self.folder / "log").read_text()[-6000:]

    def wait_for_end(self) -> int:
        """Return the keeper's exit code."""
        self.process.join(300.0)
        assert self.process.exitcode is not None, self.log()
        return int(self.process.exitcode)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _next_step(path: Path, struck_at_s: float) -> float:
    """Return when a worker first ended a step of a fit begun after a fault, 0 if it hasn't."""
    has_begun = False
    for item in _lines(path):
        has_begun |= "begin" in item and item["at_s"] > struck_at_s
        if has_begun and "step" in item:
            return float(item["at_s"])
    return 0.0


@contextmanager
def playing(folder: Path, num_ranks: int, **options: Any) -> Iterator[Node]:
    """Give a node; what is left of it ends with the context."""
    node = Node(folder, num_ranks, **options)
    try:
        yield node
    finally:
        for process in (node.process, *node.joiners.values()):
            process.kill()
            process.join()
