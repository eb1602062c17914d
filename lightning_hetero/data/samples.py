"""Samples of token ids as pieces that fit the context: longer ones are cut, split or refused.

A dataset's sample is a row of token ids (tensor, array or list), or a mapping that has one as
"input_ids"; its other entries of the same length (labels, masks) are cut in the same way. All other
modules count pieces: a sample that is split counts as several.

The lengths of a dataset's samples are read once and cached in a file. Its name is a digest of the
dataset's type and size and of some samples' tokens, so that different datasets have different
files. If two datasets share one all the same, a sample whose length isn't the cached one raises an
error when it is read; it is never assigned wrongly.
"""

import contextlib
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import BatchError, ConfigurationError, ModelError
from lightning_hetero.core.process import cache_folder, write_whole
from lightning_hetero.core.reading import Choice
from lightning_hetero.models.packing import row_of, token_ids

_NUM_PROBES = 64


class OnOverlong(Choice):
    """What to do with a sample that is longer than the context."""

    CUT = "cut"
    """Keep only its first tokens."""
    SPLIT = "split"
    """Split it into several samples."""
    REFUSE = "refuse"
    """Raise an error that names it."""


class TokenSamples:
    """The pieces of a map-style dataset.

    Args:
        dataset: Anything with `len` and integer indices.
        lengths: Tokens of each sample; checked when a sample is read.
        context_length: Largest number of tokens of a piece.
        on_overlong: What to do with longer samples.

    Raises:
        ConfigurationError: Lengths don't match the dataset, or a sample is empty.
        BatchError: A sample is too long and `on_overlong` is "refuse".
    """

    def __init__(
        self,
        dataset: Any,
        lengths: ArrayLike,
        *,
        context_length: int,
        on_overlong: OnOverlong | str = OnOverlong.CUT,
    ) -> None:
        self.dataset = dataset
        self._whole = _checked(lengths, len(dataset))
        action = OnOverlong(on_overlong)
        if action is OnOverlong.REFUSE:
            longest = int(self._whole.argmax())
            spans_of(
                int(self._whole[longest]),
                longest,
                context_length=context_length,
                on_overlong=action,
            )
        counts = -(-self._whole // context_length)
        if action is not OnOverlong.SPLIT:
            counts = np.ones_like(counts)
        self._sample_of = np.repeat(np.arange(len(self._whole)), counts)
        number = np.arange(len(self._sample_of)) - (np.cumsum(counts) - counts)[self._sample_of]
        self._starts: IntArray = number * context_length
        left = self._whole[self._sample_of] - self._starts
        self.lengths: IntArray = np.minimum(left, context_length)
        """Tokens of each piece."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        """Return a piece, of the same type as its sample.

        Raises:
            BatchError: The sample has another length than `lengths` says.
        """
        sample_index, start = int(self._sample_of[index]), int(self._starts[index])
        sample = self.dataset[sample_index]
        found, expected = num_tokens(sample), int(self._whole[sample_index])
        if found != expected:
            raise BatchError(
                f"Sample {sample_index} has {found} tokens but its length is known as {expected}. "
                "Give the dataset's true lengths, or delete the file that they were cached in."
            )
        return cut_sample(sample, start, start + int(self.lengths[index]))


def num_tokens(sample: Any) -> int:
    """Return the number of tokens of a sample."""
    return len(token_ids(sample))


def cut_sample(sample: Any, start: int, stop: int) -> Any:
    """Return tokens [start, stop) of a sample, and that part of its entries of equal length."""
    length = num_tokens(sample)
    if (start, stop) == (0, length):
        return sample
    if not isinstance(sample, Mapping):
        return sample[start:stop]
    return {
        key: value[start:stop] if _is_row(value) and len(value) == length else value
        for key, value in sample.items()
    }


def spans_of(
    length: int, index: int, *, context_length: int, on_overlong: OnOverlong
) -> list[tuple[int, int]]:
    """Return (start, stop) of a sample's pieces; BatchError if it is too long and refused."""
    if length > context_length and on_overlong is OnOverlong.REFUSE:
        raise BatchError(
            f"Sample {index} has {length} tokens but context_length is {context_length} and "
            'on_overlong is "refuse". Drop it, or choose on_overlong="cut" or "split".'
        )
    last = length if on_overlong is OnOverlong.SPLIT else min(length, context_length)
    return [(start, min(start + context_length, last)) for start in range(0, last, context_length)]


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _checked(lengths: ArrayLike, num_samples: int) -> IntArray:
    if num_samples == 0:
        raise ConfigurationError("The dataset has 0 samples; give at least one.")
    array = np.asarray(lengths)
    if array.shape != (num_samples,) or not np.issubdtype(array.dtype, np.integer):
        raise ConfigurationError(
            f"Lengths have shape {array.shape} and type {array.dtype} but the dataset has "
            f"{num_samples} samples; give one integer for each."
        )
    if array.min() < 1:
        raise ConfigurationError(
            f"Sample {int(array.argmin())} is empty; drop it from the dataset."
        )
    return array.astype(np.int64)


def cached_lengths(dataset: Any) -> IntArray:
    """Return a map-style dataset's lengths from their file; or read them and write the file."""
    path = lengths_file(dataset)
    with contextlib.suppress(OSError, ValueError):
        found: IntArray = np.load(path, allow_pickle=False)
        if found.shape == (len(dataset),):
            return found
    lengths = np.array([num_tokens(dataset[i]) for i in range(len(dataset))], dtype=np.int64)
    # If the folder can't be written, the next run reads the samples again.
    with contextlib.suppress(OSError):
        write_whole(path, lambda file: np.save(file, lengths))
    return lengths


def lengths_file(dataset: Any) -> Path:
    """Return the file that holds a dataset's lengths by default."""
    count = len(dataset)
    digest = hashlib.sha256(f"{type(dataset).__qualname__} {count}".encode())
    for index in sorted({count * probe // _NUM_PROBES for probe in range(_NUM_PROBES)} - {count}):
        name = f"Sample {index}"
        digest.update(row_of(token_ids(dataset[index], name), name).numpy().tobytes())
    return cache_folder() / f"lengths-{digest.hexdigest()[:32]}.npy"


def as_is(item: Any) -> Any:
    """Return the argument: the collate function of loaders that pass samples on unchanged."""
    return item


def let_models_attend_packed(module: nn.Module) -> None:
    """Call `use_packed_attention` on the Hugging Face models inside a module that need it.

    Transformers isn't imported here first.

    Raises:
        ModelError: A model can't be set up: samples packed together would see each other.
    """
    # Every Hugging Face model's own module imports transformers: without it there is none.
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from lightning_hetero.models.huggingface import use_packed_attention
    from lightning_hetero.models.huggingface.packed import attends_packed

    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or attends_packed(model):
            continue
        try:
            use_packed_attention(model)
        except ModelError as error:
            raise ModelError(
                f"HeteroDataModule packs samples end to end. {error} Give the data module a "
                "`collate` that pads them."
            ) from error
