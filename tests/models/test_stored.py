import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.models.stored import (
    JoinedTensor,
    PieceOfTensor,
    SafetensorsFile,
    StackedTensor,
    open_folder,
)


def cut(whole, box):
    return whole[tuple(slice(*ends) for ends in box)]


def boxes(shape):
    intervals = (
        st.integers(0, size - 1).flatmap(
            lambda start, size=size: st.tuples(st.just(start), st.integers(start + 1, size))
        )
        for size in shape
    )
    return st.tuples(*intervals)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Tensors in a file, and the same tensors as they were."""
    generator = torch.Generator().manual_seed(1)
    wholes = {
        "cube": torch.randn(3, 4, 5, generator=generator),
        "other": torch.randn(3, 2, 5, generator=generator),
        "again": torch.randn(3, 4, 5, generator=generator),
        "half": torch.randn(6, 4, generator=generator).bfloat16(),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
    }
    path = tmp_path_factory.mktemp("stored") / "model.safetensors"
    save_file(wholes, path)
    return SafetensorsFile(path), wholes


TREES = {
    "one tensor": (lambda t: t["cube"], lambda w: w["cube"]),
    "bf16": (lambda t: t["half"], lambda w: w["half"]),
    "booleans": (lambda t: t["flags"], lambda w: w["flags"]),
    "a scalar": (lambda t: t["scalar"], lambda w: w["scalar"]),
    "stacked": (
        lambda t: StackedTensor((t["cube"], t["again"]), 1),
        lambda w: torch.stack((w["cube"], w["again"]), 1),
    ),
    "joined": (
        lambda t: JoinedTensor((t["cube"], t["other"], t["again"]), 1),
        lambda w: torch.cat((w["cube"], w["other"], w["again"]), 1),
    ),
    "a piece": (lambda t: PieceOfTensor(t["cube"], 1, 1, 3), lambda w: w["cube"][:, 1:3]),
    "pieces of a tree": (
        lambda t: PieceOfTensor(
            JoinedTensor((StackedTensor((t["half"], t["half"]), 0),) * 2, 1), 1, 3, 10
        ),
        lambda w: torch.cat((torch.stack((w["half"],) * 2),) * 2, 1)[:, 3:10],
    ),
}


@pytest.mark.parametrize("tree", TREES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_box_of_a_tree_is_the_box_of_the_tensor_and_no_more_is_read(stored, tree, data):
    file, wholes = stored
    make, compute = TREES[tree]
    node, expected = make(file.tensors), compute(wholes)
    assert node.shape == tuple(expected.shape)
    box = data.draw(boxes(expected.shape))
    before = file.num_bytes_read
    rows = node.read(box)
    assert torch.equal(rows, cut(expected, box))
    assert rows.dtype == expected.dtype
    assert file.num_bytes_read - before == rows.numel() * rows.itemsize


def test_a_folder_of_one_file_or_of_shards_is_opened_by_its_headers(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        open_folder(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.arange(4.0)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = open_folder(tmp_path)
    assert [list(file.tensors) for file in files] == [["a"], ["b"]]
    save_file({"c": torch.arange(4.0)}, tmp_path / "model.safetensors")
    (file,) = open_folder(tmp_path)
    assert list(file.tensors) == ["c"]
    assert file.num_bytes_read == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": ["a.safetensors"]}}',
    ],
)
def test_a_broken_index_of_shards_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json as an index.* Copy it again"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        safetensors.torch.save({"rows": torch.arange(40.0).view(8, 5)})[:-4],
    ],
)
def test_what_is_no_whole_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*Copy it again"):
        SafetensorsFile(path)
