import pytest

from examples import text_data


def test_pieces_join_to_the_file_and_keep_decorators_with_what_they_decorate():
    source = (
        b'"""Doc."""\nimport a\n\n@first\n@second(\n    1,\n)\ndef one():\n    pass\n\n'
        b"class Two:\n    @inner\n    def three(self): ...\n\nasync def four(): ...\nx = 1\n"
    )
    pieces = text_data.top_level_pieces(source)
    assert b"\n".join(pieces) == source
    firsts = [b'"""Doc."""', b"@first", b"class Two:", b"async def four(): ..."]
    assert [piece.split(b"\n")[0] for piece in pieces] == firsts


def test_samples_are_clipped_byte_tokens_with_a_long_tail_and_splits_share_no_file():
    whole, clipped, val = (
        text_data.PythonSourceDataset(split, context_length=context, max_files=40)
        for split, context in (("train", 100_000), ("train", 64), ("val", 100_000))
    )
    rows, held = [[row.tolist() for row in data.samples] for data in (whole, val)]
    assert [row[:64] for row in rows] == [row.tolist() for row in clipped.samples]
    assert all(row[-1] == text_data.END_OF_TEXT and max(row[:-1]) < 256 for row in rows)
    lengths = sorted(map(len, rows))
    assert lengths[-1] > 10 * lengths[len(lengths) // 2]
    assert held
    assert not {tuple(row) for row in held if len(row) > 200} & set(map(tuple, rows))
    assert text_data.decode([104, 105, text_data.END_OF_TEXT, 120]) == "hi"
    assert text_data.decode([104, 0xC3]) == "h\ufffd"


@pytest.mark.parametrize("name", ["train_dataloader", "val_dataloader"])
def test_data_module_gives_packed_batches_of_both_splits(name):
    data = text_data.PythonSourceData(context_length=32, samples_per_batch=4, max_files=40)
    data.setup("fit")
    batch = next(iter(getattr(data, name)()))
    assert batch.num_samples == 4
    assert batch.max_seqlen <= 32
