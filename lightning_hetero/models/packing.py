"""Pack samples into a batch, cut a packed batch into micro-batches, and the loss of packed samples.

Samples are stored end to end; `cu_seqlens` has their boundaries (a micro-batch of Hydraulis, §6.1).
`PackedBatch.split` is for ordinary DataLoaders: it balances costs, longest samples first (LPT). The
two-stage assignment to pipelines and devices is in `assign` and `data`.

The runtime weights micro-batches by their target tokens. If the loss is a mean over these tokens,
every plan gives the gradient that a single device would compute.

A model that gets only token ids (`model(input_ids=...)`) can't tell packed samples from a single
one, and must refuse them. So the memory addresses of packed ids are remembered: a view of the ids
has the same address.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_hetero.core.errors import BatchError

IGNORED_LABEL = -100
"""Label of positions without a target, which don't count in the loss."""
_CHUNK_TOKENS = 1024
QUADRATIC_WEIGHT = 1 / 12_288
"""Cost of a token's attention to one other token, relative to its matrix products.

It is 1 / (12 · hidden_size), with the hidden_size of 1,024 that is assumed for unknown models.
"""


_MODEL_INPUTS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    # Causal models shift `labels` but not `shift_labels`; masked models take only `labels`.
    "labels": "labels",
    "shift_labels": "labels",
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "max_length_q": "max_seqlen",
    "max_length_k": "max_seqlen",
}
"""Arguments of Hugging Face models, each with the field of a batch that it is."""


