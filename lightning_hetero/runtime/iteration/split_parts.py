"""What the check of `split_run` runs: a micro-batch and its halves, copied."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_hetero.core.errors import BatchError
from lightning_hetero.models.batches import concatenated, count_samples, cut_batch, sizes_of
from lightning_hetero.models.packing import PackedBatch, remember_packed
from lightning_hetero.runtime.unknown import tensors_in


def copy_of(part: Any) -> Any:
    """Return a deep copy of a batch, which a step may change in place.

    Its tensors are cloned by torch, on whatever device.
    """
    made = copy.deepcopy(part, {id(item): item.clone() for item in tensors_in(part)})
    if isinstance(made, PackedBatch):
        remember_packed(made.input_ids, made.cu_seqlens)
    return made


def parts_of(microbatches: Sequence[Any], attempt: int = 0) -> list[Any]:
    """Return a batch and its halves; empty if the batch can't be cut.

    The batch is the largest micro-batch; if each has one sample, two of them together; if there is
    only one sample, this sample twice, and a single half, since both are equal. A batch of two
    samples is followed by its first sample twice: this tells a sum from a sum of group means.

    Args:
        microbatches: Those of the iteration.
        attempt: 0 for the largest micro-batch, 1 for the next one, and so on, all in turn, since
            the halves of one may have equal shares of all that a mean may be over.
    """
    counts = [sizes_of(item)[0] for item in microbatches]
    order = sorted(range(len(counts)), key=lambda index: -counts[index])
    order = [index for index in order if counts[index]]
    if not order:
        return []
    first = attempt % len(order)
    chosen, *others = (microbatches[index] for index in (*order[first:], *order[:first]))
    try:
        if count_samples(chosen) > 1:
            parts = [chosen, *cut_batch(chosen, 2)]
            if count_samples(chosen) == 2:
                twice = concatenated([parts[1], parts[1]])
                parts += [] if twice is None else [twice]
        else:
            parts = _of_single(chosen, others)
    except BatchError:
        return []
    return [copy_of(part) for part in parts] if parts[0] is not None else []


def _of_single(chosen: Any, others: Sequence[Any]) -> list[Any]:
    for other in others[:1]:
        with suppress(BatchError):
            together = concatenated([chosen, other])
            if together is not None:
                return [together, chosen, other]
    return [concatenated([chosen, chosen]), chosen]
