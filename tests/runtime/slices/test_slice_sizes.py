"""Sizes of a whole parameter that make tensors like its slice."""

import math

import torch

from lightning_hetero.runtime.slices.slice_sizes import SliceSize, for_slice, size_of_whole


def test_python_counts_the_whole_and_torch_is_given_the_slices() -> None:
    rows, shape = SliceSize.of(8, own=3), torch.Size([SliceSize.of(8, own=3), 5])
    assert [sum([rows, 4, rows]), math.prod(shape), f"{rows:,}", rows / 2] == [20, 40, "8", 4.0]
    assert for_slice(sum([rows, 4, rows])) == 10
    assert for_slice((math.prod(shape), 3 * rows - 1, rows // 2)) == (15, 8, 1)
    assert torch.zeros(for_slice(shape)).shape == (3, 5)
    assert float(rows**0.5) == math.sqrt(8)


def test_a_slice_answers_for_the_whole() -> None:
    own = torch.zeros(3, 5)
    for func, expected in [
        (torch.Tensor.shape.__get__, (8, 5)),
        (torch.Tensor.size, (8, 5)),
        (torch.Tensor.numel, 40),
        (torch.Tensor.dim, 2),
    ]:
        assert size_of_whole(func, func(own), (own,), {}, (8, 5), "p") == expected
    assert size_of_whole(torch.Tensor.size, 3, (own, 0), {}, (8, 5), "p") == 8