# Not frozen: Lightning's own bf16 precision converts a copy of the batch field by field.
@dataclass(kw_only=True)
class PackedBatch:
    """Samples end to end, T tokens in total; Lightning and DataLoader move it like a tensor.

    It is also the mapping that a Hugging Face model takes, one row of T tokens::

        loss = model(**batch).loss       # after use_packed_attention(model)
        logits = model(**batch).logits   # (1, T, vocabulary)
        batch["labels"]                  # (1, T): shifted already, at the place of their logits
    """

    input_ids: Tensor
    """Token ids, int64, (T,)."""
    labels: Tensor
    """The next token of the same sample, -100 if there is none; int64, (T,)."""
    position_ids: Tensor
    """Each token's place in its own sample, int64, (T,)."""
    cu_seqlens: Tensor
    """Starts of the samples, and the end of the last one, int32, (samples + 1,)."""
    max_seqlen: int
    """Tokens of the longest sample."""

    def __post_init__(self) -> None:
        # So that a model that gets only these ids can be refused: they are several samples.
        remember_packed(self.input_ids, self.cu_seqlens)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, targets or not."""
        return len(self.input_ids)

    @property
    def target_tokens(self) -> Tensor:
        """Number of labels that count in the loss: a scalar on their device, without a sync."""
        return (self.labels != IGNORED_LABEL).sum()

    @cached_property
    def num_target_tokens(self) -> int:
        """Number of labels that count in the loss, counted once; `to` keeps it."""
        return int(self.target_tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample; waits for the device if the batch is on one."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths

    def keys(self) -> tuple[str, ...]:
        """Return the names of a Hugging Face model's arguments."""
        return (*_MODEL_INPUTS, "use_cache")

    def __getitem__(self, name: str) -> Any:
        """Return an argument of a Hugging Face model; tensors with a value per token are (1, T).

        Raises:
            BatchError: There is no argument of that name.
        """
        if name == "use_cache":
            return False
        if name in _MODEL_INPUTS:
            value = getattr(self, _MODEL_INPUTS[name])
            has_tokens = isinstance(value, Tensor) and value is not self.cu_seqlens
            return value[None] if has_tokens else value
        mask = " It has no padding, so it needs no mask." if name == "attention_mask" else ""
        raise BatchError(f"A packed batch has no {name!r} but {', '.join(self.keys())}.{mask}")

    def items(self) -> list[tuple[str, Any]]:
        """Return names and values of a Hugging Face model's arguments."""
        return [(name, self[name]) for name in self.keys()]

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Return the batch on `device`; keywords go to `Tensor.to`, such as `non_blocking`."""
        moved = self._with_each(lambda tensor: tensor.to(device, **kwargs))
        # Counted before the labels leave the host: on the device it would need a sync.
        vars(moved)["num_target_tokens"] = self.num_target_tokens
        return moved

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory; called by a DataLoader with `pin_memory=True`."""
        return self._with_each(Tensor.pin_memory)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy of the batch, with `change` applied to each of its tensors."""
        names = ("input_ids", "labels", "position_ids", "cu_seqlens")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)

    def split(
        self, num_microbatches: int, *, quadratic_weight: float = QUADRATIC_WEIGHT
    ) -> list[Self]:
        """Return at most `num_microbatches` batches of whole samples, about equal in cost.

        Samples are distributed longest first, each to the micro-batch with the least cost so far.
        Inside a micro-batch they keep their order; micro-batches are ordered by their first sample.
        The result is deterministic. If there are fewer samples than wanted parts, there are fewer
        parts.

        Args:
            num_microbatches: Wanted number, at least 1.
            quadratic_weight: a in a sample's cost l + a · l²; for a LLaMA-like model about
                1 / (12 · hidden_size).

        Raises:
            BatchError: `num_microbatches` is below 1.
        """
        if num_microbatches < 1:
            raise BatchError(
                f"A batch can't be cut into {num_microbatches} micro-batches. Ask for at least 1."
            )
        if num_microbatches == 1 or self.num_samples <= 1:
            return [self]
        costs = [length + quadratic_weight * length * length for length in self.lengths]
        return [self._select(group) for group in _even_groups(costs, num_microbatches)]

    def repeat(self, times: int) -> Self:
        """Return a batch that holds all samples several times; see `batches.concatenated`."""
        return self._select([*range(self.num_samples)] * times)

    def _select(self, samples: Sequence[int]) -> Self:
        offsets: list[int] = self.cu_seqlens.tolist()
        spans = [slice(offsets[index], offsets[index + 1]) for index in samples]
        lengths = [span.stop - span.start for span in spans]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids[span] for span in spans]),
            labels=torch.cat([self.labels[span] for span in spans]),
            position_ids=torch.cat([self.position_ids[span] for span in spans]),
            cu_seqlens=_cumulative(lengths).to(self.cu_seqlens.device),
            max_seqlen=max(lengths),
        )


def pack_samples(samples: Iterable[Any]) -> PackedBatch:
    """Pack samples end to end, with labels that never cross the border of a sample.

    It is also the `collate_fn` of a DataLoader.

    Args:
        samples: Token ids of each sample, as a tensor, an array, a list of integers, or a mapping
            that has one of these as "input_ids". If it has "labels", these must be one for each
            token (the token itself, or -100 if it isn't a target, as for Hugging Face); they are
            shifted here.

    Raises:
        BatchError: There are no samples, or one is empty or not one-dimensional integers.
    """
    rows, targets = [], []
    for index, sample in enumerate(samples):
        rows.append(row_of(token_ids(sample, f"Sample {index}"), f"Sample {index}"))
        targets.append(_own_labels(sample, index, rows[-1]))
    if not rows:
        raise BatchError("There are no samples to pack. Give at least one.")
    lengths = [len(row) for row in rows]
    cu_seqlens = _cumulative(lengths)
    input_ids = torch.cat(rows)
    labels = torch.cat(targets).roll(-1)
    labels[cu_seqlens[1:] - 1] = IGNORED_LABEL
    return PackedBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
    )


def token_ids(sample: Any, name: str = "A sample") -> Any:
    """Return a sample's token ids: its "input_ids" if it is a mapping, else the sample itself.

    Raises:
        BatchError: A mapping has no "input_ids"; the message calls the sample by `name`.
    """
    if not isinstance(sample, Mapping):
        return sample
    if "input_ids" not in sample:
        raise BatchError(
            f"{name} has {', '.join(map(repr, sample)) or 'nothing'}, but no 'input_ids'. "
            "Tokenise it, or give its token ids that name."
        )
    return sample["input_ids"]


def row_of(values: Any, name: str) -> Tensor:
    """Return token ids as one row, int64, (tokens,).

    Raises:
        BatchError: They aren't one row of integers, or are empty; the message calls them `name`.
    """
    if isinstance(values, Tensor):
        row = values
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "iub":
            raise BatchError(f"{name} holds {array.dtype} values, not token ids. Give integers.")
        row = torch.from_numpy(array.astype(np.int64))
    if row.is_floating_point() or row.dim() != 1 or row.numel() == 0:
        raise BatchError(
            f"{name} has shape {tuple(row.shape)} and dtype {row.dtype}; a sample must be "
            "a row of at least one integer. Drop it or tokenise it."
        )
    return row.to(torch.int64)


def _own_labels(sample: Any, index: int, row: Tensor) -> Tensor:
    """Return a sample's labels, not shifted yet: its own, else its tokens."""
    if not isinstance(sample, Mapping) or "labels" not in sample:
        return row
    labels = row_of(sample["labels"], f"Sample {index}")
    if len(labels) != len(sample["input_ids"]):
        raise BatchError(
            f"Sample {index} has {len(sample['input_ids'])} tokens but {len(labels)} labels. Give "
            "one label for each token, -100 if it isn't a target."
        )
    return labels


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)


