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

    def __init__(self):
        self.itself = self


class Littering(BoringModel):
    """Leaves a reference cycle behind in every step, and notes which are alive."""

    def __init__(self, fails_at):
        super().__init__()
        self.fails_at, self.left, self.alive = fails_at, [], []

    def training_step(self, batch, batch_idx):
        assert batch_idx != self.fails_at
        self.alive.append(sum(ref() is not None for ref in self.left))
        self.left.append(weakref.ref(Node()))
        # Enough objects to start a collection if the collector were on.
        self.kept = [[] for _ in range(5000)]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("every", "accumulate", "fails_at", "alive"),
    [
        (3, 1, None, [0, 1, 2, 0, 1, 2, 0, 1]),
        (2, 2, None, [0, 1, 2, 3, 0, 1, 2, 3]),
        (9, 1, 3, [0, 1, 2]),
    ],
)
def test_garbage_goes_after_every_nth_step_only(every, accumulate, fails_at, alive):
    model, options = Littering(fails_at), {"accumulate_grad_batches": accumulate}
    trainer = L.Trainer(**quiet(max_steps=8, callbacks=[CollectGarbage(every)], **options))
    if fails_at is None:
        trainer.fit(model)
    else:
        with pytest.raises(AssertionError):
            trainer.fit(model)
    assert model.alive[:8] == alive
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_no_steps_between_collections_are_refused():
    with pytest.raises(ConfigurationError, match="every_n_steps is 0"):
        CollectGarbage(0)
