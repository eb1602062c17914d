import pytest
import torch

from lightning_hetero import testing
from lightning_hetero.core.actions import ActionKind
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime import clock as clock_module
from lightning_hetero.testing import EmulatedClock, LinkDelay
from tests.fake_time import Arriving, FakeTime

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(clock_module, "time", fake)
    monkeypatch.setattr(testing, "time", fake)
    return fake


def make_clock(slowdown: float = 1.0) -> EmulatedClock:
    return EmulatedClock(torch.device("cpu"), slowdown=slowdown)


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


def test_delayed_peers_messages_take_longer_by_their_bytes(fake: FakeTime) -> None:
    clock = make_clock()
    clock.delays = {1: LinkDelay(bytes_per_s=10.0, latency_s=0.5)}
    with clock.iteration():
        clock.wait_for(Arriving(fake, 2.0), peer=1, num_bytes=30)
        clock.wait_for(Arriving(fake, 2.0), peer=2, num_bytes=30)
    assert clock.last is not None
    assert [message.wait_s for message in clock.last.messages] == [5.5, 2.0]


def test_probes_are_stretched_like_actions_and_leave_no_trace(fake: FakeTime) -> None:
    clock = make_clock(3.0)
    with clock.probing():
        fake.compute(1.0)
    assert fake.slept_s == [pytest.approx(2.0)]
    with clock.iteration(), clock.action(FORWARD, 0):
        fake.compute(1.0)
    assert clock.last is not None
    assert clock.last.num_actions(FORWARD) == 1


@pytest.mark.parametrize("slowdown", [0.5, 0.0, -1.0, float("nan")])
def test_a_slowdown_below_one_is_refused(slowdown: float) -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        make_clock(slowdown)
