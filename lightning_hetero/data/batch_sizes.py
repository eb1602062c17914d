"""Find out how much an iteration has to do, before the first batch is there.

Looked at, in order: attributes of the loader, of its dataset, of the data module and of the module
(and of their `hparams`), then the first sample of a dataset that can be indexed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

__all__ = ["BatchSizes", "find_batch_sizes"]

_BATCH_NAMES = ("batch_size", "train_batch_size", "per_device_train_batch_size")
_LENGTH_NAMES = (
    "context_length",
    "sequence_length",
    "seq_length",
    "seq_len",
    "max_seq_length",
    "max_length",
    "block_size",
)


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """What was found; None where nothing says."""

    samples: int | None
    """Samples of a loader's batch."""
    sequence_length: int | None
    """Tokens of a sample."""


def find_batch_sizes(sources: Sequence[object]) -> BatchSizes:
    """Return batch size and sequence length from loaders, data modules and modules.

    Args:
        sources: Where to look, the likeliest first; a loader's dataset is looked at too.
    """
    expanded = list(_expand(sources))
    return BatchSizes(
        samples=_first_number(expanded, _BATCH_NAMES),
        sequence_length=_first_number(expanded, _LENGTH_NAMES) or _sample_length(expanded),
    )


def _expand(sources: Iterable[object]) -> Iterator[object]:
    for source in sources:
        yield source
        for name in ("batch_sampler", "dataset", "hparams", "config"):
            inner = getattr(source, name, None)
            if inner is not None:
                yield inner


def _first_number(sources: Sequence[object], names: Sequence[str]) -> int | None:
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _sample_length(sources: Sequence[object]) -> int | None:
    for source in sources:
        dataset: Any = getattr(source, "dataset", None)
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            continue
        try:
            leaves = tree_flatten(dataset[0])[0]
        except Exception:
            # A guess must not end a run that would go well.
            continue
        tokens = [
            leaf.shape[-1]
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.ndim and not leaf.is_floating_point()
        ]
        frames = [
            leaf.shape[0]
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.ndim == 2 and leaf.is_floating_point()
        ]
        if tokens or frames:
            return int(max(tokens or frames))
    return None
