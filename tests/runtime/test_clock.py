"""What a clock says of a rank's computing and waiting, and how a slower device is played on it."""

import pytest
import torch

from lightning_hetero import testing
from lightning_hetero.core.actions import ActionKind
from lightning_hetero.runtime import clock as clock_module
from lightning_hetero.runtime.clock import ComputeClock, MessageTime
from lightning_hetero.testing import EmulatedClock, LinkDelay

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
CPU = torch.device("cpu")


class FakeTime:
    """Wall and CPU time that only move when told; sleeping moves the wall's."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 100.0
        self.slept_s: list[float] = []

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds
        self.slept_s.append(seconds)

    def compute(self, cpu_s: float, *, wall_s: float | None = None) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s if wall_s is None else wall_s

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds


class Arriving:
    """A message that arrives after a while."""

    def __init__(self, fake: FakeTime, seconds: float) -> None:
        self.fake, self.seconds = fake, seconds

    def wait(self) -> None:
        self.fake.wait(self.seconds)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in (clock_module, testing):
        monkeypatch.setattr(module, "time", fake)
    return fake


def test_a_late_clock_tells_of_the_iteration_before(fake: FakeTime) -> None:
    clock = ComputeClock(CPU)
    clock.is_late = True
    seen = []
    for seconds in (1.0, 2.0, 3.0):
        with clock.iteration(), clock.action(FORWARD, 0):
            fake.compute(seconds)
        seen.append(None if clock.last is None else clock.last.compute_s())
    assert seen == [None, 1.0, 2.0]


def test_waits_inside_an_action_do_not_count_as_computing(fake: FakeTime) -> None:
    clock = ComputeClock(CPU)
    with clock.iteration():
        with clock.action(FORWARD, 0):
            fake.compute(1.0)
            with clock.waiting():
                fake.wait(5.0)
            fake.compute(2.0)
        with clock.waiting():
            fake.wait(7.0)
        with clock.action(BACKWARD, 0):
            fake.compute(4.0)
    assert clock.last is not None
    assert clock.last.compute_s(FORWARD) == pytest.approx(3.0)
    assert clock.last.compute_s(BACKWARD) == pytest.approx(4.0)
    assert clock.last.compute_s() == pytest.approx(7.0)
    assert clock.last.wait_s == pytest.approx(12.0)
    assert [(a.kind, a.microbatch_index, a.wait_s) for a in clock.last.actions] == [
        (FORWARD, 0, pytest.approx(5.0)),
        (BACKWARD, 0, 0.0),
    ]
    assert clock.last.num_actions(FORWARD) == clock.last.num_actions(BACKWARD) == 1


def test_waits_for_messages_are_told_apart_by_sender_also_inside_other_waits(
    fake: FakeTime,
) -> None:
    clock = ComputeClock(CPU)
    with clock.iteration():
        clock.wait_for(Arriving(fake, 2.0), peer=1, num_bytes=10)
        with clock.waiting():
            clock.wait_for(Arriving(fake, 3.0), peer=2, num_bytes=20, is_exchange=True)
            clock.wait_for(Arriving(fake, 4.0), peer=1, num_bytes=30, is_exchange=True)
            with clock.waiting():
                fake.wait(1.0)
        # Of messages that come as one, any may have been late.
        clock.wait_together([Arriving(fake, 0.5)], [(1, 10), (3, 20)], is_exchange=True)
    assert clock.last is not None
    assert clock.last.messages[:3] == (
        MessageTime(1, 10, 2.0, False),
        MessageTime(2, 20, 3.0, True),
        MessageTime(1, 30, 4.0, True),
    )
    assert clock.last.wait_by_peer_s() == {1: 6.5, 2: 3.0, 3: 0.5}
    assert clock.last.wait_s == pytest.approx(10.5)
    assert clock.last.exchange_wait_s() == pytest.approx(7.5)


def test_an_iteration_that_raises_leaves_the_last_one(fake: FakeTime) -> None:
    clock = ComputeClock(CPU)
    with clock.iteration(), clock.action(FORWARD, 0):
        fake.compute(1.0)
    complete = clock.last

    def fail() -> None:
        with clock.iteration(), clock.action(FORWARD, 0), clock.waiting():
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        fail()
    assert clock.last is complete
    with clock.iteration(), clock.action(FORWARD, 0):
        fake.compute(2.0)
    assert clock.last is not None
    assert clock.last.compute_s() == pytest.approx(2.0)


def test_a_slowed_action_takes_its_own_cpu_time_times_the_slowdown(fake: FakeTime) -> None:
    clock = EmulatedClock(CPU, slowdown=4.0)
    with clock.iteration():
        with clock.action(FORWARD, 0):
            fake.compute(1.0)
            with clock.waiting():
                fake.wait(10.0)
            fake.compute(1.0)
        # What other processes delay it by is no reason to slow it further.
        for wall_s in (3.0, 9.0):
            with clock.action(FORWARD, 1):
                fake.compute(1.0, wall_s=wall_s)
    assert clock.last is not None
    assert [action.compute_s for action in clock.last.actions] == pytest.approx([8.0, 4.0, 9.0])
    assert fake.slept_s == pytest.approx([6.0, 1.0])


def test_delayed_peers_messages_take_longer_by_their_bytes(fake: FakeTime) -> None:
    clock = EmulatedClock(CPU)
    clock.delays = {1: LinkDelay(bytes_per_s=10.0, latency_s=0.5)}
    with clock.iteration():
        clock.wait_for(Arriving(fake, 2.0), peer=1, num_bytes=30)
        clock.wait_for(Arriving(fake, 2.0), peer=2, num_bytes=30)
    assert clock.last is not None
    assert [message.wait_s for message in clock.last.messages] == [5.5, 2.0]


def test_probes_are_stretched_like_actions_and_leave_no_trace(fake: FakeTime) -> None:
    clock = EmulatedClock(CPU, slowdown=3.0)
    with clock.probing():
        fake.compute(1.0)
    assert fake.slept_s == [pytest.approx(2.0)]
    with clock.iteration(), clock.action(FORWARD, 0):
        fake.compute(1.0)
    assert clock.last is not None
    assert clock.last.num_actions(FORWARD) == 1
