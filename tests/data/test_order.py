"""Which samples an iteration takes, of datasets with lengths and of streams; samples cut to fit."""

from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import BatchError, ConfigurationError
from lightning_hetero.data.order import Cursor, EpochOrder
from lightning_hetero.data.samples import TokenSamples, cached_lengths, cut_sample, lengths_file
from lightning_hetero.data.streams import StreamOrder
from tests.data.rows import Rows, RowStream, indices, samples_of


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    lengths = draw(st.lists(st.integers(1, 100), min_size=1, max_size=60))
    budget = draw(st.integers(max(lengths), 5 * max(lengths)))
    least = draw(st.integers(1, min(4, len(lengths))))
    return EpochOrder(
        lengths, tokens_per_step=budget, seed=draw(st.integers(0, 5)), min_samples=least
    )


@settings(max_examples=200)
@given(orders(), st.integers(0, 3), st.data())
def test_an_epoch_takes_every_sample_once_and_goes_on_from_any_cut(order, epoch, data) -> None:
    drawn = list(islice(order.draw(Cursor(epoch=epoch)), len(order)))
    assert sorted(samples_of(drawn)) == list(range(len(order.lengths)))
    assert [item.is_last for item in drawn] == [False] * (len(order) - 1) + [True]
    for before, item in pairwise(drawn):
        assert item.before == before.after
    for item in drawn:
        assert item.lengths.tolist() == order.lengths[item.samples].tolist()
        assert len(item.samples) >= order._min_samples
    index = data.draw(st.integers(0, len(drawn) - 1))
    again = list(islice(order.draw(drawn[index].before), len(order) - index))
    assert [item.samples for item in again] == [item.samples for item in drawn[index:]]


@settings(max_examples=200)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 9))
def test_iterations_take_the_budget_on_average_and_differ_by_the_longest_sample(
    lengths, factor, seed
) -> None:
    budget = factor * max(lengths)
    order = EpochOrder(lengths, tokens_per_step=budget, seed=seed)
    even = sum(lengths) / len(order)
    assert even <= budget
    for item in islice(order.draw(Cursor()), len(order)):
        assert abs(int(item.lengths.sum()) - even) <= max(lengths)


@settings(max_examples=200)
@given(orders(), st.data())
def test_from_any_cursor_what_remains_is_what_was_not_consumed(order, data) -> None:
    cursor = Cursor(
        epoch=1,
        num_samples=data.draw(st.integers(0, order.num_samples)),
        num_iterations=data.draw(st.integers(0, len(order) + 1)),
    )
    rest = []
    for item in order.draw(cursor):
        if item.before.epoch != 1:
            break
        rest.append(item)
    assert samples_of(rest) == order.order(1)[cursor.num_samples :].tolist()


def stream_of(lengths: list[int], **options: Any) -> StreamOrder:
    return StreamOrder(RowStream(lengths), tokens_per_step=60, context_length=20, **options)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 4), st.data())
def test_a_stream_gives_every_sample_once_from_any_cursor(lengths, least, data) -> None:
    stream = stream_of(lengths, min_samples=least)
    if len(lengths) < least:
        with pytest.raises(ConfigurationError, match=r"left of the stream|0 samples"):
            list(stream.draw(Cursor()))
        return
    drawn = list(stream.draw(Cursor()))
    assert sorted(indices(samples_of(drawn))) == list(range(len(lengths)))
    for item in drawn:
        assert item.lengths.tolist() == [len(sample["input_ids"]) for sample in item.samples]
        assert len(item.samples) >= least
        assert least > 1 or item.lengths.sum() <= 60
    index = data.draw(st.integers(0, len(drawn)))
    rest = list(stream.draw([*[item.before for item in drawn], drawn[-1].after][index]))
    assert [indices(i.samples) for i in rest] == [indices(i.samples) for i in drawn[index:]]


