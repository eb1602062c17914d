"""Decide which samples an iteration takes, independently of its plan and the number of ranks.

An epoch is a seeded shuffle of all samples, cut into a fixed number of iterations of about equally
many tokens: `⌈all tokens / tokens_per_step⌉` of them, cut where the running sum of tokens comes
nearest to even parts. So an iteration has at most `tokens_per_step` tokens on average and differs
from the even part by less than the longest sample; no epoch has a small last iteration, and `len`
is the same in every epoch. A run's position is the number of samples consumed in that order: a
cursor, which depends neither on plans, nor on ranks or workers.

Of a stream only the samples read so far are known. They come in its order, and an iteration takes
them until the next would exceed the budget. Iterations are read ahead of the one that trains, so
that their lengths are known and they can be planned. To resume, the stream is read from its start
and consumed samples are dropped, which works alike on every topology.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import IterableDataset

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.data.samples import cut_sample, num_tokens
from lightning_hetero.models.packing import token_ids

__all__ = [
    "Cursor",
    "Drawn",
    "EpochOrder",
    "IterationSource",
    "Progress",
    "StreamOrder",
    "checksum",
    "is_stream",
]


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The position of a run in its data."""

    epoch: int = 0
    num_samples: int = 0
    """Samples of the epoch's order that are consumed."""
    num_iterations: int = 0
    """Iterations of the epoch that consumed them."""

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Build a cursor from its fields; CheckpointError if they aren't a cursor's."""
        try:
            return cls(
                epoch=int(data["epoch"]),
                num_samples=int(data["num_samples"]),
                num_iterations=int(data["num_iterations"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state of the data is {data!r}, not a cursor ({error!r}). It was saved by "
                "another data module."
            ) from error


class Progress:
    """The cursor of a run, with the identity of the order of samples that it counts in.

    Args:
        identity: Values that the order and its iterations depend on, such as the seed. A state
            with other values is refused, since its cursor counts other samples or iterations.
    """

    def __init__(self, **identity: int | bool) -> None:
        self._identity = identity
        self.cursor = Cursor()
        """The end of the last iteration that was handed out."""

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch=epoch)

    def end_epoch(self) -> None:
        """Move the cursor to the start of the next epoch."""
        self.cursor = Cursor(epoch=self.cursor.epoch + 1)

    def state_dict(self, cursor: Cursor | None = None) -> dict[str, Any]:
        """Return the cursor, or another one of the same order, with the identity of the order."""
        return {"order": dict(self._identity), "cursor": asdict(cursor or self.cursor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the cursor of a saved state.

        Raises:
            CheckpointError: The state was saved under another order or another budget of
                iterations, or by another data module.
        """
        found = state.get("order")
        if found != self._identity:
            raise CheckpointError(
                f"The data's position was saved for the order {found} but the order is "
                f"{self._identity} now, so samples would be lost or come twice, or iterations be "
                "cut elsewhere. Give the same seed, dataset, context_length and tokens_per_step, "
                "or start without the old position."
            )
        self.cursor = Cursor.from_dict(state.get("cursor"))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The samples of one iteration."""

    samples: Sequence[Any]
    """Indices of a map-style dataset, or the samples of a stream."""
    lengths: IntArray
    """Tokens of each sample."""
    before: Cursor
    after: Cursor
    checksum: int
    """Checksum of the samples, by which ranks notice that they have drawn different ones."""
    is_last: bool = False
    """Whether the epoch ends with it; always False for a stream, which can't tell."""


class IterationSource(Protocol):
    """A source of iterations; the same on every rank."""

    def draw(self, cursor: Cursor) -> Iterator[Drawn]:
        """Yield iterations from a cursor on, to the end of its epoch or endlessly."""


def checksum(*values: ArrayLike) -> int:
    """Return a checksum (CRC-32) of values, the same on all ranks with the same values."""
    result = 0
    for item in values:
        result = zlib.crc32(np.ascontiguousarray(item).tobytes(), result)
    return result


