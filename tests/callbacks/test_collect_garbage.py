"""`CollectGarbage` collects after the steps that it names, and at no other time."""

import gc
import weakref

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_hetero.callbacks import CollectGarbage
from lightning_hetero.core.errors import ConfigurationError
from tests.toy import quiet


class Node:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


class Littering(BoringModel):
    """Leaves a reference cycle behind in every step, and notes which are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[weakref.ref[Node]] = []
        self.alive: list[int] = []

    def training_step(self, batch, batch_idx):
        self.alive.append(sum(ref() is not None for ref in self.left))
        self.left.append(weakref.ref(Node()))
        # Enough objects to start a collection if the collector were on.
        self.kept = [[] for _ in range(5000)]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(callback, *, fails_at=None, accumulate=1):
    model = Littering()
    if fails_at is not None:
        model.on_train_batch_start = lambda batch, index: 1 / (index != fails_at) and None
    trainer = L.Trainer(
        **quiet(max_steps=8, callbacks=[callback], accumulate_grad_batches=accumulate)
    )
    trainer.fit(model)
    return model


def test_garbage_goes_after_every_third_step_only():
    model = trained(CollectGarbage(every_n_steps=3))
    assert model.alive == [0, 1, 2, 0, 1, 2, 0, 1]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_batches_that_accumulate_are_no_steps():
    model = trained(CollectGarbage(every_n_steps=2), accumulate=2)
    assert model.alive[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_run_that_fails_leaves_the_collector_as_it_was():
    with pytest.raises(ZeroDivisionError):
        trained(CollectGarbage(), fails_at=2)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_no_steps_between_collections_are_refused():
    with pytest.raises(ConfigurationError, match="every_n_steps is 0"):
        CollectGarbage(0)
