"""What hooks make of a part of a batch is of each sample alone, or refused, or warned of."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.random_state import seed_torch
from lightning_hetero.runtime.results.batch_watch import BatchWatch
from lightning_hetero.runtime.results.targets import LossWatch
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass
from tests.processes import ProcessPool
from tests.runtime.step_cases import COPIES, TinyModule, fit_each

_MEAN = torch.ones(5)


def _shuffled(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


@pytest.mark.parametrize(
    "hook",
    [
        lambda x: (x - _MEAN) * 2,
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x[:, : int((x > 0).sum(1).max())],
        _shuffled,
    ],
)
def test_what_is_of_each_sample_alone_is_left_alone(hook: Any) -> None:
    x = torch.arange(1.0, 21).view(4, 5)
    torch.manual_seed(1)
    expected = hook(x)
    torch.manual_seed(1)
    torch.testing.assert_close(BatchWatch().move([x], lambda batch: [hook(batch[0])])[0], expected)


@pytest.mark.parametrize(
    "hook",
    [
        lambda x: x - x.mean(0),
        lambda x: (x - 1) / x.std(0),
        lambda x: x / x.max(),
        lambda x: x @ x.T,
    ],
)
def test_samples_that_meet_are_refused(hook: Any) -> None:
    with pytest.raises(StepError, match="brings its samples together"):
        BatchWatch().move([torch.ones(4, 5)], lambda batch: [hook(batch[0])])


def test_a_batch_that_is_changed_later_is_warned_of_once_a_phase() -> None:
    watch, batch = BatchWatch(), [torch.ones(4, 5)]
    assert [watch.begin("train"), watch.begin("train"), watch.begin("validate")] == [1, 0, 1]
    watch.move(batch, lambda batch: batch)
    batch[0].mul_(2)
    with pytest.warns(UserWarning, match="on_train_batch_start changes the batch in place"):
        watch.check_unchanged()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check_unchanged()


def test_a_step_that_seeds_torch_is_warned_of() -> None:
    current = MicrobatchPass(
        layers=range(2),
        num_layers=2,
        seed=(3,),
        receive=None,
        wait_unit=lambda _: None,
        loss_watch=LossWatch(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seed_torch(current.step_seed)
        current.begin_layer(0)
        torch.rand(3)
        current.begin_layer(1)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="A step seeds torch's generators"):
        current.begin_layer(2)


class Centers(TinyModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        ids, labels = batch
        is_large = ids - ids.float().mean() > 0
        return ids * is_large, labels


@pytest.mark.dist
def test_hooks_of_a_run_are_looked_at(pool: ProcessPool) -> None:
    for (message,) in pool.run(fit_each, 2, [Centers], COPIES):
        assert "brings its samples together" in message
