"""What a rank's heartbeat costs the store, at any number of ranks, and whom it watches."""

import random
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring, Watch


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


@pytest.mark.parametrize("world_size", [2, 1024])
def test_a_round_of_a_quiet_run_is_three_calls(world_size: int) -> None:
    store = CountingStore()
    ranks, watches = heartbeats(store, world_size)
    for heartbeat in ranks:
        heartbeat._round()
        heartbeat._round()
    assert store.calls == {"add": 3 * 2 * world_size}
    assert [item.peer for item in watches] == [*range(1, world_size), 0]


def test_those_who_have_gone_are_passed_over_once() -> None:
    store, staying = CountingStore(), (5, 700)
    ranks, watches = heartbeats(store, 1024)
    for heartbeat in ranks:
        heartbeat._round()
    leaving = [rank for rank in range(1, 1024) if rank not in staying]
    random.Random(0).shuffle(leaving)
    for rank in leaving:
        ranks[rank]._round()
        ranks[rank]._say_goodbye()
    for rank in (0, *staying):
        ranks[rank]._round()
    assert [watches[rank].peer for rank in (0, 5, 700)] == [5, 700, 0]
    store.calls.clear()
    for _ in range(8):
        for rank in (0, *staying):
            ranks[rank]._round()
    assert store.calls.total() == 3 * 8 * 3


class SlowBoard:
    """A bulletin that says only some looks later which process is dead."""

    patience_s = 1000.0

    def __init__(self) -> None:
        self.looks = 0

    def num_news(self) -> int:
        self.looks += 1
        return int(self.looks > 3)

    def find_gone(self) -> tuple[int, str] | None:
        return (1, "it is dead") if self.looks > 3 else None


def test_a_rank_that_lost_a_connection_looks_again_at_once_until_it_knows_why() -> None:
    board = SlowBoard()
    heartbeat = Heartbeat(HashStore(), number=0, interval_s=1000.0)
    heartbeat.begin()
    watch = heartbeat.watch(Ring(numbers=(0, 1), rank=0, bulletin=board))
    assert heartbeat.has_begun.wait(60.0)
    assert not watch.wakes_judge.is_set()
    heartbeat.suspect()
    assert watch.wakes_judge.wait(60.0)
    assert (watch.failed_rank, watch.failure) == (1, "it is dead")
    # From then on it takes its time again; and where nobody says why, after a while.
    assert heartbeat._pause_s() == 1000.0
    watch.failure = None
    assert heartbeat._pause_s() < 1.0
    heartbeat._suspected_at_s -= 6001.0
    assert heartbeat._pause_s() == 1000.0
    # After a failure rank 0 doesn't wait until the others have seen it leave.
    watch.failure = "it is dead"
    heartbeat.end(60.0)


def test_those_behind_a_silent_rank_are_watched_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's ranks are lost together, so who would watch the second one is lost, too."""
    store, now_s = CountingStore(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    ranks, _ = heartbeats(store, 5, interval_s=1.0)
    first = ranks[0]

    def go_on(alive: tuple[int, ...], rounds: int) -> None:
        for _ in range(rounds):
            now_s[0] += 1.0
            for rank in alive:
                ranks[rank]._round()
            first._round()

    go_on((1, 2, 3, 4), 1)
    go_on((3, 4), 8)
    assert [first.silence_s(rank) for rank in range(1, 5)] == [8, 6, 0, 0]
    # Once it beats, the others are its own concern again.
    go_on((1, 3, 4), 3)
    store.calls.clear()
    first._round()
    assert store.calls == {"add": 3}
