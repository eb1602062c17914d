import time

import pytest
import torch

from lightning_hetero.core.actions import ActionKind
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime import clock as clock_module
from lightning_hetero.runtime.clock import ComputeClock, LinkDelay, MessageTime

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


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


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(clock_module, "time", fake)
    return fake


def make_clock(slowdown: float = 1.0) -> ComputeClock:
    clock = ComputeClock(torch.device("cpu"))
    clock.slowdown = slowdown
    return clock


def test_waits_inside_an_action_do_not_count_as_computing(fake: FakeTime) -> None:
    clock = make_clock()
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


def test_a_wait_inside_a_wait_counts_once(fake: FakeTime) -> None:
    clock = make_clock()
    with clock.iteration(), clock.waiting():
        fake.wait(1.0)
        with clock.waiting():
            fake.wait(2.0)
    assert clock.last is not None
    assert clock.last.wait_s == pytest.approx(3.0)


def test_a_slowed_action_takes_its_cpu_time_times_the_slowdown(fake: FakeTime) -> None:
    clock = make_clock(4.0)
    with clock.iteration(), clock.action(FORWARD, 3):
        fake.compute(1.0)
        with clock.waiting():
            fake.wait(10.0)
        fake.compute(1.0)
    assert clock.last is not None
    assert clock.last.compute_s() == pytest.approx(8.0)
    assert fake.slept_s == [pytest.approx(6.0)]


def test_other_processes_that_delay_an_action_do_not_slow_it_further(fake: FakeTime) -> None:
    clock = make_clock(4.0)
    with clock.iteration():
        with clock.action(FORWARD, 0):
            fake.compute(1.0, wall_s=3.0)
        with clock.action(FORWARD, 1):
            fake.compute(1.0, wall_s=9.0)
    assert clock.last is not None
    assert [action.compute_s for action in clock.last.actions] == pytest.approx([4.0, 9.0])


def test_stretching_before_a_send_is_not_repeated_at_the_end(fake: FakeTime) -> None:
    clock = make_clock(3.0)
    with clock.iteration(), clock.action(BACKWARD, 0):
        fake.compute(1.0)
        clock.stretch()
        assert fake.slept_s == [pytest.approx(2.0)]
        fake.compute(0.5)
    assert clock.last is not None
    assert clock.last.compute_s() == pytest.approx(4.5)


def test_waits_and_gaps_are_never_stretched(fake: FakeTime) -> None:
    clock = make_clock(3.0)
    with clock.iteration():
        fake.compute(1.0)
        clock.stretch()
        with clock.waiting():
            fake.compute(1.0)
            clock.stretch()
    assert fake.slept_s == []


class Message:
    """A message that arrives after a while."""

    def __init__(self, fake: FakeTime, seconds: float) -> None:
        self.fake, self.seconds = fake, seconds

    def wait(self) -> None:
        self.fake.wait(self.seconds)


def test_waits_for_messages_are_told_apart_by_sender_also_inside_other_waits(
    fake: FakeTime,
) -> None:
    clock = make_clock()
    with clock.iteration():
        clock.wait_for(Message(fake, 2.0), peer=1, num_bytes=10)
        with clock.waiting():
            clock.wait_for(Message(fake, 3.0), peer=2, num_bytes=20, is_exchange=True)
            clock.wait_for(Message(fake, 4.0), peer=1, num_bytes=30, is_exchange=True)
            fake.wait(1.0)
    assert clock.last is not None
    assert clock.last.messages == (
        MessageTime(1, 10, 2.0, False),
        MessageTime(2, 20, 3.0, True),
        MessageTime(1, 30, 4.0, True),
    )
    assert clock.last.wait_by_peer_s() == {1: 6.0, 2: 3.0}
    assert clock.last.wait_s == pytest.approx(10.0)


def test_delayed_peers_messages_take_longer_by_their_bytes(fake: FakeTime) -> None:
    clock = make_clock()
    clock.delays = {1: LinkDelay(bytes_per_s=10.0, latency_s=0.5)}
    with clock.iteration():
        clock.wait_for(Message(fake, 2.0), peer=1, num_bytes=30)
        clock.wait_for(Message(fake, 2.0), peer=2, num_bytes=30)
    assert clock.last is not None
    assert [message.wait_s for message in clock.last.messages] == [5.5, 2.0]


@pytest.mark.parametrize("options", [{"bytes_per_s": 0.0}, {"latency_s": -1.0}])
def test_a_delay_must_be_possible(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="bytes_per_s"):
        LinkDelay(**options)


def test_probes_are_stretched_like_actions_and_leave_no_trace(fake: FakeTime) -> None:
    clock = make_clock(3.0)
    with clock.stretching():
        fake.compute(1.0)
    assert fake.slept_s == [pytest.approx(2.0)]
    with clock.iteration(), clock.action(FORWARD, 0):
        fake.compute(1.0)
    assert clock.last is not None
    assert clock.last.num_actions(FORWARD) == 1


def test_an_iteration_that_raises_leaves_the_last_one(fake: FakeTime) -> None:
    clock = make_clock()
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


def test_nothing_has_run_before_the_first_iteration() -> None:
    assert make_clock().last is None


@pytest.mark.parametrize("slowdown", [0.5, 0.0, -1.0, float("nan")])
def test_a_slowdown_below_one_is_refused(slowdown: float) -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        make_clock(slowdown)


def test_cuda_ranks_cannot_be_slowed_down() -> None:
    with pytest.raises(ConfigurationError, match="only CPU"):
        ComputeClock(torch.device("cuda", 0)).slowdown = 2.0
    with pytest.raises(ConfigurationError, match="only CPU"):
        ComputeClock(torch.device("cuda", 0)).delays = {1: LinkDelay(latency_s=1.0)}


def test_real_sleep_stretches_real_work() -> None:
    clock = make_clock(5.0)
    with clock.iteration(), clock.action(FORWARD, 0):
        start_s = time.thread_time()
        while time.thread_time() - start_s < 0.01:
            pass
    assert clock.last is not None
    assert clock.last.compute_s() >= 0.049
