"""Devices and faults that are played: whom they slow down, and for how long."""

import lightning as L
import pytest

from examples.slow_parts import InjectFaults, SlowLink, SlowRank
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.testing import EmulatedDevices
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(callback: L.Callback, *others: L.Callback, strategy: str = "hetero") -> L.Trainer:
    options = quiet(devices=1, strategy=strategy, max_steps=5, callbacks=[callback, *others])
    trainer = L.Trainer(**options)
    trainer.fit(ToyModule(ToyOptions()), loader(10, 2))
    return trainer


def test_equal_neighbours_are_a_node_and_speeds_scale_the_peak() -> None:
    cluster = EmulatedDevices((8, 8, 4, 4, 8)).cluster()
    assert [node.count for node in cluster.nodes] == [2, 2, 1]
    peaks = [cluster.device_of(rank).peak_flops_per_s for rank in range(5)]
    assert peaks[0] == peaks[1] == peaks[4] == pytest.approx(peaks[2] / 2)
    assert peaks[2] == peaks[3]


def test_one_number_is_for_this_process_whichever_rank_it_gets() -> None:
    played = fit(EmulatedDevices(2.0, memory_bytes=2**30)).strategy.emulation
    assert (played.slowdown, played.memory_bytes) == (2.0, 2**30)


class Look(L.Callback):
    """Notes the clock's slowdown in every step."""

    def __init__(self) -> None:
        self.slowdowns: list[float] = []

    def on_train_batch_end(self, trainer, *_) -> None:
        self.slowdowns.append(trainer.strategy.engine.clock.slowdown)

    def on_train_end(self, trainer, *_) -> None:
        self.slowdowns.append(trainer.strategy.engine.clock.slowdown)


def test_slowdowns_multiply_while_they_hold_and_end_with_training() -> None:
    first = SlowRank(start=1, duration=3, global_rank=0, slowdown=2.0)
    second = SlowRank(start=2, global_rank=0, slowdown=1.5)
    look = Look()
    fit(InjectFaults([first, second]), look)
    assert look.slowdowns == [1.0, 2.0, 3.0, 3.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("make", "strategy", "said"),
    [
        (lambda: EmulatedDevices(()), "hetero", "1 or more"),
        (lambda: EmulatedDevices((float("nan"),)), "hetero", "1 or more"),
        (lambda: EmulatedDevices(0.5), "hetero", "1 or more"),
        (lambda: EmulatedDevices((1.0,)), "auto", "SingleDeviceStrategy runs"),
        (lambda: EmulatedDevices((1.0, 2.0)), "hetero", "2 slowdowns but 1 ranks"),
        (lambda: SlowRank(start=-1, global_rank=0, slowdown=2.0), "hetero", "start"),
        (lambda: SlowRank(start=0, global_rank=1, slowdown=2.0), "hetero", "rank 1 but 1 ranks"),
        (lambda: SlowLink(start=0, ranks=(0, 0), latency_s=1.0), "auto", "need HeteroStrategy"),
    ],
)
def test_what_cannot_be_played_is_refused(make, strategy, said) -> None:
    def play() -> None:
        played = make()
        fit(played if isinstance(played, L.Callback) else InjectFaults([played]), strategy=strategy)

    with pytest.raises(ConfigurationError, match=said):
        play()
