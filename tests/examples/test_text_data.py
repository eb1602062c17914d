import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def text_data():
    spec = importlib.util.spec_from_file_location("text_data", EXAMPLES / "text_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pieces_join_to_the_file_and_keep_decorators_with_what_they_decorate(text_data):
    source = (
        b'"""Doc."""\nimport a\n\n@first\n@second(\n    1,\n)\ndef one():\n    pass\n\n'
        b"class Two:\n    @inner\n    def three(self): ...\n\nasync def four(): ...\nx = 1\n"
    )
    pieces = text_data.top_level_pieces(source)
    assert b"\n".join(pieces) == source
    assert [p.split(b"\n")[0] for p in pieces] == [
        b'"""Doc."""',
        b"@first",
        b"class Two:",
        b"async def four(): ...",
    ]


def test_samples_are_clipped_byte_tokens_with_a_long_tail(text_data):
    whole = text_data.PythonSourceDataset("train", context_length=100_000, max_files=20)
    clipped = text_data.PythonSourceDataset("train", context_length=64, max_files=20)
    assert len(whole) == len(clipped) > 50
    for index in range(len(whole)):
        assert whole[index].tolist()[:64] == clipped[index].tolist()
        assert whole[index][-1] == text_data.END_OF_TEXT
        assert whole[index][:-1].max() < 256
    lengths = sorted(len(whole[index]) for index in range(len(whole)))
    assert lengths[-1] > 10 * lengths[len(lengths) // 2]


def test_splits_share_no_file_and_are_the_same_each_time(text_data):
    splits = [text_data.PythonSourceDataset(s, max_files=200) for s in ("train", "val", "val")]
    train, val, again = ([row.tolist() for row in split.samples] for split in splits)
    assert val == again
    assert val
    assert len(train) > 5 * len(val)
    long_rows = {tuple(row) for row in val if len(row) > 200}
    assert not long_rows & {tuple(row) for row in train}


def test_decode_stops_at_the_end_of_the_text(text_data):
    assert text_data.decode([104, 105, text_data.END_OF_TEXT, 120]) == "hi"
    assert text_data.decode([104, 0xC3]) == "h\ufffd"


def test_data_module_gives_packed_batches_of_both_splits(text_data):
    data = text_data.PythonSourceData(context_length=32, samples_per_batch=4, max_files=40)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batch = next(iter(loader))
        assert batch.num_samples == 4
        assert batch.max_seqlen <= 32
