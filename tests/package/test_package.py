"""What is handed to others: the wheel, its types, and the archive of sources."""

import importlib
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.wheel import ROOT, build_wheel, unpack_wheel

USER = Path(__file__).with_name("user.py")
_BUILD = "import sys; from setuptools import build_meta as b; print(b.{}(sys.argv[1]))"


@pytest.mark.slow
def test_a_users_script_is_typed_by_what_the_wheel_installs(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    # The wheel comes first, then what it needs; this checkout isn't there.
    home = tmp_path / "python"
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    needed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "wheel.pth").write_text("\n".join([str(unpack_wheel(tmp_path)), *needed]))
    options = ["--strict", "--cache-dir", str(tmp_path / "cache"), "--config-file", ""]
    options += ["--python-executable", str(home / "bin" / "python")]
    script = tmp_path / "user.py"
    script.write_text(USER.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, script.name],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("missing", ["huggingface_hub", "transformers"])
def test_an_extra_that_is_not_installed_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = "lightning_hetero.models.huggingface"
    for name in [name for name in sys.modules if name.startswith(room)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-hetero\[hf\]'"):
        importlib.import_module(room)


@pytest.mark.slow
def test_the_archive_of_sources_builds_the_same_wheel_and_has_the_tests(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no repository")
    tracked = {name for name in listed.stdout.splitlines() if not name.startswith(".")}
    sources = tmp_path / "checkout"
    for name in tracked:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_bytes((ROOT / name).read_bytes())
    archive = tmp_path / _built("build_sdist", sources, tmp_path)
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        file.extractall(tmp_path / "archive", filter="data")
    assert sorted(tracked - names) == []
    (unpacked,) = (tmp_path / "archive").iterdir()
    again = tmp_path / "again"
    again.mkdir()
    wheel = again / _built("build_wheel", unpacked, again)
    first = tmp_path / "first"
    first.mkdir()
    assert _contents(wheel) == _contents(build_wheel(first))


def _built(hook: str, sources: Path, folder: Path) -> str:
    """Run a build hook among some sources; return the name of what it has made."""
    command = [sys.executable, "-c", _BUILD.format(hook), str(folder)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def _contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as file:
        return {item.filename: item.CRC for item in file.infolist()}
