from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import BatchError, ConfigurationError
from lightning_hetero.data.samples import (
    OnOverlong,
    TokenSamples,
    cached_lengths,
    cut_sample,
    lengths_file,
    read_lengths,
    spans_of,
)
from lightning_hetero.data.streaming import StreamOrder
from tests.data.rows import Rows


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 12))
def test_split_pieces_hold_every_token_once_and_none_is_too_long(lengths, context) -> None:
    rows = Rows(lengths)
    pieces = TokenSamples(rows, lengths, context_length=context, on_overlong="split")
    found = [pieces[index] for index in range(len(pieces))]
    assert [len(piece["input_ids"]) for piece in found] == pieces.lengths.tolist()
    assert max(pieces.lengths) <= context
    assert torch.equal(torch.cat([p["input_ids"] for p in found]), torch.cat(rows.rows))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 50), st.integers(1, 12), st.sampled_from(["cut", "split"]))
def test_streams_and_indexed_datasets_are_cut_alike(length, context, action) -> None:
    pieces = TokenSamples(Rows([length]), [length], context_length=context, on_overlong=action)
    spans = spans_of(length, 0, context_length=context, on_overlong=OnOverlong(action))
    assert [stop - start for start, stop in spans] == pieces.lengths.tolist()


def test_long_samples_are_cut_with_all_that_goes_with_their_tokens() -> None:
    sample = {"input_ids": [1, 2, 3, 4], "labels": np.arange(4), "name": "abcd?", "weight": 2.0}
    cut = cut_sample(sample, 1, 3)
    assert cut["input_ids"] == [2, 3]
    assert cut["labels"].tolist() == [1, 2]
    assert (cut["name"], cut["weight"]) == ("abcd?", 2.0)
    assert cut_sample([1, 2, 3], 0, 2) == [1, 2]


@pytest.mark.parametrize(
    ("lengths", "words"), [([3, 9], "Sample 1 has 9 tokens"), ([8, 8], "Sample 0 has 8 tokens")]
)
def test_long_samples_are_refused_by_name(lengths: list[int], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        TokenSamples(Rows(lengths), lengths, context_length=7, on_overlong="refuse")
    rows = Rows(lengths)
    stream = StreamOrder(
        [rows[0], rows[1]], tokens_per_step=50, context_length=7, on_overlong="refuse"
    )
    with pytest.raises(BatchError, match=words):
        list(stream._pieces())


def test_wrong_lengths_are_found_out() -> None:
    samples = TokenSamples(Rows([5, 6]), [5, 7], context_length=10)
    assert len(samples[0]["input_ids"]) == 5
    with pytest.raises(BatchError, match=r"Sample 1 has 6 tokens but .* as 7"):
        samples[1]
    with pytest.raises(ConfigurationError, match="2 samples"):
        TokenSamples(Rows([5, 6]), [5], context_length=10)
    with pytest.raises(ConfigurationError, match="empty"):
        TokenSamples(Rows([5, 6]), [5, 0], context_length=10)


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
    assert cached_lengths(rows, file=file).tolist() == rows.lengths
    assert not reads
    file.write_bytes(b"torn")
    assert cached_lengths(rows, file=file).tolist() == read_lengths(rows).tolist() == rows.lengths
