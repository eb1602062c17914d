"""Count the samples, tokens and work of a batch of any type, and cut it into micro-batches.

A batch is cut along dim 0 of its tensors, whose size must be the number of samples in all of them.
Lists of that length are cut, too, and other values are passed to every micro-batch. Without tensors
the lists are counted, such as texts that the step tokenizes. The fields of
dataclasses and of `UserDict`s, such as the `BatchEncoding` of Hugging Face's collators, are cut in
the same way. A batch with a method `split(num_microbatches)`, such as `PackedBatch`, cuts itself.
"""

import zlib
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_hetero.core.errors import BatchError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.models.packing import QUADRATIC_WEIGHT


class EmptyBatch:
    """The batch of a rank that has no samples in an iteration but takes part in it."""

    def __repr__(self) -> str:
        return "EmptyBatch()"


@dataclass(frozen=True, kw_only=True)
class AssignedBatch:
    """One rank's part of an iteration whose samples were assigned ahead of time.

    The batch names its plan, so each iteration may run under another one.
    """

    plan: ParallelPlan
    """The plan that runs the iteration; the same on every rank."""
    microbatches: tuple[Any, ...]
    """The micro-batches of the rank's pipeline; none if it has no work or the rank is idle."""
    first_index: int
    """Index of the first of them among all pipelines' micro-batches, which seeds random numbers."""


class SplittableBatch(Protocol):
    """A batch that cuts itself into micro-batches."""

    @property
    def num_samples(self) -> int:
        """Number of samples in the batch."""

    def split(self, num_microbatches: int) -> Sequence[Any]:
        """Return at most `num_microbatches` parts that hold every sample once."""


def _is_splittable(batch: Any) -> TypeGuard[SplittableBatch]:
    # By attributes: isinstance() with a protocol would take longer than the rest of a cut.
    return hasattr(batch, "num_samples") and hasattr(batch, "split")


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        BatchError: Tensors differ in the size of dim 0, or, without any, lists in their lengths.
    """
    if isinstance(batch, EmptyBatch):
        return 0
    if type(batch) not in (list, tuple) and _is_splittable(batch):
        return batch.num_samples
    tensors = tensors_of(batch)
    sizes = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    sizes = sizes or {len(leaf) for leaf in _leaves(batch, _is_column) if _is_column(leaf)}
    if len(sizes) != 1:
        found = [tuple(tensor.shape) for tensor in tensors if tensor.ndim]
        raise BatchError(
            f"A batch of type {type(batch).__name__} can't be cut into micro-batches: its tensors "
            f"have shapes {found}, and dim 0 must be the same number of samples in all (without "
            "tensors, the lengths of lists). Return such tensors, or a batch with num_samples and "
            "split(num_microbatches)."
        )
    return sizes.pop()


def tensors_of(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch."""
    parts = [*batch.values()] if type(batch) is dict else batch
    if isinstance(parts, list | tuple) and all(type(part) is Tensor for part in parts):
        return [*parts]  # As most batches are: pytree would take ten times as long.
    return [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor)]


