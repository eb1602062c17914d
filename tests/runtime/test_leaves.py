from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from lightning_hetero.runtime.leaves import tensors_in, tree_leaves


class Registered:
    """A container of somebody's own."""

    def __init__(self, *items):
        self.items = items


_pytree.register_pytree_node(
    Registered, lambda tree: (tree.items, None), lambda items, _: Registered(*items)
)
A, B = torch.zeros(2), nn.Parameter(torch.ones(3))
Pair = namedtuple("Pair", "left right")
TREES = (
    A,
    (),
    None,
    ((A, 2.0), {"alpha": 3, "out": None}),
    [B, (slice(None), ..., [True, "text"]), torch.float32],
    {"b": A, "a": {1: B}},
    Pair(A, [B]),
    (OrderedDict(b=A, a=B), defaultdict(list, {"x": [A]}), deque([A, B])),
    (torch.Size([2, 3]), torch.device("cpu"), {A.dtype}),
    [Registered(A, [B]), object()],
)


@pytest.mark.parametrize("tree", TREES)
def test_leaves_are_those_of_torch_in_its_order(tree):
    expected = _pytree.tree_leaves(tree)
    assert list(map(id, tree_leaves(tree))) == list(map(id, expected))
    tensors = [leaf for leaf in expected if isinstance(leaf, torch.Tensor)]
    assert list(map(id, tensors_in(tree))) == list(map(id, tensors))