def test_a_streams_dataset_is_told_the_epoch() -> None:
    class Told(RowStream):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    stream = StreamOrder(Told([5] * 50), tokens_per_step=60, context_length=20)
    assert all(list(stream.draw(Cursor(epoch=epoch))) for epoch in (0, 1))
    assert Told.epochs == [0, 1]


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from(["cut", "split"]),
)
def test_pieces_fit_the_context_and_hold_every_token_once_unless_it_is_cut_off(
    lengths, context, on_overlong
) -> None:
    """Datasets with lengths and streams are cut alike."""
    rows = Rows(lengths)
    pieces = TokenSamples(rows, lengths, context_length=context, on_overlong=on_overlong)
    found = [pieces[index]["input_ids"] for index in range(len(pieces))]
    assert [len(piece) for piece in found] == pieces.lengths.tolist()
    assert max(pieces.lengths) <= context
    kept = rows.rows if on_overlong == "split" else [row[:context] for row in rows.rows]
    assert torch.equal(torch.cat(found), torch.cat(kept))
    stream = StreamOrder(
        rows.rows, tokens_per_step=50, context_length=context, on_overlong=on_overlong
    )
    drawn = samples_of(list(stream.draw(Cursor())))
    assert all(map(torch.equal, drawn, found))


def test_a_sample_is_cut_with_all_that_goes_with_its_tokens() -> None:
    sample = {"input_ids": [1, 2, 3, 4], "labels": np.arange(4), "name": "abcd?", "weight": 2.0}
    cut = cut_sample(sample, 1, 3)
    assert (cut["input_ids"], cut["labels"].tolist()) == ([2, 3], [1, 2])
    assert (cut["name"], cut["weight"]) == ("abcd?", 2.0)
    assert cut_sample([1, 2, 3], 0, 2) == [1, 2]


def refused_samples(lengths: list[int]) -> TokenSamples:
    return TokenSamples(Rows(lengths), lengths, context_length=7, on_overlong="refuse")


def refused_stream(lengths: list[int]) -> list[Any]:
    rows = Rows(lengths).rows
    order = StreamOrder(rows, tokens_per_step=50, context_length=7, on_overlong="refuse")
    return list(order.draw(Cursor()))


def stream(rows: Any) -> StreamOrder:
    return StreamOrder(rows, tokens_per_step=9, context_length=5)


def samples(lengths: list[int]) -> TokenSamples:
    return TokenSamples(Rows([5, 6]), lengths, context_length=10)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: EpochOrder([10, 3], tokens_per_step=9), ConfigurationError, "sample has 10"),
        (lambda: EpochOrder([], tokens_per_step=9), ConfigurationError, "0 samples"),
        (lambda: refused_samples([3, 9]), BatchError, "Sample 1 has 9 tokens"),
        (lambda: refused_stream([8, 8]), BatchError, "Sample 0 has 8 tokens"),
        (lambda: samples([5, 7])[1], BatchError, "Sample 1 has 6 tokens but .* as 7"),
        (lambda: samples([5]), ConfigurationError, "2 samples"),
        (lambda: samples([5, 0]), ConfigurationError, "empty"),
        (lambda: stream(iter([[1, 2]])), ConfigurationError, "can be read only once"),
        (lambda: list(stream([[1], []]).draw(Cursor())), ConfigurationError, "Sample 1 .* empty"),
    ],
)
def test_impossible_data_is_refused_by_name(make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_lengths_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_CACHE", str(tmp_path))
    rows = Rows([4, 9, 2] * 200)
    assert cached_lengths(rows).tolist() == rows.lengths
    (file,) = tmp_path.iterdir()
    assert file == lengths_file(rows) != lengths_file(Rows([4, 9, 3] * 200))
    reads: list[int] = []
    original = Rows.__getitem__

    def counting(self: Rows, index: int) -> Any:
        reads.append(index)
        return original(self, index)

    monkeypatch.setattr(Rows, "__getitem__", counting)
    assert cached_lengths(rows).tolist() == rows.lengths
    assert len(reads) <= 64  # Some samples say which file it is.
    file.write_bytes(b"torn")
    assert cached_lengths(rows).tolist() == rows.lengths
