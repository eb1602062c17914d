"""A Python that has torchft, which is no dependency of anything here but the recovery benchmark.

A virtual environment of its own, kept in the cache, sees the packages of this one and has
`torchft-nightly` and what else that needs besides.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

_PACKAGE = "torchft-nightly"


def python_with_torchft() -> tuple[str, str]:
    """Return the path of its Python, and torchft's version; installs it the first time.

    Raises:
        RuntimeError: torchft can't be installed or imported here, with what was said.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "lightning_hetero" / f"torchft-{sys.version_info[0]}.{sys.version_info[1]}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, clear=True, with_pip=True)
        ours = sysconfig.get_paths()["purelib"]
        theirs = _said(
            [str(python), "-c", "import sysconfig as s; print(s.get_paths()['purelib'])"]
        )
        Path(theirs, "beside.pth").write_text(f"{ours}\n")
        _said([str(python), "-m", "pip", "install", "--quiet", _PACKAGE])
        _said([str(python), "-c", "import torchft"])
        (folder / "installed").touch()
    version = f"import importlib.metadata as m; print(m.version({_PACKAGE!r}))"
    return str(python), _said([str(python), "-c", version])


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()
