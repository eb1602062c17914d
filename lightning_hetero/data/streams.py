"""Draw iterations from a stream, of which only the samples read so far are known.

An iteration takes samples in the stream's order until the next one would exceed the budget.
Iterations are read ahead of training, so that they can be planned. To resume, the stream is read
from its start and consumed samples are dropped, which works with any number of ranks.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.data.order import Cursor, Drawn, checksum
from lightning_hetero.data.samples import OnOverlong, cut_sample, num_tokens, spans_of
from lightning_hetero.models.packing import token_ids


def is_stream(dataset: object) -> bool:
    """Return whether a dataset can only be read from its start."""
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or not sized


class StreamOrder:
    """The iterations of a stream, which every rank reads in the same order.

    Args:
        dataset: Yields the same samples on every rank, each time it is iterated; its `set_epoch`
            is called if it has one.
        tokens_per_step: Largest number of tokens of an iteration.
        context_length: Largest number of tokens of a sample.
        on_overlong: What to do with longer samples.
        min_samples: Least number of samples in an iteration, even above the budget.

    Raises:
        ConfigurationError: The stream can be read only once; while drawing, it is too short.
        BatchError: While drawing, a sample is too long and `on_overlong` is "refuse".
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        tokens_per_step: int,
        context_length: int,
        on_overlong: OnOverlong | str = OnOverlong.CUT,
        min_samples: int = 1,
    ) -> None:
        if isinstance(dataset, Iterator):
            raise ConfigurationError(
                f"The stream is a {type(dataset).__name__}, which can be read only once, but every "
                "epoch and every resumed run reads it from its start. Give what makes a new "
                "iterator each time, such as an IterableDataset."
            )
        self._dataset = dataset
        self._tokens_per_step = tokens_per_step
        self._context_length = context_length
        self._on_overlong = OnOverlong(on_overlong)
        self._min_samples = min_samples

    def draw(self, cursor: Cursor) -> Iterator[Drawn]:
        """Yield the iterations from a cursor to the end of its epoch."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(cursor.epoch)
        samples = islice(self._pieces(), cursor.num_samples, None)
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
        """Yield the samples of each iteration; too few at the end join the last one."""
        complete: list[Any] = []
        group: list[Any] = []
        tokens = 0
        for sample in samples:
            length = num_tokens(sample)
            if tokens + length > self._tokens_per_step and len(group) >= self._min_samples:
                if complete:
                    yield complete
                complete, group, tokens = group, [], 0
            group.append(sample)
            tokens += length
        if len(group) >= self._min_samples and complete:
            yield complete
            complete = []
        if complete or group:
            self._check_last(complete + group)
            yield complete + group

    def _check_last(self, group: list[Any]) -> None:
        if len(group) < self._min_samples:
            raise ConfigurationError(
                f"What is left of the stream are {len(group)} samples but an iteration needs "
                f"{self._min_samples}, one for each rank. Use fewer ranks or a longer stream."
            )

    def _pieces(self) -> Iterator[Any]:
        for index, sample in enumerate(self._dataset):
            length = num_tokens(sample)
            if length == 0:
                raise ConfigurationError(f"Sample {index} of the stream is empty; drop it.")
            for start, stop in spans_of(
                length, index, context_length=self._context_length, on_overlong=self._on_overlong
            ):
                yield cut_sample(sample, start, stop)


def _middle_token(sample: Any) -> Any:
    row = token_ids(sample)
    return row[len(row) // 2]
