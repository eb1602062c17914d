"""Say what is in a batch, whatever it is: its samples, tokens and tensors; and cut it.

A batch is cut along dim 0 of its tensors, which all must have the same number of samples; lists of
as many entries are cut too, anything else is handed to every micro-batch. Dataclasses and dicts in
disguise, such as the `BatchEncoding` of Hugging Face's collators, are cut inside. A batch that
knows how to cut itself, such as `PackedBatch`, has a method `split(num_microbatches)`.
"""

import zlib
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from itertools import chain, pairwise
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_hetero.core.errors import BatchError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.models.packing import QUADRATIC_WEIGHT

__all__ = [
    "AssignedBatch",
    "EmptyBatch",
    "SplittableBatch",
    "count_samples",
    "cut_batch",
    "epoch_weight",
    "fingerprint_of",
    "sample_lengths",
    "sample_tokens",
    "sizes_of",
    "tensors_of",
    "work_of",
]


class EmptyBatch:
    """The batch of a rank without samples in an iteration; it still takes part in it."""

    def __repr__(self) -> str:
        return "EmptyBatch()"


@dataclass(frozen=True, kw_only=True)
class AssignedBatch:
    """One rank's part of an iteration whose samples were assigned ahead of time.

    The plan travels with the batch, so that whoever assigns may change plans at any time.
    """

    plan: ParallelPlan
    """The plan that runs the iteration; the same on every rank."""
    microbatches: tuple[Any, ...]
    """Batches of the rank's pipeline, each one micro-batch; none if it has no work or is idle."""
    first_index: int
    """Micro-batches of the pipelines before this one; micro-batches draw random numbers by it."""


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
    if type(batch) not in (list, tuple) and _is_splittable(batch):
        return batch.num_samples
    tensors = tensors_of(batch)
    sizes = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    if len(sizes) != 1:
        found = [tuple(tensor.shape) for tensor in tensors if tensor.ndim]
        raise BatchError(
            f"A batch of type {type(batch).__name__} can't be cut into micro-batches: its tensors "
            f"have shapes {found}, and dim 0 must be the same number of samples in all. Return "
            "such tensors, or a batch with num_samples and split(num_microbatches)."
        )
    return sizes.pop()


def tensors_of(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch."""
    if _is_flat(batch):
        return [*batch]
    if type(batch) is list and all(map(_is_flat, batch)):
        return [*chain.from_iterable(batch)]
    return [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor)]


def _is_flat(batch: Any) -> bool:
    """Whether it is a list or a tuple of tensors, as most are: pytree takes much longer."""
    return type(batch) in (list, tuple) and {*map(type, batch)} == {Tensor}


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


def sizes_of(microbatch: Any) -> tuple[int, int]:
    """Return the samples of a micro-batch, 0 if they can't be counted, and its tokens.

    Samples count as tokens where it knows of none.
    """
    try:
        samples = count_samples(microbatch)
    except BatchError:
        samples = 0
    return samples, int(getattr(microbatch, "num_tokens", samples))


def epoch_weight(microbatch: Any, num_samples: int) -> int:
    """Return how much a micro-batch counts in an epoch's mean: tokens if it knows them."""
    own = getattr(microbatch, "num_target_tokens", None)
    return num_samples if own is None or not isinstance(own, int) else int(own)


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
    return _parts(batch, [num_samples * index // count for index in range(count + 1)])


def _parts(batch: Any, cuts: Sequence[int]) -> list[Any]:
    """Cut all that has samples at these places, the first 0 and the last their number."""

    def is_column(value: Any) -> bool:
        # A list of one entry a sample, such as texts; not the list that holds a batch's tensors.
        return (
            isinstance(value, list)
            and len(value) == cuts[-1]
            and not any(isinstance(item, Tensor) for item in tree_flatten(value)[0])
        )

    def parts_of(value: Any) -> list[Any]:
        if (isinstance(value, Tensor) and value.ndim) or is_column(value):
            parts = [value[start:stop] for start, stop in pairwise(cuts)]
            # A step may change its own in place: views would count that as a change of all others.
            is_apart = isinstance(value, Tensor) and not value.requires_grad
            return [part.data for part in parts] if is_apart else parts
        if not _has_fields(value):
            return [value] * (len(cuts) - 1)
        parts = [copy(value) for _ in cuts[1:]]
        for part, fields in zip(parts, _parts(vars(value), cuts), strict=True):
            vars(part).update(fields)
        return parts

    if _is_flat(batch):
        return [type(batch)(part) for part in zip(*map(parts_of, batch), strict=True)]
    leaves, form = tree_flatten(batch, is_leaf=is_column)
    columns = [parts_of(leaf) for leaf in leaves]
    return [form.unflatten([column[i] for column in columns]) for i in range(len(cuts) - 1)]


def fingerprint_of(parts: Sequence[Any]) -> int:
    """Return a checksum of what a rank works on, a batch or several micro-batches.

    It takes their number, the shapes of the first and the last one and, of tensors that aren't on
    an accelerator yet, the first values.
    """
    digest = len(parts)
    for part in (*parts[:1], *parts[1:][-1:]):
        has_fields = hasattr(part, "__dict__") and not isinstance(part, Tensor)
        for tensor in tensors_of(vars(part) if has_fields else part):
            digest = zlib.crc32(repr(tuple(tensor.shape)).encode(), digest)
            if tensor.device.type == "cpu" and tensor.numel():
                head = tensor.detach().reshape(-1)[:64].contiguous()
                digest = zlib.crc32(head.view(torch.uint8).numpy().tobytes(), digest)
    return digest


def sample_lengths(batch: Any) -> list[int]:
    """Return the tokens of each sample of a batch, padding included; none if it holds none."""
    if isinstance(batch, AssignedBatch):
        return [length for item in batch.microbatches for length in sample_lengths(item)]
    lengths = getattr(batch, "lengths", None)
    if lengths is not None:
        return [int(length) for length in lengths]
    tensors = [tensor for tensor in tensors_of(_plain(batch)) if tensor.ndim >= 2]
    tokens = [tensor for tensor in tensors if not tensor.is_floating_point()] or tensors
    return [] if not tokens else [tokens[0].shape[1]] * len(tokens[0])


def sample_tokens(sample: Any) -> int | None:
    """Return the tokens, or frames, of a dataset's sample as far as its tensors say."""
    tensors = [leaf for leaf in tree_flatten(sample)[0] if isinstance(leaf, Tensor)]
    tokens = [item.shape[-1] for item in tensors if item.ndim and not item.is_floating_point()]
    frames = [len(item) for item in tensors if item.ndim == 2 and item.is_floating_point()]
    return max(tokens or frames, default=None)


def work_of(batch: Any) -> float:
    """Return a batch's work in tokens, whatever it holds, without waiting for a device.

    Packed samples count the square of their lengths, too; of other batches the largest tensor
    counts, whose size is proportional to the tokens.
    """
    if isinstance(batch, EmptyBatch):
        return 0.0
    if isinstance(batch, AssignedBatch):
        return sum(map(work_of, batch.microbatches))
    starts = getattr(batch, "cu_seqlens", None)
    if isinstance(starts, Tensor) and starts.device.type == "cpu":
        lengths = starts.diff().double()
        return float((lengths + QUADRATIC_WEIGHT * lengths.square()).sum())
    return float(max((tensor.numel() for tensor in tensors_of(_plain(batch))), default=1))


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch
