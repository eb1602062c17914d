"""A SIGTERM to any one rank ends a run on all of them, after the same batch."""

import os
import signal
from typing import Any

import lightning as L
import pytest

from lightning_hetero import ElasticRestart, HeteroStrategy, LayerwiseCheckpoint
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


class Struck(L.Callback):
    """Sends this process a SIGTERM in its second batch, and counts batches until the run ends."""

    def __init__(self, *, is_struck: bool, at_end: bool = False) -> None:
        self._is_struck, self._at_end = is_struck, at_end
        self.num_batches = 0
        self.ended_by: list[str] = []

    def _strike(self) -> None:
        if self._is_struck and self.num_batches == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, *_: Any) -> None:
        self.num_batches += 1
        if not self._at_end:
            self._strike()

    on_test_batch_start = on_validation_batch_start = on_train_batch_start

    def on_train_batch_end(self, *_: Any) -> None:
        if self._at_end:
            self._strike()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.ended_by.append(type(exception).__name__)


def run_until_told(rank: int, struck: int, entry: str) -> tuple[int, list[str], bool]:
    found = Struck(is_struck=rank == struck)
    handler = signal.getsignal(signal.SIGTERM)
    run_with(found, entry=entry)
    return found.num_batches, found.ended_by, signal.getsignal(signal.SIGTERM) is handler


def run_with(*callbacks: L.Callback, entry: str) -> None:
    options = quiet(max_epochs=1, devices=2) | {"enable_checkpointing": None}
    strategy = HeteroStrategy(num_stages=2)
    trainer = L.Trainer(strategy=strategy, callbacks=[*callbacks], **options)
    loaders = [loader(24, 4)] * (2 if entry == "sanity check" else 1)
    fit_or_test = trainer.test if entry == "test" else trainer.fit
    with pytest.raises(SystemExit):
        fit_or_test(ToyModule(ToyOptions()), *loaders)


@pytest.mark.parametrize(("struck", "entry"), [(0, "test"), (1, "fit")])
def test_a_sigterm_to_any_rank_ends_the_run_on_all_after_the_same_batch(pool, struck, entry):
    found = pool.run(run_until_told, 2, struck, entry)
    assert found == [(2, ["SIGTERMException"], True)] * 2


def strike_each(rank: int) -> tuple[int, list[str]]:
    found = Struck(is_struck=True, at_end=rank == 1)
    run_with(found, entry="fit")
    return found.num_batches, found.ended_by


def test_another_sigterm_once_all_have_agreed_to_end_changes_nothing(pool):
    assert pool.run(strike_each, 2) == [(2, ["SIGTERMException"])] * 2


def run_elastically(rank: int, folder: str, entry: str) -> tuple[int, list[str]]:
    found = Struck(is_struck=rank == 1)
    run_with(found, LayerwiseCheckpoint(folder), ElasticRestart(), entry=entry)
    return found.num_batches, found.ended_by


@pytest.mark.parametrize(
    ("entry", "expected"),
    [("sanity check", (3, ["AgreedExit"])), ("test", (2, ["SIGTERMException"]))],
)
def test_a_sigterm_before_training_or_without_it_ends_all_ranks(pool, tmp_path, entry, expected):
    assert pool.run(run_elastically, 2, str(tmp_path), entry) == [expected] * 2
