from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.data.order import Cursor, StreamOrder, is_stream
from lightning_hetero.data.samples import num_tokens
from tests.data.rows import Rows, RowStream, indices, samples_of


def order(lengths: list[int], **options: Any) -> StreamOrder:
    return StreamOrder(RowStream(lengths), tokens_per_step=60, context_length=20, **options)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 30), max_size=60),
    st.data(),
)
def test_a_stream_gives_every_sample_once_from_any_cursor(lengths, data) -> None:
    stream = order(lengths)
    if not lengths:
        with pytest.raises(ConfigurationError, match="0 samples"):
            list(stream.draw(Cursor()))
        return
    drawn = list(stream.draw(Cursor()))
    assert sorted(indices(samples_of(drawn))) == list(range(len(lengths)))
    assert all(item.lengths.sum() <= 60 for item in drawn)
    for item in drawn:
        assert item.lengths.tolist() == [num_tokens(sample) for sample in item.samples]
    index = data.draw(st.integers(0, len(drawn)))
    rest = list(stream.draw([*[item.before for item in drawn], drawn[-1].after][index]))
    assert [indices(i.samples) for i in rest] == [indices(i.samples) for i in drawn[index:]]


def test_the_dataset_is_told_the_epoch() -> None:
    class Told(RowStream):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = Told([5] * 50)
    stream = StreamOrder(dataset, tokens_per_step=60, context_length=20)
    for epoch in (0, 1):
        assert list(stream.draw(Cursor(epoch=epoch)))
    assert dataset.epochs == [0, 1]


def test_what_is_a_stream() -> None:
    assert is_stream(RowStream([3]))
    assert is_stream(iter([[1, 2]]))
    with pytest.raises(ConfigurationError, match="list_iterator, which can be read only once"):
        StreamOrder(iter([[1, 2]]), tokens_per_step=4, context_length=2)
    assert not is_stream(Rows([3]))
    with pytest.raises(ConfigurationError, match="a step must hold a context"):
        StreamOrder(RowStream([3]), tokens_per_step=4, context_length=5)
    with pytest.raises(ConfigurationError, match="Sample 1 of the stream is empty"):
        list(StreamOrder([[1], []], tokens_per_step=9, context_length=5).draw(Cursor()))
