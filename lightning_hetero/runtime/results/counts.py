"""Count the targets of a micro-batch, by which its loss is weighted.

A loss that is a mean is weighted by its micro-batch's number of targets, a sum has weight 1: only
then does a plan give the gradient of a single device. `split_check` measures which rule holds. To
count targets only the batch is read, never the step's code.
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.core.errors import BatchError
from lightning_hetero.core.reading import Choice
from lightning_hetero.models.batches import count_samples, tensors_of
from lightning_hetero.models.packing import IGNORED_LABEL

Count = Tensor | int | float
_NAMES = ("shift_labels", "labels", "label", "targets", "target", "y")
"""Names under which batches have targets, most likely first."""
_IGNORED = (IGNORED_LABEL, 0, -1, 1, 2)
"""Integers that losses ignore: torch's default, then usual ids of padding."""


class LossReduction(Choice):
    """How the loss of a training step reduces over its batch."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class Counting:
    """A way to count the targets of a micro-batch.

    `how` is one of: "module" (the module's `num_target_tokens`), "batch" (the batch's own count),
    "samples", "elements" (of a tensor), "kept" (a tensor's integers other than `ignored`), "sum"
    (of a mask or of weights).
    """

    how: str
    place: int = -1
    """Index of the counted tensor among the batch's tensors."""
    ignored: int = IGNORED_LABEL
    is_shifted: bool = False
    """Whether the first position of each row has no target, as in a loss of next tokens."""

    def __str__(self) -> str:
        tensor = f"tensor {self.place} of the batch" + (", shifted" if self.is_shifted else "")
        told = {
            "module": "num_target_tokens of the module",
            "batch": "target tokens of the batch",
            "samples": "samples",
            "elements": f"elements of {tensor}",
            "kept": f"values other than {self.ignored} in {tensor}",
            "sum": f"the sum of {tensor}",
        }
        return told[self.how]

    def of(self, microbatch: Any, by_module: Callable[[Any], Count] | None) -> Count:
        """Return the number of targets, as a tensor on the device if it is counted there."""
        if self.how == "module" and by_module is not None:
            return by_module(microbatch)
        if self.how == "batch" and (own := _own_count(microbatch)) is not None:
            return own
        tensors = tensors_of(microbatch) if self.place >= 0 else []
        if not 0 <= self.place < len(tensors):
            return _samples_of(microbatch)
        counted = tensors[self.place]
        counted = counted[..., 1:] if self.is_shifted and counted.ndim > 1 else counted
        if self.how == "kept":
            return (counted != self.ignored).sum()
        return counted.sum() if self.how == "sum" else counted.numel()

    @classmethod
    def usual(cls, microbatch: Any, by_module: Callable[[Any], Count] | None) -> "Counting":
        """Return the most likely way: the module's count, the batch's own, labels, or samples."""
        if by_module is not None:
            return cls("module")
        if _own_count(microbatch) is not None:
            return cls("batch")
        tensors = tensors_of(microbatch)
        labels = [item for name in _NAMES for item in _tensors_named(microbatch, name)][:1]
        labels = labels or list(filter(_holds_indices, tensors))[-1:]
        found = [i for i, item in enumerate(tensors) if labels and item is labels[0]]
        return cls("kept", found[0]) if found and _holds_indices(labels[0]) else cls("samples")

    @classmethod
    def likely(cls, microbatch: Any, by_module: Callable[[Any], Count] | None) -> list["Counting"]:
        """Return all ways to count the targets of a batch, most likely first."""
        found = [cls.usual(microbatch, by_module)]
        tensors = tensors_of(microbatch)
        places = list(reversed(range(len(tensors))))
        for ignored in _IGNORED:
            for place in places:
                if _holds_indices(tensors[place]):
                    found += _plain_and_shifted("kept", place, tensors[place], ignored)
            if ignored == IGNORED_LABEL:
                found += [item for at in places for item in _masks(at, tensors[at])]
                found.append(cls("samples"))
        found += [item for at in places for item in _plain_and_shifted("elements", at, tensors[at])]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class LossRule:
    """Whether the losses of training steps are sums, or means over what."""

    reduction: LossReduction
    counting: Counting

    def __str__(self) -> str:
        return "a sum" if self.is_sum else f"a mean over {self.counting}"

    @property
    def is_sum(self) -> bool:
        """Whether losses are added without weights."""
        return self.reduction is LossReduction.SUM


def as_weight(count: Count, device: torch.device) -> Tensor:
    """Return a number of targets as a float64 scalar on a device, without a sync."""
    if isinstance(count, Tensor):
        return count.detach().to(device, torch.float64).reshape(())
    return torch.tensor(float(count), dtype=torch.float64, device=device)


def _plain_and_shifted(
    how: str, place: int, tensor: Tensor, ignored: int = IGNORED_LABEL
) -> Iterator[Counting]:
    if tensor.ndim:
        yield Counting(how, place, ignored)
        if tensor.ndim > 1 and tensor.shape[-1] > 1:
            yield Counting(how, place, ignored, is_shifted=True)


def _masks(place: int, tensor: Tensor) -> Iterator[Counting]:
    """Yield ways to count by a tensor that may be a mask, or weights of samples or tokens."""
    is_mask = not tensor.dtype.is_complex and tensor.ndim in (1, 2) and bool((tensor >= 0).all())
    if is_mask:
        yield from _plain_and_shifted("sum", place, tensor)


def _holds_indices(tensor: Tensor) -> bool:
    return tensor.ndim > 0 and tensor.dtype in (torch.int64, torch.int32, torch.int16)


def _own_count(microbatch: Any) -> Count | None:
    for name in ("target_tokens", "num_target_tokens"):
        own = getattr(microbatch, name, None)
        if own is not None:
            known: Count = own() if callable(own) else own
            return known
    return None


def _samples_of(microbatch: Any) -> int:
    try:
        return count_samples(microbatch)
    except BatchError:
        return 1


def _tensors_named(microbatch: Any, name: str) -> list[Tensor]:
    items: Any = None
    if isinstance(microbatch, dict | UserDict):
        items = microbatch.get(name)
    elif is_dataclass(microbatch):
        items = getattr(microbatch, name, None)
    return [items] if isinstance(items, Tensor) else []
