"""Build the wheel, and run scripts as somebody does who has installed it and has no checkout."""

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.processes import clean_environment, fork_server
from tests.scripts import TIMEOUT_S, launcher_environments, run_as_main

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = ("LICENSE", "README.md", "lightning_hetero", "pyproject.toml", "setup.py")
_BUILD = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout in a folder, without network, and return its path."""
    sources = folder / "sources"
    sources.mkdir()
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            hidden = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, sources / name, ignore=hidden)
        else:
            shutil.copy(ROOT / name, sources / name)
    subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder)],
        cwd=sources,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack_wheel(folder: Path) -> Path:
    """Build the wheel and return a folder that holds what it installs, and nothing else."""
    installed = folder / "installed"
    with zipfile.ZipFile(build_wheel(folder)) as wheel:
        wheel.extractall(installed)
    return installed


class Stranger:
    """Runs scripts in forks of one process that has imported the wheel and what it needs.

    Whatever they start is a real `python`, which finds the wheel, too.

    Args:
        installed: What `unpack_wheel` returned.
    """

    def __init__(self, installed: Path) -> None:
        self._path = [str(installed), *(p for p in sys.path if Path(p).resolve() != ROOT)]
        self._connection, theirs = fork_server().Pipe()
        self._process = fork_server().Process(target=_serve, args=(self._path, theirs))
        self._process.start()
        theirs.close()

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        folder: Path,
        num_processes: int = 1,
        **variables: str,
    ) -> tuple[int, str]:
        """Run what would follow `python` in a folder to its end; see `scripts.run_python`.

        Returns:
            The largest exit code of the processes, and what they wrote to both outputs.
        """
        output = folder / "output"
        output.unlink(missing_ok=True)
        path = os.pathsep.join(self._path)
        runs = [
            clean_environment(**{"PYTHONPATH": path, **variables, **launched})
            for launched in launcher_environments(num_processes)
        ]
        self._connection.send(([str(a) for a in arguments], output, folder, runs))
        assert self._connection.poll(TIMEOUT_S), f"{arguments} does not end"
        code: int = self._connection.recv()
        with output.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Held by what the script has started.
        return code, output.read_text("utf-8", errors="replace")

    def close(self) -> None:
        """End the process, and what still runs."""
        self._process.kill()
        self._process.join()


def _serve(path: list[str], connection: Connection) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_hetero"]:
        del sys.modules[name]  # The checkout's.
    sys.path[:] = path
    import lightning_hetero
    import lightning_hetero.checkpoint
    import lightning_hetero.data
    import lightning_hetero.strategy

    assert str(lightning_hetero.__file__).startswith(path[0])
    try:
        import s3fs
        import transformers.models.qwen3.modeling_qwen3
    except ImportError:
        pass
    else:
        del s3fs, transformers
    while True:
        try:
            arguments, output, folder, environments = connection.recv()
        except EOFError:
            return
        children = []
        for environment in environments:
            if (child := os.fork()) == 0:
                _run_and_exit(arguments, output, folder, environment)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        connection.send(max(codes, key=abs))


def _run_and_exit(
    arguments: list[str], output: Path, folder: Path, environment: dict[str, str]
) -> None:
    code = 1
    try:
        run_as_main(arguments, output, folder, environment)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
