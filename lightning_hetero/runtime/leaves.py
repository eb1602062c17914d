"""Find the leaves of nested arguments fast: modes do so for every function of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

__all__ = ["tensors_in", "tree_leaves", "tree_map"]

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


def tree_map(function: Callable[[Any], Any], tree: Any, *, leaf: type[object] | None = None) -> Any:
    """Return what torch's `tree_map` returns, in a fraction of its time.

    Args:
        function: Called with each leaf.
        tree: Nested arguments.
        leaf: A further type that is no container, however it is made.
    """
    kind = type(tree)
    if kind in _LEAVES or kind is leaf or isinstance(tree, Tensor):
        return function(tree)
    if kind is tuple:
        return tuple([tree_map(function, item, leaf=leaf) for item in tree])
    if kind is list:
        return [tree_map(function, item, leaf=leaf) for item in tree]
    if kind is dict:
        return {key: tree_map(function, item, leaf=leaf) for key, item in tree.items()}
    # A class of somebody's own, which may be registered as a container.
    return _pytree.tree_map(function, tree, is_leaf=lambda item: type(item) is leaf)


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
