"""Slices on the host take little more pinned memory than their bytes."""

import torch
from torch import Tensor

from lightning_hetero.runtime.slices.host_memory import PinnedBlocks


def test_blocks_are_powers_of_two_that_tensors_fill() -> None:
    blocks: list[Tensor] = []

    def allocate(num_bytes: int) -> Tensor:
        blocks.append(torch.empty(num_bytes, dtype=torch.uint8))
        return blocks[-1]

    shapes = [(33, 100), (7,), (), (0, 5)] * 100
    total = sum(4 * torch.Size(shape).numel() for shape in shapes)
    memory = PinnedBlocks(total, allocate)
    tensors = [memory.empty(shape, torch.float32) for shape in shapes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.shape for tensor in tensors] == [torch.Size(shape) for shape in shapes]
    assert all((tensor == value).all() for value, tensor in enumerate(tensors)), "none overlap"
    assert {tensor._version for tensor in tensors} == {1}, "a change of one is none of another"
    sizes = [block.numel() for block in blocks]
    assert all(size & (size - 1) == 0 for size in sizes), "torch would round it up"
    assert total <= sum(sizes) < 1.1 * total
    assert len(sizes) < 10
