"""Decide which samples an iteration takes, independently of its plan and the number of ranks.

An epoch is a seeded shuffle of all samples, cut into a fixed number of iterations with about the
same number of tokens. There are ⌈all tokens / tokens_per_step⌉ of them, cut where the running sum
of tokens is nearest to even parts. So an iteration has at most `tokens_per_step` tokens on average,
and differs from the even part by less than the longest sample; no epoch has a small last iteration,
and `len` is the same in every epoch. A run's position is the number of samples consumed in that
order: a *cursor*, which depends neither on plans nor on ranks or workers.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.core.reading import build, readable


@readable
class Cursor:
    """The position of a run in its data."""

    epoch: int = 0
    num_samples: int = 0
    """Samples of the epoch's order that are consumed."""
    num_iterations: int = 0
    """Iterations of the epoch that consumed them."""


class Progress:
    """The cursor of a run, with the identity of the order of samples that it counts in.

    Args:
        identity: Values that the order and its iterations depend on, such as the seed. A state with
            other values is refused, because its cursor counts other samples or iterations.
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
        """Return the cursor (or another one of the same order), and the identity of the order."""
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
        self.cursor = build(Cursor, state.get("cursor"), "cursor", CheckpointError)


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
    """Whether it is the epoch's last; always False for a stream, which doesn't know."""


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
        min_samples: Least number of samples in an iteration.

    Raises:
        ConfigurationError: A budget below the longest sample, or too few samples.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        tokens_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        min_samples: int = 1,
    ) -> None:
        self.lengths: IntArray = np.asarray(lengths, dtype=np.int64)
        longest = int(self.lengths.max(initial=0))
        if tokens_per_step < max(longest, 1):
            raise ConfigurationError(
                f"tokens_per_step is {tokens_per_step} but the longest sample has {longest} "
                "tokens. Allow at least as many tokens an iteration, or a smaller context_length."
            )
        if len(self.lengths) < max(min_samples, 1):
            raise ConfigurationError(
                f"The dataset has {len(self.lengths)} samples but an iteration needs at least "
                f"{max(min_samples, 1)}, one for each rank. Use fewer ranks or more samples."
            )
        wanted = -(-int(self.lengths.sum()) // tokens_per_step)
        self._num_iterations = min(wanted, len(self.lengths) // max(min_samples, 1))
        self._min_samples = min_samples
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
        count, least = len(self), self._min_samples
        left = count - cursor.num_iterations
        if cursor.num_samples >= self.num_samples:
            return np.zeros(0, dtype=np.int64)
        if left < 1:
            # Saved on fewer ranks, when an epoch had more iterations: the rest becomes one more
            # iteration.
            return np.array([self.num_samples])
        sums = np.concatenate([[0], np.cumsum(self.lengths[order])])
        number = np.arange(cursor.num_iterations + 1, count + 1)
        targets = number * (sums[-1] / count)
        above = np.searchsorted(sums, targets).clip(1, self.num_samples)
        nearest = above - (targets - sums[above - 1] < sums[above] - targets)
        # Forwards, then backwards: leave enough samples before each cut, and after it.
        step = np.arange(1, left + 1) * least
        stops = np.maximum(np.maximum.accumulate(nearest - step), cursor.num_samples) + step
        stops = np.minimum(stops, self.num_samples - (left * least - step))
        stops[-1] = self.num_samples
        return stops[stops > cursor.num_samples]
