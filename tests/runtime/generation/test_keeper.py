"""A keeper and its workers, as small processes."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_hetero.keep import be_kept, block_signals
from lightning_hetero.runtime.generation.keeper import (
    JOIN,
    KEPT,
    Keeper,
    Worker,
    joiner_variables,
    tell_keeper,
)
from lightning_hetero.runtime.generation.log import Log
from lightning_hetero.runtime.generation.membership import Membership, draw_number
from lightning_hetero.runtime.ranks.failure import LEAVE_EXIT_CODE
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat
from tests.processes import fork_server, free_port

pytestmark = pytest.mark.timeout(300)


def wait_until(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("nothing came")


def keep(folder: Path, port: int, codes: list[int | None]) -> None:
    """Keep members that end with these codes, or stay until a signal has come."""
    block_signals()

    def be_worker(rank: int) -> int:
        def note(number: int, _: object) -> None:
            (folder / f"signal-{rank}").write_text(str(number))
            os._exit(0)

        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, note)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        members = dist.PrefixStore("members", store)
        tell_keeper("members", rank)
        heartbeat = Heartbeat(members, number=rank, interval_s=1.0)
        member = Membership(members, heartbeat, node="a", facts={}, silence_s=60.0)
        member.form_first(len(codes))
        (folder / f"new-{rank}").write_text(str(os.getpid()))
        (folder / f"new-{rank}").rename(folder / f"pid-{rank}")
        code = codes[rank]
        dying = [other for other, code in enumerate(codes) if code is not None]
        while code is None:
            time.sleep(0.01)
            # Not before the keeper, which imports torch meanwhile, has told who died in training.
            if (folder / "ends").exists() and member._log.read().gone.keys() >= set(dying):
                member.tell_end()
                code = 5 if (folder / "fails-after").exists() else 0
        return code

    def start(rank: int, environment: dict[str, str], _: int) -> int:
        pid = os.fork()
        if pid == 0:
            be_kept()
            os.environ[KEPT] = environment[KEPT]
            os._exit(be_worker(rank))
        return pid

    workers = [Worker(partial(start, rank)) for rank in range(len(codes))]
    os._exit(Keeper(workers, address="127.0.0.1", port=port, serves=True).run())


def start(folder: Path, codes: list[int | None]):
    process = fork_server().Process(target=keep, args=(folder, free_port(), codes))
    process.start()
    wait_until(lambda: all((folder / f"pid-{rank}").exists() for rank in range(len(codes))))
    return process


def is_running(folder: Path, rank: int) -> bool:
    pid = int((folder / f"pid-{rank}").read_text())
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="keepers are for Linux")
def test_a_worker_that_dies_alone_is_no_event_for_whoever_started_the_keeper(
    tmp_path: Path,
) -> None:
    keeper = start(tmp_path, [3, None])
    wait_until(lambda: not is_running(tmp_path, 0))
    assert keeper.exitcode is None
    (tmp_path / "ends").touch()
    keeper.join(120.0)
    assert keeper.exitcode == 0


class Place:
    """A device whose workers are processes that wait, and a keeper that replaces them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.run = dist.PrefixStore("members", dist.HashStore())
        self.log = Log(self.run)
        for number in range(2):
            draw_number(self.run)
            self.log.append(0, "here", number, ["ab"[number], False])
        self.log.append(0, "formed", 0)
        of_prefix = lambda *_: self.run  # noqa: E731 - takes what `PrefixStore` takes
        monkeypatch.setattr("torch.distributed.distributed_c10d.PrefixStore", of_prefix)
        self.environments: list[dict[str, str]] = []
        self.keeper = Keeper(
            [Worker(self._start)], address="host", port=7, serves=False, replaces=True
        )
        self.worker.member = ("members", 0)

    def _start(self, environment: dict[str, str], _: int) -> int:
        self.environments.append(environment)
        return os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)

    @property
    def worker(self) -> Worker:
        """The latest."""
        return self.keeper._workers[-1]

    def lose(self) -> None:
        """Let the latest worker die, and the keeper hear of it."""
        os.kill(self.worker.pid, signal.SIGKILL)
        wait_until(lambda: self.worker.look() or self.worker.is_lost)
        self.look()

    def look(self) -> None:
        """Do what a keeper does all the time."""
        self.keeper._look(dist.HashStore())
        self.keeper._replace_lost()

    def ask(self) -> None:
        """Let the latest worker ask the run to let it in."""
        number = draw_number(self.run)
        self.log.note("asking", number)
        self.worker.member = ("members", number)

    def let_in(self) -> None:
        """Let the latest worker be in the next generation."""
        self.log.note("admitted", self.worker.member[1])
        for number in (1, self.worker.member[1]):
            self.log.append(1, "here", number, ["a", True])
        self.log.append(1, "formed", 1)

    def wait_for_next(self) -> float:
        """Return for how long the device stays empty."""
        lost, since_s = self.worker, self.now_s
        while self.worker is lost:
            self.now_s += 1.0
            self.look()
        return self.now_s - since_s

    def end(self) -> None:
        """End the latest worker."""
        self.worker.signal(signal.SIGKILL)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(monkeypatch)
    yield place
    place.end()


