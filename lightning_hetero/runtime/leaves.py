"""Find the leaves of nested arguments fast: modes do so for every function of torch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

__all__ = ["tensors_in", "tree_leaves"]

_LEAVES = frozenset(
    {Tensor, nn.Parameter, int, float, bool, str, type(None), slice, type(...), torch.dtype}
)
"""Types that are no containers, and that most arguments have."""


def tree_leaves(tree: Any) -> list[Any]:
    """Return what torch's `tree_leaves` returns, in about a tenth of its time."""
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _collect(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, Tensor):
        leaves.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _collect(item, leaves)
    elif kind is dict:
        for item in tree.values():
            _collect(item, leaves)
    else:  # A class of somebody's own, which may be registered as a container.
        leaves += _pytree.tree_leaves(tree)
