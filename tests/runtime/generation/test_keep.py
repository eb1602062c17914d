"""The command that keeps a script's process, so that the script begins only once."""

import os
import sys
from pathlib import Path

import pytest
import torch

from lightning_hetero import keep
from lightning_hetero.runtime.generation import entering
from lightning_hetero.runtime.generation.keeper import JOIN
from tests.processes import free_port
from tests.scripts import run_python

SCRIPT = """
import os, sys
from lightning_hetero.runtime.generation.keeper import KEPT
with open("begun", "a") as file:
    file.write(" ".join([*sys.argv[1:], str(KEPT in os.environ)]) + "\\n")
sys.exit(int(sys.argv[1]))
"""

TRAINS = """
import lightning as L
from lightning_hetero import ElasticRestart, HeteroStrategy, LayerwiseCheckpoint
from tests.toy import ToyModule, ToyOptions, loader, quiet

if __name__ == "__main__":
    with open("begun", "a") as file:
        file.write("begun\\n")
    callbacks = [LayerwiseCheckpoint("saved"), ElasticRestart(in_place=True)]
    options = {**quiet(max_steps=2, devices=1), "enable_checkpointing": None}
    trainer = L.Trainer(strategy=HeteroStrategy(), callbacks=callbacks, **options)
    trainer.fit(ToyModule(ToyOptions()), loader(24, 4))
    assert trainer.global_step == 2
"""


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOIN, raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in (("MASTER_ADDR", "host"), ("MASTER_PORT", "29500"), ("RANK", "0")):
        monkeypatch.setenv(name, value)


def test_rank_0_serves_the_store_unless_the_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    task = keep.task_of(["script.py", "--epochs", "3"])
    assert task.command == [sys.executable, "-u", "script.py", "--epochs", "3"]
    assert (task.address, task.port, task.serves, task.replaces) == ("host", 29500, True, True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    task = keep.task_of(["--no-replace", "-m", "package.train", "-m", "x"])
    assert task.command == [sys.executable, "-u", "-m", "package.train", "-m", "x"]
    assert (task.serves, task.replaces) == (False, False)


def test_a_joiner_is_started_with_the_address_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOIN, "first:1234")
    task = keep.task_of(["script.py"])
    assert (task.address, task.port, task.serves) == ("first", 1234, False)
    assert task.workers[0][JOIN] == "first:1234"


@pytest.mark.parametrize("name", ["MASTER_PORT", "RANK"])
def test_without_a_launcher_it_says_what_is_lacking(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(SystemExit):
        keep.task_of(["script.py"])
    assert f"{name} must be in the environment, as torchrun sets it" in capsys.readouterr().err


def launcher(port: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**address, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0"}


def test_it_ends_with_the_code_of_a_script_that_fails_before_it_is_a_member(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["-m", "lightning_hetero.keep", "script.py", "7", "--depth=2"]
    code, output = run_python(arguments, folder=tmp_path, **launcher(free_port()))
    assert code == 7, output
    assert (tmp_path / "begun").read_text() == "7 --depth=2 True\n"


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_a_script_that_trains_in_place_begins_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    arguments = ["-m", "lightning_hetero.keep", "script.py"]
    here = {"PYTHONPATH": str(Path(__file__).parents[3])}
    code, output = run_python(arguments, folder=tmp_path, **launcher(free_port()), **here)
    assert code == 0, output
    assert (tmp_path / "begun").read_text() == "begun\n"


def test_a_process_gives_up_cores_that_others_need_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", entering._SHARED):
        monkeypatch.setenv(name, "")  # So that it is put back.
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    try:
        torch.set_num_threads(8)
        for num_processes, num_threads in ((1, 8), (4, 2), (1, 2)):  # It takes none back.
            entering.share_cores(num_processes)
            assert torch.get_num_threads() == num_threads
        assert os.environ["OMP_NUM_THREADS"] == "2"
        monkeypatch.delenv(entering._SHARED)
        torch.set_num_threads(5)
        entering.share_cores(4)
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
