import lightning as L
import pytest

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.testing import EmulatedDevices
from tests.toy import ToyModule, ToyOptions, loader, quiet


def test_equal_neighbours_are_a_node_and_speeds_scale_the_peak() -> None:
    cluster = EmulatedDevices((8, 8, 4, 4, 8)).cluster()
    assert [node.count for node in cluster.nodes] == [2, 2, 1]
    peaks = [cluster.device_of(rank).peak_flops_per_s for rank in range(5)]
    assert peaks[0] == peaks[1] == peaks[4] == pytest.approx(peaks[2] / 2)
    assert peaks[2] == peaks[3]


def test_all_emulated_devices_share_one_host() -> None:
    cluster = EmulatedDevices((2, 4, 2)).cluster()
    inside = cluster.link_between(0, 0)
    assert all(cluster.link_between(a, b) == inside for a in range(3) for b in range(3))
    assert len({cluster.device_of(rank).memory_bytes for rank in range(3)}) == 1


@pytest.mark.parametrize("slowdowns", [(), (1, 0.5), (float("nan"),), (-2, 1), 0.5])
def test_only_slowing_down_is_possible(slowdowns: tuple[float, ...] | float) -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        EmulatedDevices(slowdowns)


pytestmark = pytest.mark.filterwarnings("ignore")


def fit(slowdowns: tuple[float, ...] | float, strategy: str) -> None:
    callbacks = [EmulatedDevices(slowdowns, memory_bytes=2**30)]
    trainer = L.Trainer(
        **quiet(devices=1, strategy=strategy, max_steps=1, callbacks=callbacks)  # type: ignore[arg-type]
    )
    trainer.fit(ToyModule(ToyOptions()), loader(4, 2))
    played = trainer.strategy.emulation
    assert (played.slowdown, played.memory_bytes) == (2.0, 2**30)


def test_one_number_is_for_this_process_whichever_rank_it_gets() -> None:
    fit(2.0, "hetero")


def test_another_strategy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy runs"):
        fit((1.0,), "auto")


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 slowdowns but 1 ranks"):
        fit((1.0, 2.0), "hetero")
