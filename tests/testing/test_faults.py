import lightning as L
import pytest

from examples.slow_parts import InjectFaults, SlowLink, SlowRank
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.strategy.hetero import HeteroStrategy
from tests.toy import ToyModule, ToyOptions, loader, quiet


@pytest.mark.parametrize(
    "options",
    [
        {"start": -1},
        {"start": 0, "duration": 0},
        {"start": float("nan")},
        {"start": 0, "slowdown": 0.5},
    ],
)
def test_a_rank_that_cannot_be_slowed_so_is_refused(options):
    with pytest.raises(ConfigurationError):
        SlowRank(**{"global_rank": 0, "slowdown": 2.0, **options})


class Look(L.Callback):
    """Notes the clock's slowdown in every step."""

    def __init__(self) -> None:
        self.slowdowns: list[float] = []

    def on_train_batch_end(self, trainer, *_):
        assert isinstance(trainer.strategy, HeteroStrategy)
        self.slowdowns.append(trainer.strategy.engine.clock.slowdown)

    def on_train_end(self, trainer, *_):
        self.at_the_end = trainer.strategy.engine.clock.slowdown


def fit(faults, strategy="hetero", max_steps=5):
    look = Look()
    callbacks = [InjectFaults(faults), *([look] if strategy == "hetero" else [])]
    trainer = L.Trainer(
        **quiet(devices=1, strategy=strategy, max_steps=max_steps, callbacks=callbacks)
    )
    trainer.fit(ToyModule(ToyOptions()), loader(2 * max_steps, 2))
    return look


@pytest.mark.filterwarnings("ignore")
def test_slowdowns_multiply_while_they_hold_and_end_with_training():
    first = SlowRank(start=1, duration=3, global_rank=0, slowdown=2.0)
    second = SlowRank(start=2, global_rank=0, slowdown=1.5)
    look = fit([first, second])
    assert look.slowdowns == [1.0, 2.0, 3.0, 3.0, 1.5]
    assert look.at_the_end == 1.0


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_do_not_run_and_links_elsewhere_are_refused():
    with pytest.raises(ConfigurationError, match="rank 1 but 1 ranks run"):
        fit([SlowRank(start=0, global_rank=1, slowdown=2.0)])
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy can't be delayed"):
        fit([SlowLink(start=0, ranks=(0, 0), latency_s=1.0)], strategy="auto")
