from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_hetero.core.errors import BatchError, ConfigurationError
from lightning_hetero.data.samples import (
    TokenSamples,
    cached_lengths,
    cut_sample,
    lengths_file,
)
from tests.data.rows import Rows


def test_long_samples_are_cut_with_all_that_goes_with_their_tokens() -> None:
    sample = {"input_ids": [1, 2, 3, 4], "labels": np.arange(4), "name": "abcd?", "weight": 2.0}
    cut = cut_sample(sample, 2)
    assert cut["input_ids"] == [1, 2]
    assert cut["labels"].tolist() == [0, 1]
    assert (cut["name"], cut["weight"]) == ("abcd?", 2.0)
    assert cut_sample([1, 2, 3], 2) == [1, 2]
    samples = TokenSamples(Rows([5, 9]), [5, 9], context_length=7)
    assert [len(samples[i]["input_ids"]) for i in range(2)] == samples.lengths.tolist() == [5, 7]


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
    assert cached_lengths(rows).tolist() == rows.lengths
    assert len(reads) <= 64  # Which file it is, some samples say.
    file.write_bytes(b"torn")
    assert cached_lengths(rows).tolist() == rows.lengths
