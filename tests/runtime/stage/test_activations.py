"""Laws of the messages between stages: their sizes are known, and they are let go."""

import weakref
from datetime import timedelta
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
from lightning_hetero.exchange.neighbours import find_neighbours, stage_edges
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.stage import activations
from lightning_hetero.runtime.stage.activations import ActivationLink, Handover
from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.steps.layer_modules import HandsOn
from tests.toy import quiet

pytestmark = pytest.mark.dist

NUM_NOTES = 300
"""So long a note doesn't fit into one header."""


def messages() -> list[list[Tensor]]:
    """Return activations of all sizes, with side tensors of all dtypes."""
    torch.manual_seed(1)
    return [
        [torch.randn(3, 4, requires_grad=True)],
        [torch.randn(5, 2, dtype=torch.float64)],
        [torch.randn(0, 4)],
        [torch.randn(2, 4).bfloat16(), torch.tensor(True), torch.randn(3).requires_grad_()],
        [torch.randn(4, 3).t(), torch.arange(5), torch.randn(1, dtype=torch.complex64)],
        [torch.randn(70, 70), torch.empty(0)],
    ]


def exchange(rank: int, first: list[int], second: list[int]) -> None:
    """Send all of them from one group to another, and twice their values back as gradients."""
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in (first, second)}
    is_first = rank in first
    own = first if is_first else second
    found = ParallelPlan.from_dict(plan_of(pipeline(stage(first, 0, 1), stage(second, 1, 2))))
    previous, following = find_neighbours(rank, found.pipelines[0])[0 if is_first else 1]
    comms = Communicators.create(device=device, timeout=timedelta(seconds=60))
    comms.connect(stage_edges(found))
    link = ActivationLink(
        previous=previous,
        following=following,
        comms=comms,
        device=device,
        clock=ComputeClock(device),
        group=groups[tuple(own)],
    )
    for index, tensors in enumerate(messages()):
        note = [bytes([i % 256, i // 256]) for i in range(NUM_NOTES * index)]
        learned = [tensor for tensor in tensors if tensor.requires_grad]
        if is_first:
            link.send_activation(Handover(tensors, note))
            link.expect_gradient(index, learned)
            assert_equal(link.receive_gradient(index), [2 * tensor.detach() for tensor in learned])
        else:
            handover = link.receive_activation()
            received = handover.tensors
            assert handover.left == note
            assert_equal(received, tensors)
            assert [tensor.requires_grad for tensor in received] == [
                tensor.requires_grad for tensor in tensors
            ]
            link.send_gradient([2 * tensor.detach() for tensor in learned])
    link.finish()


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def train_and_count_sends(
    rank: int, plan: dict[str, Any], num_microbatches: int
) -> tuple[int, int, int]:
    """Return the number of messages sent, the most of them alive at once, and the most bytes."""
    alive: dict[int, int] = {}
    counts = [0, 0, 0]

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        alive[counts[0]] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, counts[0])
        counts[1] = max(counts[1], len(alive))
        counts[2] = max(counts[2], sum(alive.values()))
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
    return counts[0], counts[1], counts[2]


THREE = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 3)))


@pytest.mark.parametrize(("first", "second"), [([0], [1]), ([2], [3, 0, 1]), ([3, 0], [2, 1])])
def test_each_message_may_have_other_sizes_and_dtypes(
    pool: ProcessPool, first: list[int], second: list[int]
) -> None:
    # Each group is the smaller one for its own messages, and the larger one for the others'.
    pool.run(exchange, len(first + second), first, second)


def test_a_rank_keeps_no_more_messages_than_may_be_on_their_way(pool: ProcessPool) -> None:
    found = pool.run(train_and_count_sends, 3, THREE, 64)
    # A check with three hidden states comes before the training step, a validation pass behind
    # it; on a new link hidden states that were expected before the first had come, one by the check
    # and two by the validation, are sent in two parts.
    assert [sent for sent, _, _ in found] == [3 + 65 + 66, 3 + 64 + 65 + 66, 64]
    # As many hidden states as the stage holds, and gradients as the one before holds; first two
    # hidden states of the validation in two parts each.
    assert all(most <= limit for (_, most, _), limit in zip(found, [4, 2 + 3, 2], strict=True))