def _leaves(batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    for leaf in tree_flatten(batch, is_leaf)[0]:
        if type(leaf) is not Tensor and _has_fields(leaf):
            yield from _leaves(vars(leaf), is_leaf)
        else:
            yield leaf


def _is_column(value: Any) -> bool:
    """Whether a value of a batch without tensors has one entry per sample."""
    return isinstance(value, list) and not any(isinstance(i, Tensor | list | tuple) for i in value)


def _has_fields(leaf: Any) -> bool:
    """Whether a leaf is a dataclass or `UserDict`, into which pytree doesn't look."""
    holds = isinstance(leaf, UserDict) or (is_dataclass(leaf) and not isinstance(leaf, type))
    return holds and hasattr(leaf, "__dict__")


def sizes_of(microbatch: Any) -> tuple[int, int]:
    """Return (samples, tokens) of a micro-batch; 0 samples if they can't be counted.

    Without `num_tokens`, each sample counts as one token.
    """
    try:
        samples = count_samples(microbatch)
    except BatchError:
        samples = 0
    return samples, int(getattr(microbatch, "num_tokens", samples))


def epoch_weight(microbatch: Any, num_samples: int) -> int:
    """Return a micro-batch's weight in an epoch's mean: `num_target_tokens`, else its samples."""
    own = getattr(microbatch, "num_target_tokens", None)
    return num_samples if own is None or not isinstance(own, int) else int(own)


def cut_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Return at most `num_microbatches` parts; none if there are no samples.

    Their numbers of samples differ by one at most, unless the batch cuts itself.

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


def concatenated(batches: Sequence[Any]) -> Any:
    """Return one batch with the samples of several; None if it can't be made.

    Batches that cut themselves can be concatenated only if all are one that has `repeat(times)`.

    Raises:
        BatchError: Tensors differ in dims other than the first.
    """
    first = batches[0]
    if type(first) not in (list, tuple) and _is_splittable(first):
        repeat = getattr(first, "repeat", None)
        is_one = all(item is first for item in batches)
        return repeat(len(batches)) if repeat is not None and is_one else None

    def is_column(value: Any) -> bool:
        return isinstance(value, list) and not any(
            isinstance(item, Tensor) for item in tree_flatten(value)[0]
        )

    def together(values: Sequence[Any]) -> Any:
        value = values[0]
        if isinstance(value, Tensor) and value.ndim:
            if any(item.shape[1:] != value.shape[1:] for item in values):
                raise BatchError(f"Shapes {[tuple(item.shape) for item in values]} don't join.")
            return torch.cat(list(values))
        if is_column(value):
            return [item for column in values for item in column]
        if not _has_fields(value):
            return value
        made = copy(value)
        vars(made).update(concatenated([vars(item) for item in values]))
        return made

    forms = [tree_flatten(item, is_leaf=is_column) for item in batches]
    columns = zip(*(leaves for leaves, _ in forms), strict=True)
    return forms[0][1].unflatten([together(column) for column in columns])


def _parts(batch: Any, cuts: Sequence[int]) -> list[Any]:
    """Return the parts between cuts: indices of samples, from 0 to the number of samples."""

    def is_column(value: Any) -> bool:
        # A list with one entry per sample, such as texts; not a list that contains tensors.
        return (
            isinstance(value, list)
            and len(value) == cuts[-1]
            and not any(isinstance(item, Tensor) for item in tree_flatten(value)[0])
        )

    def parts_of(value: Any) -> list[Any]:
        if (isinstance(value, Tensor) and value.ndim) or is_column(value):
            parts = [value[start:stop] for start, stop in pairwise(cuts)]
            # A step may change its part in place; with views, autograd would see changes of all
            # parts.
            is_apart = isinstance(value, Tensor) and not value.requires_grad
            return [part.data for part in parts] if is_apart else parts
        if not _has_fields(value):
            return [value] * (len(cuts) - 1)
        parts = [copy(value) for _ in cuts[1:]]
        for part, fields in zip(parts, _parts(vars(value), cuts), strict=True):
            vars(part).update(fields)
        return parts

    leaves, form = tree_flatten(batch, is_leaf=is_column)
    columns = [parts_of(leaf) for leaf in leaves]
    return [form.unflatten([column[i] for column in columns]) for i in range(len(cuts) - 1)]


def fingerprint_of(parts: Sequence[Any]) -> int:
    """Return a checksum of a rank's batch or micro-batches, by which ranks compare them.

    It covers the number of parts, the shapes of all tensors of the first and last part and, of
    tensors on the CPU, the first 64 values.
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
    """Return the tokens of each sample, padding included; an empty list if no tokens are found."""
    if isinstance(batch, AssignedBatch):
        return [length for item in batch.microbatches for length in sample_lengths(item)]
    lengths = getattr(batch, "lengths", None)
    if lengths is not None:
        return [int(length) for length in lengths]
    tensors = [tensor for tensor in tensors_of(_plain(batch)) if tensor.ndim >= 2]
    tokens = [tensor for tensor in tensors if not tensor.is_floating_point()] or tensors
    return [] if not tokens else [tokens[0].shape[1]] * len(tokens[0])


def sample_tokens(sample: Any) -> int | None:
    """Return the tokens (or frames) of a dataset's sample by its tensors' shapes; None if none."""
    tensors = [leaf for leaf in tree_flatten(sample)[0] if isinstance(leaf, Tensor)]
    tokens = [item.shape[-1] for item in tensors if item.ndim and not item.is_floating_point()]
    frames = [len(item) for item in tensors if item.ndim == 2 and item.is_floating_point()]
    return max(tokens or frames, default=None)


def work_of(batch: Any) -> float:
    """Return an estimate of a batch's work, in tokens; never waits for a device.

    For packed samples with `cu_seqlens` on the CPU it includes attention's quadratic cost; for
    other batches it is the size of the largest tensor, which is proportional to the tokens.
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