def _even_groups(costs: Sequence[float], num_groups: int) -> list[list[int]]:
    """Return indices in groups of about equal cost; no group is empty, each is ascending."""
    heap = [(0.0, group) for group in range(min(num_groups, len(costs)))]
    groups: list[list[int]] = [[] for _ in heap]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, group = heapq.heappop(heap)
        groups[group].append(index)
        heapq.heappush(heap, (total + costs[index], group))
    return sorted(sorted(group) for group in groups)


_ids_at: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Token ids of packed batches that are still alive, by the address of their memory."""
_borders_of = WeakTensorKeyDictionary()
"""The `cu_seqlens` of these token ids."""


def remember_packed(input_ids: Tensor, cu_seqlens: Tensor) -> None:
    """Remember token ids as packed, for `num_samples_seen`, as long as the tensor exists.

    Args:
        input_ids: Samples end to end, (T,).
        cu_seqlens: Starts of the samples, and the end of the last one, (samples + 1,).
    """
    if type(input_ids) is Tensor and not input_ids.is_meta:
        _ids_at[input_ids.untyped_storage().data_ptr()] = input_ids
        _borders_of[input_ids] = cu_seqlens


def num_samples_seen(ids: object) -> int:
    """Return how many packed samples token ids, or a view of them, span; 1 if not packed.

    Waits for the device if they are packed and on one.
    """
    if type(ids) is not Tensor or ids.is_meta:
        return 1
    known = _ids_at.get(ids.untyped_storage().data_ptr())
    if known is None:
        return 1
    start = ids.storage_offset() - known.storage_offset()
    starts: list[int] = _borders_of[known][:-1].tolist()
    return 1 + sum(start < border < start + ids.numel() for border in starts)


def packed_cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the mean cross entropy over labels that aren't ignored, in fp32; 0 if there are none.

    16-bit logits are converted to fp32 a chunk of tokens at a time, and again in backward, so there
    is never an fp32 copy of all logits.

    Args:
        logits_TV: Scores, (T, vocabulary).
        labels_T: Targets, shifted already, (T,); `IGNORED_LABEL` for tokens without one.
    """
    if logits_TV.dtype in (torch.float16, torch.bfloat16):
        pieces = (torch.split(tensor, _CHUNK_TOKENS) for tensor in (logits_TV, labels_T))
        parts = [
            checkpoint(_sum_fp32, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*pieces, strict=True)
        ]
        total = torch.stack(parts).sum()
    else:
        total = _sum_fp32(logits_TV, labels_T)
    return total / (labels_T != IGNORED_LABEL).sum().clamp(min=1)


def _sum_fp32(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=IGNORED_LABEL)
