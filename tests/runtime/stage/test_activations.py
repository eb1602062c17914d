"""Messages between stages are let go when they have arrived."""

import weakref
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.runtime.stage import activations
from tests.plans import CHAIN
from tests.processes import ProcessPool
from tests.runtime.steps.layer_modules import HandsOn
from tests.toy import quiet

pytestmark = pytest.mark.dist


def most_messages_alive(rank: int, plan: dict[str, Any], num_microbatches: int) -> int:
    alive: set[int] = set()
    numbers, most = count(), 0

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        number = next(numbers)
        alive.add(number)
        weakref.finalize(tensor, alive.discard, number)
        most = max(most, len(alive))
        return dist.isend(tensor, *args, **kwargs)

    torch.manual_seed(1)
    found = ParallelPlan.from_dict(plan)
    strategy = HeteroStrategy(found, num_microbatches=num_microbatches, layers="layers")
    data = TensorDataset(torch.randn(num_microbatches, 8, 3), torch.randn(num_microbatches, 1))
    loader = DataLoader(data, batch_size=num_microbatches)
    trainer = L.Trainer(
        strategy=strategy,
        **quiet(max_steps=1, num_sanity_val_steps=0, devices=len(found.ranks)),
        use_distributed_sampler=False,
    )
    module = HandsOn("plain")
    counting = SimpleNamespace(isend=counted, irecv=dist.irecv)
    with mock.patch.object(activations, "dist", counting):
        trainer.fit(module, loader)
        trainer.validate(module, loader, verbose=False)
    return most


def test_a_rank_keeps_no_more_messages_than_may_be_on_their_way(pool: ProcessPool) -> None:
    found = pool.run(most_messages_alive, 3, CHAIN, 64)
    # As many hidden states as the stage holds, and gradients as the one before holds; in the first
    # iteration of the validation two hidden states, in two parts each.
    assert all(most <= limit for most, limit in zip(found, [4, 2 + 3, 2], strict=True))