def test_a_lost_worker_s_device_gets_a_joiner_later_each_time_that_it_loses_one(
    place: Place,
) -> None:
    waits = []
    descriptors = set()
    for _ in range(6):
        place.lose()
        waits.append(place.wait_for_next())
        descriptors.add(len(os.listdir("/proc/self/fd")))
    assert len(descriptors) == 1
    assert len(place.keeper._workers) == 2
    assert waits == [5.0, 20.0, 80.0, 320.0, 600.0, 600.0]
    place.now_s += 3600.0
    place.lose()
    assert place.wait_for_next() == 5.0
    first, *others = place.environments
    assert JOIN not in first
    assert {environment[JOIN] for environment in others} == {"host:7"}


def test_a_joiner_holds_its_keeper_only_while_the_run_goes_on(place: Place) -> None:
    place.lose()
    place.wait_for_next()
    place.worker.member = ("members", draw_number(place.run))
    place.look()  # It has a number, and hasn't asked yet.
    place.ask()
    place.look()
    assert place.keeper._judge() is None
    place.log.note("ended", 0)
    place.look()
    assert place.keeper._judge() == 0


def test_a_joiner_that_was_let_in_is_a_worker_like_others(place: Place) -> None:
    place.lose()
    place.wait_for_next()
    place.ask()
    place.let_in()
    place.look()
    place.log.note("ended", 0)
    place.look()
    assert place.keeper._judge() is None, "it may have to save what was trained"
    place.lose()
    assert place.keeper._judge() == 137, "it failed after training"


def test_no_joiner_comes_where_the_run_is_over_or_who_started_it_wants_its_end(
    place: Place,
) -> None:
    """And a keeper without workers ends then, unless it serves the run."""
    place.lose()
    place.keeper._is_told_to_end = True
    place.now_s += 1000.0
    place.look()
    assert [setattr(place.keeper, "_serves", x) or place.keeper._judge() for x in (0, 1)] == [
        137,
        None,
    ]
    place.keeper._is_told_to_end = False
    place.log.note("gone", 1, "lost, too")
    place.look()
    assert len(place.environments) == 1
    assert place.keeper._judge() == 137


def test_a_joiner_is_not_the_first_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    told = joiner_variables("host:7")
    assert told == {JOIN: "host:7", "NODE_RANK": "1", "RANK": "1", "SLURM_PROCID": "1"}
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("SLURM_PROCID")
    assert joiner_variables("host:7") == {JOIN: "host:7", "NODE_RANK": "1"}


@pytest.mark.parametrize("codes", [[None], [None, 3], [3, None]])  # Though another died before.
def test_what_fails_after_training_is_a_failure_of_the_script(
    tmp_path: Path, codes: list[int | None]
) -> None:
    (tmp_path / "fails-after").touch()
    keeper = start(tmp_path, codes)
    (tmp_path / "ends").touch()
    keeper.join(120.0)
    assert keeper.exitcode == 5


@pytest.mark.parametrize(("codes", "told"), [([3, 4], 3), ([9, LEAVE_EXIT_CODE], LEAVE_EXIT_CODE)])
def test_where_nobody_goes_on_the_launcher_hears_the_first_code_or_that_all_leave(
    tmp_path: Path, codes: list[int | None], told: int
) -> None:
    keeper = start(tmp_path, codes)
    keeper.join(120.0)
    assert keeper.exitcode == told


def test_signals_reach_the_workers_which_never_outlive_their_keeper(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    told, killed = start(tmp_path / "a", [None, None]), start(tmp_path / "b", [None, None])
    os.kill(told.pid, signal.SIGTERM)
    os.kill(killed.pid, signal.SIGKILL)
    told.join(120.0)
    assert told.exitcode == 0
    for rank in range(2):
        assert (tmp_path / "a" / f"signal-{rank}").read_text() == str(int(signal.SIGTERM))
        wait_until(lambda rank=rank: not is_running(tmp_path / "b", rank))
    killed.join()
