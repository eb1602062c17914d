"""Files are ordinary safetensors, manifests notice any change, metadata loads without pickle."""

import contextlib
import itertools
import json
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    LocalStore,
    Tier,
    TierKind,
)
from lightning_hetero.checkpoint.encoding import encode_metadata
from lightning_hetero.checkpoint.manifest import (
    BlockChecksums,
    CheckpointId,
    FileEntry,
    PartManifest,
    fault_in,
)
from lightning_hetero.core.errors import CheckpointError
from tests.checkpoint.states import PLANS, contents, full_tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one saved checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    writer = CheckpointWriter([Tier(kind=TierKind.DISK, store=LocalStore(root))])
    plan, size = PLANS["one device"]
    saved = writer.save(contents(6, plan, size)[0])
    saved.wait_until_confirmed(20)
    writer.close()
    return root / saved.id.folder


def test_there_is_one_file_per_layer_and_kind_and_a_manifest(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    units = ["after", "before", *(f"layer-{i:04d}" for i in range(4))]
    files = [f"{u}.part-00000.{k}.safetensors" for u in units for k in ("weights", "optimizer")]
    assert names == sorted([*files, "confirmed", "metadata.pt", "part-00000.json", "rank-00000.pt"])


def test_the_safetensors_package_reads_the_files(folder: Path) -> None:
    weights = load_file(folder / "layer-0002.part-00000.weights.safetensors")
    assert sorted(weights) == ["2.down", "2.norm", "2.up"]
    assert torch.equal(weights["2.up"], full_tensor("2.up", (32, 8), 6))
    metadata = torch.load(folder / "metadata.pt", weights_only=True)
    assert metadata == {"global_step": 6, "loops": {"done": [6, "x"]}}
    # The dim along which it is cut comes first.
    assert torch.equal(weights["2.down"].movedim(0, 1), full_tensor("2.down", (8, 32), 6))
    state = load_file(folder / "layer-0002.part-00000.optimizer.safetensors")
    assert torch.equal(state["2.norm/exp_avg"], full_tensor("2.norm/m", (8,), 6))
    assert state["2.norm/step"].shape == ()


def test_metadata_that_needs_pickle_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"metadata entry \['callbacks'\]"):
        encode_metadata({"good": 1, "callbacks": {"x": Path("a")}}, what="metadata")


@given(position=st.integers(0, 10**9), bit=st.integers(0, 7), is_cut=st.booleans())
def test_a_manifest_that_is_cut_or_has_a_flipped_bit_is_refused_or_equal(
    position: int, bit: int, *, is_cut: bool
) -> None:
    manifest = PartManifest(
        id=CheckpointId(12, 3),
        part=1,
        world_size=2,
        num_layers=4,
        block_bytes=1024,
        files=(),
        slices=(),
        plan=None,
        versions={"torch": "2"},
    )
    data = bytearray(manifest.encode())
    position %= len(data)
    data[position] ^= 1 << bit
    data = data[:position] if is_cut else data
    with contextlib.suppress(CheckpointError):
        assert PartManifest.decode(bytes(data)) == manifest
        assert not is_cut


def test_a_manifest_of_another_format_names_the_versions(folder: Path) -> None:
    text = (folder / "part-00000.json").read_text()
    body = json.loads(text)["manifest"]
    body["format"] = 2
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    outer = f'{{"crc32": "{zlib.crc32(canonical.encode()):08x}", "manifest": {canonical}}}\n'
    with pytest.raises(CheckpointError, match=r"format 2.*torch"):
        PartManifest.decode(outer.encode())


@given(
    data=st.binary(min_size=1, max_size=300),
    block=st.integers(1, 64),
    cuts=st.lists(st.integers(0, 300), max_size=5),
    flip=st.integers(0, 10**6),
)
def test_checksums_find_the_flipped_block_however_the_stream_is_cut(
    data: bytes, block: int, cuts: list[int], flip: int
) -> None:
    checksums = BlockChecksums(block)
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        checksums.update(data[start:stop])
    found = checksums.finish()
    assert len(found) == -(-len(data) // block)
    entry = FileEntry("f", None, len(data), found)
    assert fault_in(data, 0, len(data), entry, block) == ""
    broken = bytearray(data)
    position = flip % len(data)
    broken[position] ^= 1
    assert f"of block {position // block} " in fault_in(broken, 0, len(data), entry, block)
    start = position - position % block
    stop = min(start + block, len(data))
    assert fault_in(data[start:stop], start, stop, entry, block) == ""
    assert f"of block {position // block} " in fault_in(
        broken[start:stop], start, stop, entry, block
    )
