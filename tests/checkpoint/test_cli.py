"""`lightning-hetero checkpoint` on folders that were really written."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    LocalStore,
    Tier,
    TierKind,
)
from lightning_hetero.cli import main
from lightning_hetero.core.plan import ParallelPlan
from tests.checkpoint.states import assert_is_state, contents, disk, needs_of, recover, write

PLAN = ParallelPlan.even(world_size=2, num_layers=4, num_stages=2)
ONE = ParallelPlan.even(world_size=1, num_layers=4)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Save steps 1, 2, 3 by two nodes into a folder each."""
    names = [str(tmp_path / "a"), str(tmp_path / "b")]

    def save(rank: int, writer: CheckpointWriter) -> None:
        for step in (1, 2, 3):
            part = contents(step, PLAN, 2)[rank]
            part.metadata["pytorch-lightning_version"] = "2.6.6"  # type: ignore[index]
            writer.save(part).wait_until_confirmed(20)

    write([[disk(LocalStore(name), keep=3)] for name in names], save)
    return names


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["checkpoint", *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_list_says_what_is_complete(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "list", *folders)
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["step", "attempt", "parts", "complete", "in"]
    assert [row[:4] for row in rows[1:]] == [[str(s), "0", "2/2", "yes"] for s in (3, 2, 1)]
    cut = next(Path(folders[1]).glob("*3*/*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-1])
    _, text = run(capsys, "list", *folders)
    assert [line.split()[3] for line in text.splitlines()[1:]] == ["no", "yes", "yes"]
    _, text = run(capsys, "list", folders[0])
    assert [line.split()[2:4] for line in text.splitlines()[1:]] == [["1/2", "no"]] * 3


def test_inspect_says_which_place_has_how_much_of_a_layer(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "inspect", *folders)
    assert (code, text.splitlines()[0]) == (0, "step 3, saved by 2 ranks")
    rows = {line.split()[0]: line.split()[2:] for line in text.splitlines()[1:]}
    assert rows["layer-0000"] == ["100%", "0%", folders[0]]
    assert rows["layer-0003"] == ["0%", "100%", folders[1]]
    _, text = run(capsys, "inspect", folders[0], "--step", "2")
    assert "layer-0003" not in text


def test_prune_keeps_the_newest_complete_ones_and_refuses_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = CheckpointWriter([disk(LocalStore(tmp_path), keep=9)])
    for step in (1, 2, 3, 4):
        writer.save(contents(step, ONE, 1)[0])
    writer.close()
    next(tmp_path.glob("step-*4-*/layer-0001*")).unlink()
    assert run(capsys, "prune", str(tmp_path), "--keep", "1") == (
        0,
        "deleted step 1\ndeleted step 2\n",
    )
    rows = [line.split()[:4:3] for line in run(capsys, "list", str(tmp_path))[1].splitlines()[1:]]
    assert rows == [["4", "no"], ["3", "yes"]]
    assert run(capsys, "prune", str(tmp_path), "--keep", "0")[0] == 2
    assert run(capsys, "prune", str(tmp_path), "--memory", "1")[0] == 2


def test_verify_finds_a_flipped_bit_and_a_torn_manifest(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "verify", *folders)[0] == 0
    target = next(Path(folders[0]).glob("step-*3-*/layer-0001*.weights.safetensors"))
    data = bytearray(target.read_bytes())
    data[-5] ^= 8
    target.write_bytes(data)
    code, text = run(capsys, "verify", *folders)
    assert code == 1
    assert target.name in text
    assert "checksum of block 0" in text
    manifest = next(Path(folders[1]).glob("step-*3-*/part-00001.json"))
    manifest.write_bytes(manifest.read_bytes()[:50])
    code, text = run(capsys, "verify", *folders, "--step", "3")
    assert code == 1
    assert "no valid manifest of parts [1]" in text


def test_what_is_not_there_or_cannot_be_read_is_one_line_and_code_2(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for words, told in (
        (["verify", folders[0]], "no complete checkpoint"),
        (["export", *folders, "--step", "9", "--output", "x"], "[3, 2, 1]"),
        (["list", str(tmp_path / "gone")], "there is no such folder"),
        (["list", "nowhere://bucket/run"], "nowhere"),
        (["verify", *folders, str(tmp_path / "file")], "Not a directory"),
    ):
        code, text = run(capsys, *words)
        assert (code, text.count("\n")) == (2, 1), text
        assert told in text
    code, text = run(capsys, "list", *folders, str(tmp_path / "file"))
    assert (code, "Not a directory" in text) == (2, True)
    assert [row.split()[0] for row in text.splitlines()[1:4]] == ["3", "2", "1"]
    assert run(capsys, "list", str(tmp_path / "empty")) == (0, "no checkpoints\n")


def test_two_runs_in_a_folder_are_told_apart_and_pruned_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ParallelPlan.even(world_size=1, num_layers=4)
    writer = CheckpointWriter([disk(LocalStore(tmp_path), keep=1)])
    for run_id, step in (("a", 5), ("a", 9), ("b", 1), ("b", 2)):
        content = contents(step, alone, 1)[0]
        content = replace(content, id=replace(content.id, run=run_id))
        writer.save(content).wait_until_confirmed(20)
    writer.close()
    rows = [line.split() for line in run(capsys, "list", str(tmp_path))[1].splitlines()]
    assert rows[0][-1] == "run"
    assert [(row[0], row[-1]) for row in rows[1:]] == [("2", "b"), ("9", "a")]
    assert run(capsys, "verify", str(tmp_path))[1].startswith("step 2:")
    assert run(capsys, "verify", str(tmp_path), "--step", "9")[1].startswith("step 9:")


def test_a_rejected_step_is_not_gone_on_from(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "reject", "3", *folders)
    assert code == 0
    assert text.count("rejected step 3 in") == 2
    code, text = run(capsys, "list", *folders)
    assert [line.split()[:4] for line in text.splitlines()[1:4]] == [
        ["3", "0", "0/?", "no"],
        ["2", "0", "2/2", "yes"],
        ["1", "0", "2/2", "yes"],
    ]
    assert "rejected" in text
    needs = needs_of(0, ONE, 1)
    tiers = [Tier(kind=TierKind.REMOTE, store=LocalStore(name), name=name) for name in folders]
    assert_is_state(recover(needs, tiers), needs, 2)
    code, text = run(capsys, "reject", "4", *folders)
    assert code != 0
    assert "no checkpoint of step 4" in text
