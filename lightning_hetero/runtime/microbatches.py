"""Cut a batch into micro-batches.

A batch is cut along dim 0 of its tensors, which all must have the same number of samples; lists of
as many entries are cut too, anything else is handed to every micro-batch. Dataclasses and dicts in
disguise, such as the `BatchEncoding` of Hugging Face's collators, are cut inside. A batch that
knows how to cut itself, such as `PackedBatch`, has a method `split(num_microbatches)`.
"""

from collections import UserDict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lightning_hetero.core.batches import EmptyBatch
from lightning_hetero.core.errors import BatchError

__all__ = ["SplittableBatch", "count_samples", "cut_batch", "epoch_weight"]


class SplittableBatch(Protocol):
    """A batch that cuts itself into micro-batches."""

    @property
    def num_samples(self) -> int:
        """Number of samples in the batch."""

    def split(self, num_microbatches: int) -> Sequence[Any]:
        """Return at most `num_microbatches` parts that hold every sample once."""


def _is_splittable(batch: Any) -> TypeGuard[SplittableBatch]:
    # By attributes: isinstance() of a protocol would take longer than all the rest of a cut.
    return hasattr(batch, "num_samples") and hasattr(batch, "split")


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        BatchError: The tensors disagree, or there is none to count.
    """
    if isinstance(batch, EmptyBatch):
        return 0
    if _is_splittable(batch):
        return batch.num_samples
    tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1:
        found = [tuple(tensor.shape) for tensor in tensors]
        raise BatchError(
            f"A batch of type {type(batch).__name__} can't be cut into micro-batches: its tensors "
            f"have shapes {found}, and dim 0 must be the same number of samples in all. Return "
            "such tensors, or a batch with num_samples and split(num_microbatches)."
        )
    return sizes.pop()


def _leaves(batch: Any) -> Iterator[Any]:
    for leaf in tree_flatten(batch)[0]:
        if _has_fields(leaf):
            yield from _leaves(vars(leaf))
        else:
            yield leaf


def _has_fields(leaf: Any) -> bool:
    """Whether a leaf of a batch holds more of it: pytree doesn't look into these."""
    holds = isinstance(leaf, UserDict) or (is_dataclass(leaf) and not isinstance(leaf, type))
    return holds and hasattr(leaf, "__dict__")


def epoch_weight(microbatch: Any) -> int:
    """Return how much a micro-batch counts in an epoch's mean: tokens if it knows them."""
    own = getattr(microbatch, "num_target_tokens", None)
    return int(own) if isinstance(own, int) else count_samples(microbatch)


def cut_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Return at most `num_microbatches` parts whose numbers of samples differ by one at most.

    Raises:
        BatchError: The batch can't be cut.
    """
    num_samples = count_samples(batch)
    if num_samples == 0 or num_microbatches == 0:
        return []
    if _is_splittable(batch):
        return list(batch.split(num_microbatches))
    count = min(num_microbatches, num_samples)
    if count == 1:
        return [batch]
    cuts = [num_samples * index // count for index in range(count + 1)]
    return [_part(batch, num_samples, *ends) for ends in pairwise(cuts)]


def _part(batch: Any, num_samples: int, start: int, stop: int) -> Any:
    def is_column(value: Any) -> bool:
        # A list of one entry a sample, such as texts; not the list of tensors that a batch may be.
        return (
            isinstance(value, list)
            and len(value) == num_samples
            and not any(isinstance(item, Tensor) for item in value)
        )

    def cut(value: Any) -> Any:
        if (isinstance(value, Tensor) and value.ndim) or is_column(value):
            return value[start:stop]
        if _has_fields(value):
            part = copy(value)
            vars(part).update(tree_map(cut, vars(value), is_leaf=is_column))
            return part
        return value

    return tree_map(cut, batch, is_leaf=is_column)
