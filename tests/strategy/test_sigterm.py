"""A SIGTERM to any one rank ends a run on all of them, after the same batch."""

import os
import signal
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero import HeteroStrategy
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


class Struck(L.Callback):
    """Sends this process a SIGTERM in its second batch, and counts batches until the run ends."""

    def __init__(self, *, is_struck: bool) -> None:
        self._is_struck = is_struck
        self.num_batches = 0
        self.ended_by: list[str] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.num_batches += 1
        if self._is_struck and self.num_batches == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    on_test_batch_start = on_train_batch_start

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.ended_by.append(type(exception).__name__)


def run_until_told(rank: int, struck: int, entry: str) -> tuple[int, list[str], bool]:
    found = Struck(is_struck=rank == struck)
    trainer = L.Trainer(
        strategy=HeteroStrategy(num_stages=2),
        callbacks=[found],
        **quiet(max_epochs=1, devices=2),
    )
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        getattr(trainer, entry)(ToyModule(ToyOptions()), loader(24, 4))
    return found.num_batches, found.ended_by, signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("entry", ["fit", "test"])
@pytest.mark.parametrize("struck", [0, 1])
def test_a_sigterm_to_any_rank_ends_the_run_on_all_after_the_same_batch(pool, struck, entry):
    found = pool.run(run_until_told, 2, struck, entry)
    assert found == [(2, ["SIGTERMException"], True)] * 2
