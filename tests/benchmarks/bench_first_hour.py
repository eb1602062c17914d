"""How long a stranger waits until a mistake is said: real commands in an empty environment."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.benchmarks.harness import Row
from tests.callbacks.servers import S3Server
from tests.first_hour import MISTAKES, Mistake
from tests.processes import clean_environment
from tests.scripts import launcher_environments
from tests.wheel import build_wheel

_REPEATS = 3


def make_environment(folder: Path) -> Path:
    """Install the wheel into an empty environment beside this one's torch; return its `bin`."""
    home = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # Paths of a .pth file come last, and .pth files there (the checkout's own) aren't read.
    (packages / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (folder / "wheel").mkdir()
    install = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--quiet"]
    wheel = build_wheel(folder / "wheel")
    subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True)
    return home / "bin"


def time_s(mistake: Mistake, programs: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Make a mistake once; return the seconds until all processes have ended, and of processor."""
    folder = Path(tempfile.mkdtemp())
    mistake.make_files(folder)
    command = [programs / "python", *mistake.words]
    if mistake.words[0] == "-m":
        command = [programs / "lightning-hetero", *mistake.words[2:]]
    begin_s, begin_cpu_s = time.monotonic(), _children_s()
    with (folder / "output").open("w") as output:
        running = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=clean_environment(**variables, HOME=str(folder), **launched),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for launched in launcher_environments(mistake.num_processes)
        ]
        codes = [process.wait() for process in running]
    taken_s, cpu_s = time.monotonic() - begin_s, _children_s() - begin_cpu_s
    assert all(codes), f"{mistake.name}: ended with {codes}"
    mistake.last_line((folder / "output").read_text())
    shutil.rmtree(folder)
    return taken_s, cpu_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run() -> list[Row]:
    """Return the slowest mistake of one process, and of processes that meet."""
    folder = Path(tempfile.mkdtemp())
    programs = make_environment(folder)
    for name in ("PYTHONPATH", "AWS_ENDPOINT_URL"):
        os.environ.pop(name, None)
    slowest: dict[float, tuple[float, str]] = {}
    with S3Server() as server:
        options = server.options(server.port)
        keys = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
        keys |= {"AWS_ENDPOINT_URL": options["endpoint_url"], "AWS_DEFAULT_REGION": "us-east-1"}
        for mistake in MISTAKES:
            variables = keys if mistake.needs_s3 else {}
            times = [time_s(mistake, programs, variables) for _ in range(_REPEATS)]
            median_s, cpu_s = sorted(times)[_REPEATS // 2]
            print(
                f"  {median_s:6.2f} s of {mistake.limit_s:.0f} s, {cpu_s:5.2f} s of processor  "
                f"{mistake.name}",
                flush=True,
            )
            found = (median_s, mistake.name)
            slowest[mistake.limit_s] = max(slowest.get(mistake.limit_s, found), found)
    shutil.rmtree(folder)
    return [
        Row(
            name=f"slowest of {len(MISTAKES)} mistakes, bar {limit_s:.0f} s",
            ours=median_s,
            target=limit_s,
            note=f"{name}; from the wheel, until its processes have ended",
        )
        for limit_s, (median_s, name) in sorted(slowest.items())
    ]