class EpochOrder:
    """The iterations of a dataset whose lengths are known.

    Args:
        lengths: Tokens of each sample.
        tokens_per_step: Tokens of an iteration, on average; at least those of the longest sample.
        seed: Seed of the shuffle.
        shuffle: Whether to shuffle every epoch; else samples keep their order.

    Raises:
        ConfigurationError: A budget below the longest sample, or no samples.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        tokens_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.lengths: IntArray = np.asarray(lengths, dtype=np.int64)
        longest = int(self.lengths.max(initial=0))
        if tokens_per_step < max(longest, 1):
            raise ConfigurationError(
                f"tokens_per_step is {tokens_per_step} but the longest sample has {longest} "
                "tokens. Allow at least as many tokens an iteration, or a smaller context_length."
            )
        if not len(self.lengths):
            raise ConfigurationError("The dataset has 0 samples; give at least one.")
        wanted = -(-int(self.lengths.sum()) // tokens_per_step)
        self._num_iterations = min(wanted, len(self.lengths))
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        """Return the number of iterations of every epoch."""
        return self._num_iterations

    @property
    def num_samples(self) -> int:
        """Number of samples of every epoch."""
        return len(self.lengths)

    def order(self, epoch: int) -> IntArray:
        """Return the indices of an epoch's samples in order, [num_samples]."""
        if not self._shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_samples)

    def draw(self, cursor: Cursor) -> Iterator[Drawn]:
        """Yield iterations from a cursor on, one epoch after the other, endlessly."""
        while True:
            yield from self._draw_epoch(cursor)
            cursor = Cursor(epoch=cursor.epoch + 1)

    def _draw_epoch(self, cursor: Cursor) -> Iterator[Drawn]:
        order = self.order(cursor.epoch)
        stops = self._stops(order, cursor)
        before = cursor
        for done, stop in enumerate(stops.tolist(), start=cursor.num_iterations + 1):
            after = Cursor(epoch=cursor.epoch, num_samples=stop, num_iterations=done)
            samples = order[before.num_samples : stop]
            yield Drawn(
                samples=samples.tolist(),
                lengths=self.lengths[samples],
                before=before,
                after=after,
                checksum=checksum(self.lengths[samples], samples),
                is_last=stop == self.num_samples,
            )
            before = after

    def _stops(self, order: IntArray, cursor: Cursor) -> IntArray:
        """Return the ends of the iterations after a cursor, in samples; the last ends the epoch."""
        count = len(self)
        left = count - cursor.num_iterations
        if cursor.num_samples >= self.num_samples:
            return np.zeros(0, dtype=np.int64)
        if left < 1:
            # Saved on fewer ranks, when an epoch had more iterations: the rest becomes one more.
            return np.array([self.num_samples])
        sums = np.concatenate([[0], np.cumsum(self.lengths[order])])
        number = np.arange(cursor.num_iterations + 1, count + 1)
        targets = number * (sums[-1] / count)
        above = np.searchsorted(sums, targets).clip(1, self.num_samples)
        nearest = above - (targets - sums[above - 1] < sums[above] - targets)
        # Forwards, then backwards: a sample before each cut, and one left after it.
        step = np.arange(1, left + 1)
        stops = np.maximum(np.maximum.accumulate(nearest - step), cursor.num_samples) + step
        stops = np.minimum(stops, self.num_samples - (left - step))
        stops[-1] = self.num_samples
        return stops[stops > cursor.num_samples]


def is_stream(dataset: object) -> bool:
    """Return whether a dataset can only be read from its start."""
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or not sized


class StreamOrder:
    """The iterations of a stream, which every rank reads in the same order.

    Args:
        dataset: Yields the same samples on every rank, each time it is iterated; its `set_epoch`
            is called if it has one.
        tokens_per_step: Most tokens of an iteration.
        context_length: Most tokens of a sample; the rest of longer ones is cut off.

    Raises:
        ConfigurationError: A number is out of range; while drawing, the stream is empty.
    """

    def __init__(
        self, dataset: Iterable[Any], *, tokens_per_step: int, context_length: int
    ) -> None:
        if not 1 <= context_length <= tokens_per_step:
            raise ConfigurationError(
                f"A stream has context_length {context_length} and tokens_per_step "
                f"{tokens_per_step}; a step must hold a context of 1 or more."
            )
        if isinstance(dataset, Iterator):
            raise ConfigurationError(
                f"The stream is a {type(dataset).__name__}, which can be read only once, but every "
                "epoch and every resumed run reads it from its start. Give what makes a new "
                "iterator each time, such as an IterableDataset."
            )
        self._dataset = dataset
        self._tokens_per_step = tokens_per_step
        self._context_length = context_length

    def draw(self, cursor: Cursor) -> Iterator[Drawn]:
        """Yield the iterations from a cursor to the end of its epoch."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(cursor.epoch)
        samples = islice(self._cut_samples(), cursor.num_samples, None)
        before = cursor
        for group in self._groups(samples):
            after = Cursor(
                epoch=cursor.epoch,
                num_samples=before.num_samples + len(group),
                num_iterations=before.num_iterations + 1,
            )
            lengths = np.array([num_tokens(sample) for sample in group], dtype=np.int64)
            yield Drawn(
                samples=group,
                lengths=lengths,
                before=before,
                after=after,
                checksum=checksum(lengths, [_middle_token(sample) for sample in group]),
            )
            before = after
        if not before.num_samples:
            raise ConfigurationError("The stream has 0 samples; give at least one.")

    def _groups(self, samples: Iterator[Any]) -> Iterator[list[Any]]:
        """Yield the samples of each iteration."""
        group: list[Any] = []
        tokens = 0
        for sample in samples:
            length = num_tokens(sample)
            if group and tokens + length > self._tokens_per_step:
                yield group
                group, tokens = [], 0
            group.append(sample)
            tokens += length
        if group:
            yield group

    def _cut_samples(self) -> Iterator[Any]:
        for index, sample in enumerate(self._dataset):
            if num_tokens(sample) == 0:
                raise ConfigurationError(f"Sample {index} of the stream is empty; drop it.")
            yield cut_sample(sample, self._context_length)


def _middle_token(sample: Any) -> Any:
    row = token_ids(sample)
    return row[len(row) // 2]
