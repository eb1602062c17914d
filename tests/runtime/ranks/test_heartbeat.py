"""What a rank's heartbeat costs the store, at any number of ranks, and whom it watches."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

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
    store.calls.clear()
    for heartbeat in ranks:
        heartbeat._round()
    assert store.calls == {"add": 2 * world_size, "multi_get": world_size}
    assert watches[-1].ring.watched == tuple(range(min(16, world_size - 1)))


def test_a_node_that_is_lost_is_silent_for_the_rank_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node's ranks are lost together, and each of them watches the others."""
    store, now_s = CountingStore(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    ranks, watches = heartbeats(store, 5, interval_s=1.0)

    def go_on(alive: tuple[int, ...], rounds: int) -> dict[int, float]:
        for _ in range(rounds):
            now_s[0] += 1.0
            for rank in (*alive, 0):
                ranks[rank]._round()
        return watches[0].silences_s

    go_on((1, 2, 3, 4), 1)
    assert go_on((3, 4), 8) == {1: 8, 2: 8, 3: 0, 4: 0}
    ranks[2]._report_end()
    assert go_on((1, 3, 4), 1) == {1: 0, 3: 0, 4: 0}, "who ends normally isn't missed"


def test_what_a_rank_tells_just_before_it_ends_reaches_the_others() -> None:
    """Otherwise they would take it for a normal end, and not know why the connection broke."""
    ranks, watches = heartbeats(CountingStore(), 2)
    ranks[0]._round()
    ranks[1].tell(1, "Rank 1 failed: a bug")
    ranks[1]._is_ending = True  # The thread was late: it has had no round since.
    ranks[1]._run()
    ranks[0]._round()
    assert watches[0].failure == "Rank 1 failed: a bug"
